"""Recurrent layers: a base of loops over cells, one file a family of cells, and wrappers of layers for sequences."""
