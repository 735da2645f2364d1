"""Data sets: reading, generating, fetching, and sharing them out among ranks."""

from dptrain.data import fashion_mnist, mnist
from dptrain.data.loading import load

__all__ = ["fashion_mnist", "load", "mnist"]
