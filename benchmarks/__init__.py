"""Benchmarks: what meshwise costs beside hand-written torch, measured in the same processes."""
