"""Layers with options that are drawn together, beside plain NumPy of a few lines."""
