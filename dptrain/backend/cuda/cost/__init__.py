"""Predicted times of kernels; needs no GPU."""
