"""Normalization over the global batch, within a sample, and of kernels."""
