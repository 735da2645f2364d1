"""MNIST: handwritten digits, Y. LeCun et al., 1998; under Keras' name."""

from typing import TYPE_CHECKING

from dptrain.data.loading import load_data_of
from dptrain.registry.names import not_there

__all__ = ["load_data"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("datasets.mnist", __all__)

load_data = load_data_of("mnist")
