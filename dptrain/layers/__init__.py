"""Layers: what to compute, with no device code. A new layer is one file here and one line in this one."""

from dptrain.layers.activation import Activation
from dptrain.layers.base import Layer, LayerBuffers, StepContext
from dptrain.layers.dense import Dense
from dptrain.layers.dropout import Dropout
from dptrain.layers.flatten import Flatten
from dptrain.layers.rescaling import Rescaling

# Names as Keras' configurations have them; serialisation and the test matrix read this table.
LAYERS: dict[str, type[Layer]] = {
    "Activation": Activation,
    "Dense": Dense,
    "Dropout": Dropout,
    "Flatten": Flatten,
    "Rescaling": Rescaling,
}

__all__ = ["LAYERS", "Activation", "Dense", "Dropout", "Flatten", "Layer", "LayerBuffers", "Rescaling", "StepContext"]
