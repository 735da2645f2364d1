"""Data sets under Keras' names: `datasets.mnist.load_data()`, `datasets.load("strokes")`."""

from dptrain.data import fashion_mnist, load, mnist

__all__ = ["fashion_mnist", "load", "mnist"]
