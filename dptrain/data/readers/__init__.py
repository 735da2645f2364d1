"""Readers of arrays, pictures and texts."""
