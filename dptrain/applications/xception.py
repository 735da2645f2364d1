"""Xception: preprocessing, class names and the network, under Keras' names."""

from typing import TYPE_CHECKING

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import chain, classified, network
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = ["Xception", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.xception", __all__)

preprocess_input = preprocessing("tf")


def _body(x: Tensor) -> Tensor:
    for number, (filters, strides) in enumerate(((32, 2), (64, 1)), start=1):
        name = f"block1_conv{number}"
        conv = layers.Conv2D(filters, 3, strides=strides, use_bias=False, name=name)
        x = chain(x, conv, layers.BatchNormalization(name=f"{name}_bn"), _activation(name))
    x = _halving(x, 2, (128, 128), begins_activated=True)
    x = _halving(x, 3, (256, 256))
    x = _halving(x, 4, (728, 728))
    for block in range(5, 13):
        before = x
        for number in range(1, 4):
            x = chain(x, _activation(f"block{block}_sepconv{number}"), *_separable(block, number, 728))
        x = layers.Add()([x, before])
    x = _halving(x, 13, (728, 1024))
    for number, filters in enumerate((1536, 2048), start=1):
        x = chain(x, *_separable(14, number, filters), _activation(f"block14_sepconv{number}"))
    return x


def _halving(x: Tensor, block: int, filters: tuple[int, int], *, begins_activated: bool = False) -> Tensor:
    """Apply a block that halves height and width, beside a convolution that does so too."""
    residual = chain(
        x,
        layers.Conv2D(filters[1], 1, strides=2, padding="same", use_bias=False),
        layers.BatchNormalization(),
    )
    for number, channels in enumerate(filters, start=1):
        if number > 1 or not begins_activated:
            x = _activation(f"block{block}_sepconv{number}")(x)
        x = chain(x, *_separable(block, number, channels))
    x = layers.MaxPooling2D(3, strides=2, padding="same", name=f"block{block}_pool")(x)
    outputs: Tensor = layers.Add()([x, residual])
    return outputs


def _separable(block: int, number: int, filters: int) -> tuple[layers.Layer, layers.Layer]:
    name = f"block{block}_sepconv{number}"
    conv = layers.SeparableConv2D(filters, 3, padding="same", use_bias=False, name=name)
    return conv, layers.BatchNormalization(name=f"{name}_bn")


def _activation(name: str) -> layers.Layer:
    return layers.Activation("relu", name=f"{name}_act")


Xception = network(
    "Xception",
    _body,
    classified,
    source="Chollet, Xception: Deep Learning with Depthwise Separable Convolutions, 2016, "
    "https://arxiv.org/abs/1610.02357",
    size=299,
    smallest=71,
)
