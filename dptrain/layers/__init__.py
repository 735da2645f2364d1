"""Layers: what to compute, with no device code. A new layer is one class here and one line in this file."""

from typing import TYPE_CHECKING

from dptrain.layers.activation import ELU, Activation, LeakyReLU, ReLU, Softmax
from dptrain.layers.base import Layer, LayerBuffers, StepContext
from dptrain.layers.batch_normalization import BatchNormalization
from dptrain.layers.dense import Dense
from dptrain.layers.dropout import Dropout
from dptrain.layers.flatten import Flatten, Reshape
from dptrain.layers.input import Input, InputLayer
from dptrain.layers.rescaling import Rescaling
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Registry

# Names as Keras' configurations have them; serialisation and the test matrix read this table.
LAYERS: dict[str, type[Layer]] = {
    "Activation": Activation,
    "BatchNormalization": BatchNormalization,
    "Dense": Dense,
    "Dropout": Dropout,
    "ELU": ELU,
    "Flatten": Flatten,
    "InputLayer": InputLayer,
    "LeakyReLU": LeakyReLU,
    "ReLU": ReLU,
    "Rescaling": Rescaling,
    "Reshape": Reshape,
    "Softmax": Softmax,
}

__all__ = [
    "ELU",
    "LAYERS",
    "Activation",
    "BatchNormalization",
    "Dense",
    "Dropout",
    "Flatten",
    "Input",
    "InputLayer",
    "Layer",
    "LayerBuffers",
    "LeakyReLU",
    "ReLU",
    "Rescaling",
    "Reshape",
    "Softmax",
    "StepContext",
    "deserialize",
    "serialize",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("layers", __all__)

_registry: Registry[Layer] = Registry("layer", "keras.layers", Layer, LAYERS)
serialize, deserialize = _registry.serialize, _registry.deserialize
