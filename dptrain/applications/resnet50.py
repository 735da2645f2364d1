"""ResNet50: preprocessing, class names and the network, under Keras' names."""

from typing import TYPE_CHECKING

from dptrain.applications.resnet import ResNet50, decode_predictions, preprocess_input
from dptrain.registry.names import not_there

__all__ = ["ResNet50", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.resnet50", __all__)
