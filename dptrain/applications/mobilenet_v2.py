"""MobileNetV2: preprocessing, class names and the network, under Keras' names."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import NetworkArguments, assemble, chain, divisible, padding_before
from dptrain.models import Model
from dptrain.program.dims import read
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = ["MobileNetV2", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.mobilenet_v2", __all__)

preprocess_input = preprocessing("tf")

# Filters, stride of the first block and number of blocks of each stage.
_STAGES = ((16, 1, 1), (24, 2, 2), (32, 2, 3), (64, 2, 4), (96, 1, 3), (160, 2, 3), (320, 1, 1))
_SIZES = (96, 128, 160, 192, 224)


def MobileNetV2(  # noqa: N802 - Keras' name
    input_shape: Sequence[int | None] | None = None,
    alpha: float = 1.0,
    include_top: bool = True,
    weights: str | Path | None = "imagenet",
    input_tensor: Tensor | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: Any = "softmax",
    name: str | None = None,
) -> Model:
    """MobileNetV2, like `keras.applications.MobileNetV2`: the same layers, names, shapes and order of weights.

    `alpha` is the factor of the filters of all layers; the default `name` is made from it and the height. For other
    arguments and errors see `applications.ResNet50`.

    Source: Sandler et al., MobileNetV2, 2018, https://arxiv.org/abs/1801.04381
    """
    options = NetworkArguments(
        include_top, weights, input_tensor, input_shape, pooling, classes, classifier_activation, name
    )
    sides = None if input_tensor is None else read(input_tensor.shape)[1:3]
    size = sides[0] if sides is not None and sides[0] == sides[1] and sides[0] in _SIZES else 224
    if name is None:
        options = options.with_name(f"mobilenetv2_{alpha:0.2f}_{options.shape(size)[0]}")
    return assemble(options, partial(_body, alpha), _top)


def _body(alpha: float, x: Tensor) -> Tensor:
    first = layers.Conv2D(divisible(32 * alpha), 3, strides=2, padding="same", use_bias=False, name="Conv1")
    x = chain(x, first, *_normalized("bn_Conv1", "Conv1_relu"))
    number = 0
    for filters, stride, depth in _STAGES:
        for place in range(depth):
            x = _block(x, divisible(int(filters * alpha)), stride if place == 0 else 1, number)
            number += 1
    last = layers.Conv2D(divisible(1280 * max(alpha, 1.0)), 1, use_bias=False, name="Conv_1")
    return chain(x, last, *_normalized("Conv_1_bn", "out_relu"))


def _block(x: Tensor, filters: int, stride: int, number: int) -> Tensor:
    """Apply an inverted residual block: expand sixfold (except the first), filter, project."""
    before, channels = x, int(x.shape[-1])
    prefix = f"block_{number}_" if number else "expanded_conv_"
    if number:
        expand = layers.Conv2D(6 * channels, 1, padding="same", use_bias=False, name=f"{prefix}expand")
        x = chain(x, expand, *_normalized(f"{prefix}expand_BN", f"{prefix}expand_relu"))
    if stride == 2:
        x = layers.ZeroPadding2D(padding_before(x, 3), name=f"{prefix}pad")(x)
    padding = "same" if stride == 1 else "valid"
    x = chain(
        x,
        layers.DepthwiseConv2D(3, strides=stride, padding=padding, use_bias=False, name=f"{prefix}depthwise"),
        *_normalized(f"{prefix}depthwise_BN", f"{prefix}depthwise_relu"),
        layers.Conv2D(filters, 1, padding="same", use_bias=False, name=f"{prefix}project"),
        _batch_norm(f"{prefix}project_BN"),
    )
    return layers.Add(name=f"{prefix}add")([before, x]) if channels == filters and stride == 1 else x


def _normalized(norm: str, activation: str) -> tuple[layers.Layer, layers.Layer]:
    return _batch_norm(norm), layers.ReLU(6.0, name=activation)


def _batch_norm(name: str) -> layers.Layer:
    return layers.BatchNormalization(epsilon=1e-3, momentum=0.999, name=name)


def _top(x: Tensor, classes: int, activation: Any) -> Tensor:
    return chain(x, layers.GlobalAveragePooling2D(), layers.Dense(classes, activation=activation, name="predictions"))
