"""Data sets of many files, local or in an object store: listing, sizes, order, cache and formats."""
