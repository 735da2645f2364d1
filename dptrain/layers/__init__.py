"""Layers, as Keras has them: what to compute, in ops. A new layer is one class here and one line in this file."""

from typing import TYPE_CHECKING

from dptrain.layers.activation import ELU, Activation, Identity, LeakyReLU, ReLU, Softmax
from dptrain.layers.base import Layer
from dptrain.layers.convolution import Conv2D, Conv2DTranspose, Convolution2D, Convolution2DTranspose
from dptrain.layers.dense import Dense
from dptrain.layers.dropout import Dropout
from dptrain.layers.embedding import Embedding
from dptrain.layers.input import Input, InputLayer
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.lambda_layer import Lambda
from dptrain.layers.merging import (
    Add,
    Average,
    Concatenate,
    Dot,
    Maximum,
    Minimum,
    Multiply,
    Subtract,
    add,
    average,
    concatenate,
    dot,
    maximum,
    minimum,
    multiply,
    subtract,
)
from dptrain.layers.normalization import BatchNormalization, LayerNormalization
from dptrain.layers.pooling import (
    AveragePooling2D,
    AvgPool2D,
    GlobalAveragePooling2D,
    GlobalAvgPool2D,
    GlobalMaxPool2D,
    GlobalMaxPooling2D,
    MaxPool2D,
    MaxPooling2D,
)
from dptrain.layers.rescaling import Rescaling
from dptrain.layers.reshaping import Flatten, Permute, RepeatVector, Reshape, UpSampling2D, ZeroPadding2D
from dptrain.layers.standardization import Normalization
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Registry

# Names as Keras' configurations have them; serialisation and the test matrix read this table.
LAYERS: dict[str, type[Layer]] = {
    cls.__name__: cls
    for cls in (
        *(Activation, Add, Average, AveragePooling2D, BatchNormalization, Concatenate, Conv2D, Conv2DTranspose, Dense),
        *(Dot, Dropout, ELU, Embedding, Flatten, GlobalAveragePooling2D, GlobalMaxPooling2D, Identity, InputLayer),
        *(Lambda, LayerNormalization, LeakyReLU, MaxPooling2D, Maximum, Minimum, Multiply, Normalization, Permute),
        *(ReLU, RepeatVector, Rescaling, Reshape, Softmax, Subtract, UpSampling2D, ZeroPadding2D),
    )
}

__all__ = [
    "ELU",
    "LAYERS",
    "Activation",
    "Add",
    "Average",
    "AveragePooling2D",
    "AvgPool2D",
    "BatchNormalization",
    "Concatenate",
    "Conv2D",
    "Conv2DTranspose",
    "Convolution2D",
    "Convolution2DTranspose",
    "Dense",
    "Dot",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAveragePooling2D",
    "GlobalAvgPool2D",
    "GlobalMaxPool2D",
    "GlobalMaxPooling2D",
    "Identity",
    "Input",
    "InputLayer",
    "InputSpec",
    "Lambda",
    "Layer",
    "LayerNormalization",
    "LeakyReLU",
    "MaxPool2D",
    "MaxPooling2D",
    "Maximum",
    "Minimum",
    "Multiply",
    "Normalization",
    "Permute",
    "ReLU",
    "RepeatVector",
    "Rescaling",
    "Reshape",
    "Softmax",
    "Subtract",
    "UpSampling2D",
    "ZeroPadding2D",
    "add",
    "average",
    "concatenate",
    "deserialize",
    "dot",
    "maximum",
    "minimum",
    "multiply",
    "serialize",
    "subtract",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("layers", __all__)

_registry: Registry[Layer] = Registry("layer", "keras.layers", Layer, LAYERS)
serialize, deserialize = _registry.serialize, _registry.deserialize
