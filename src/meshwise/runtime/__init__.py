"""The interpreter on tensors, and the loops around it."""
