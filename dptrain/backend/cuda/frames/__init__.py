"""Frames: the loops, threads, tiles and calls that a GPU writes around the statements of a nest."""
