"""Exact reduction and the order in which the parallelisms are applied."""
