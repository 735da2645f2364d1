"""Finds the GPUs of a node, and opens this rank's."""
