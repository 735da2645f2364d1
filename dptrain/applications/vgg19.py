"""VGG19: preprocessing, class names and the network, under Keras' names."""

from typing import TYPE_CHECKING

from dptrain.applications.vgg16 import decode_predictions, preprocess_input, vgg
from dptrain.registry.names import not_there

__all__ = ["VGG19", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.vgg19", __all__)

VGG19 = vgg("VGG19", (2, 2, 4, 4, 4))
