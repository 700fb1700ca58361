"""Which samples a step holds, and how they are loaded."""
