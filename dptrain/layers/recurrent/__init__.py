"""Recurrent layers: a base of loops over cells, a file per family of cells, and wrappers of layers for sequences."""
