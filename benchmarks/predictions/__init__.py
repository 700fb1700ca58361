"""How far predictions are off: time, memory and the choice of the layout, over many kinds of models."""
