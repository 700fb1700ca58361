"""Which layout to take: every legal one, the best cut of each, and why the others lost."""
