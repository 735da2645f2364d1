"""Data sets: reading, generating, fetching, and sharing them out among ranks."""

from dptrain.data.loading import load

__all__ = ["load"]
