"""NASNet: preprocessing and class names, under Keras' names."""

from typing import TYPE_CHECKING

from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.registry.names import not_there

__all__ = ["decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.nasnet", __all__)

preprocess_input = preprocessing("tf")
