"""Data sets: sources of rows on disk or in memory, their formats, the built-in set and the catalogue of names."""
