"""Dropout and noise in training."""
