"""What runs together, as data: statements that compute elements of tensors."""
