"""Models as Keras' `keras.models` has them, and from Keras."""

from typing import TYPE_CHECKING

from dptrain.models.model import Model
from dptrain.models.sequential import Sequential
from dptrain.registry.names import not_there

__all__ = ["Model", "Sequential"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("models", __all__)
