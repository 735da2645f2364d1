"""Layers of general use: Dense, Embedding, Input, Lambda, Masking; and layers around others."""
