"""Data sets under Keras' names: `datasets.mnist.load_data()`, `datasets.load("strokes")`."""

from typing import TYPE_CHECKING

from dptrain.data.loading import load
from dptrain.datasets import fashion_mnist, mnist
from dptrain.registry.names import not_there

__all__ = ["fashion_mnist", "load", "mnist"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("datasets", __all__)
