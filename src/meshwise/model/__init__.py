"""The model as units: capture, graph, cuts and generated code."""
