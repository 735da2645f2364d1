"""Attention, with and without projections of heads."""
