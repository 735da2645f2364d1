"""Data sets under Keras' names: `datasets.mnist.load_data()`, `datasets.load("strokes")`.

`path` arguments name Keras' file on this machine, or in `~/.keras/datasets`: nothing is downloaded. AgreedError is
raised if a file is missing or has another SHA-256, ConfigError for arguments out of range.
"""

from typing import TYPE_CHECKING

from dptrain.data.loading import load
from dptrain.datasets import (
    boston_housing,
    california_housing,
    cifar10,
    cifar100,
    fashion_mnist,
    imdb,
    mnist,
    reuters,
)
from dptrain.registry.names import not_there

__all__ = [
    "boston_housing",
    "california_housing",
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "imdb",
    "load",
    "mnist",
    "reuters",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("datasets", __all__)
