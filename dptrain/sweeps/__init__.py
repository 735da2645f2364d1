"""Sweeps: many settings, many seeds, with error bars."""
