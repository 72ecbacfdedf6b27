"""Learn: arithmetic on tensors, and the life of the optimiser."""
