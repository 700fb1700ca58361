"""What a layout costs: seconds and bytes, from measured or counted units and the replayed program."""
