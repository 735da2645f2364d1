"""Layers, as Keras has them: what to compute, in ops. A new layer is one class here and one line in this file."""

from typing import TYPE_CHECKING

from dptrain.layers.activation import ELU, Activation, Identity, LeakyReLU, ReLU, Softmax
from dptrain.layers.base import Layer
from dptrain.layers.dense import Dense
from dptrain.layers.input import Input, InputLayer
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.rescaling import Rescaling
from dptrain.layers.reshaping import Flatten, Permute, RepeatVector, Reshape, UpSampling2D, ZeroPadding2D
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Registry

# Names as Keras' configurations have them; serialisation and the test matrix read this table.
LAYERS: dict[str, type[Layer]] = {
    cls.__name__: cls
    for cls in (
        *(Activation, Dense, ELU, Flatten, Identity, InputLayer, LeakyReLU, Permute, ReLU, RepeatVector, Rescaling),
        *(Reshape, Softmax, UpSampling2D, ZeroPadding2D),
    )
}

__all__ = [
    "ELU",
    "LAYERS",
    "Activation",
    "Dense",
    "Flatten",
    "Identity",
    "Input",
    "InputLayer",
    "InputSpec",
    "Layer",
    "LeakyReLU",
    "Permute",
    "ReLU",
    "RepeatVector",
    "Rescaling",
    "Reshape",
    "Softmax",
    "UpSampling2D",
    "ZeroPadding2D",
    "deserialize",
    "serialize",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("layers", __all__)

_registry: Registry[Layer] = Registry("layer", "keras.layers", Layer, LAYERS)
serialize, deserialize = _registry.serialize, _registry.deserialize
