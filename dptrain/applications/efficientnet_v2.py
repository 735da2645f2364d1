"""EfficientNetV2: preprocessing, class names and the networks, under Keras' names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import NetworkArguments, assemble, chain
from dptrain.initializers import Constant, VarianceScaling
from dptrain.models import Model
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = [
    "EfficientNetV2B0",
    "EfficientNetV2B1",
    "EfficientNetV2B2",
    "EfficientNetV2B3",
    "EfficientNetV2L",
    "EfficientNetV2M",
    "EfficientNetV2S",
    "decode_predictions",
    "preprocess_input",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.efficientnet_v2", __all__)

preprocess_input = preprocessing(None)

# Of each stage: whether its blocks are fused, how many there are, filters that come out, factor of the channels within,
# stride of the first block. Those that are not fused squeeze and excite.
_Stages = Sequence[tuple[bool, int, int, int, int]]
_B = (
    (True, 1, 16, 1, 1),
    (True, 2, 32, 4, 2),
    (True, 2, 48, 4, 2),
    (False, 3, 96, 4, 2),
    (False, 5, 112, 6, 1),
    (False, 8, 192, 6, 2),
)
_S = (
    (True, 2, 24, 1, 1),
    (True, 4, 48, 4, 2),
    (True, 4, 64, 4, 2),
    (False, 6, 128, 4, 2),
    (False, 9, 160, 6, 1),
    (False, 15, 256, 6, 2),
)
_M = (
    (True, 3, 24, 1, 1),
    (True, 5, 48, 4, 2),
    (True, 5, 80, 4, 2),
    (False, 7, 160, 4, 2),
    (False, 14, 176, 6, 1),
    (False, 18, 304, 6, 2),
    (False, 5, 512, 6, 1),
)
_L = (
    (True, 4, 32, 1, 1),
    (True, 7, 64, 4, 2),
    (True, 7, 96, 4, 2),
    (False, 10, 192, 4, 2),
    (False, 19, 224, 6, 1),
    (False, 25, 384, 6, 2),
    (False, 7, 640, 6, 1),
)
# Squeeze and excitation: inner channels, as a fraction of the block's input channels.
_SQUEEZED = 0.25
# Drop rate of the last block, counted over the unscaled network's blocks; the first one's is 0.
_LEFT_OUT = 0.2
_MEAN, _VARIANCE = (0.485, 0.456, 0.406), (0.229**2, 0.224**2, 0.225**2)
_ABOUT = """{name}, like `keras.applications.{name}`: the same layers, names, shapes and order of weights.

For other arguments and errors see `applications.ResNet50`.

Args:
    input_shape: by default ({size}, {size}, 3).
    include_preprocessing: scale pixels from 0 to 255 in the model.

Source: Tan and Le, EfficientNetV2: Smaller Models and Faster Training, 2021, https://arxiv.org/abs/2104.00298
"""


@dataclass(frozen=True)
class _Scaling:
    """Scaling that defines a network: stages, filters of the stem, factors of filters and blocks.

    `normalizes`: by mean and variance of ImageNet's channels, if there are three.
    """

    stages: _Stages
    stem: int  # filters of the first convolution
    width: float  # factor of filters
    depth: float  # factor of blocks
    normalizes: bool  # by the mean and variance of ImageNet's channels, if there are three

    def filters(self, number: int) -> int:
        return max(8, int(number * self.width + 4) // 8 * 8)

    def blocks(self, number: int) -> int:
        return math.ceil(number * self.depth)


def _body(scaling: _Scaling, rescales: bool, x: Tensor) -> Tensor:
    if rescales and scaling.normalizes and int(x.shape[-1]) == 3:
        x = chain(x, layers.Rescaling(1 / 255), layers.Normalization(mean=_MEAN, variance=_VARIANCE, axis=3))
    elif rescales:
        x = layers.Rescaling(1 / 128, offset=-1)(x)
    stem = _convolution(scaling.filters(scaling.stem), "stem_conv", kernel=3, strides=2)
    x = chain(x, stem, *_normalized("stem_"))
    total, number = sum(blocks for _, blocks, *_ in scaling.stages), 0
    for stage, (is_fused, blocks, filters, factor, stride) in enumerate(scaling.stages, start=1):
        for place in range(scaling.blocks(blocks)):
            name, step = f"block{stage}{chr(ord('a') + place)}_", stride if place == 0 else 1
            before, make = x, _fused if is_fused else _inverted
            x = make(x, name, scaling.filters(filters), factor, step)
            x = _left_out(before, x, name, step, _LEFT_OUT * number / total)
            number += 1
    return chain(x, _convolution(scaling.filters(1280), "top_conv"), *_normalized("top_"))


def _fused(x: Tensor, name: str, filters: int, factor: int, stride: int) -> Tensor:
    """Apply a block with one convolution in place of an expansion and a depthwise one."""
    if factor == 1:
        project = _convolution(filters, f"{name}project_conv", kernel=3, strides=stride)
        activation = layers.Activation("swish", name=f"{name}project_activation")
        return chain(x, project, _normalization(f"{name}project_"), activation)
    expand = _convolution(int(x.shape[-1]) * factor, f"{name}expand_conv", kernel=3, strides=stride)
    x = chain(x, expand, *_normalized(f"{name}expand_"))
    return chain(x, _convolution(filters, f"{name}project_conv"), _normalization(f"{name}project_"))


def _inverted(x: Tensor, name: str, filters: int, factor: int, stride: int) -> Tensor:
    """Apply an inverted residual block with squeeze and excitation."""
    channels = int(x.shape[-1])
    within = channels * factor
    depthwise = layers.DepthwiseConv2D(
        3,
        strides=stride,
        padding="same",
        use_bias=False,
        depthwise_initializer=_fan_out(2.0, "truncated_normal"),
        name=f"{name}dwconv2",
    )
    expand = _convolution(within, f"{name}expand_conv")
    x = chain(x, expand, *_normalized(f"{name}expand_"), depthwise, *_normalized(name))
    factors = chain(
        x,
        layers.GlobalAveragePooling2D(name=f"{name}se_squeeze"),
        layers.Reshape((1, 1, within), name=f"{name}se_reshape"),
        _convolution(max(1, int(channels * _SQUEEZED)), f"{name}se_reduce", activation="swish", use_bias=True),
        _convolution(within, f"{name}se_expand", activation="sigmoid", use_bias=True),
    )
    x = layers.Multiply(name=f"{name}se_excite")([x, factors])
    return chain(x, _convolution(filters, f"{name}project_conv"), _normalization(f"{name}project_"))


def _left_out(before: Tensor, x: Tensor, name: str, stride: int, rate: float) -> Tensor:
    """Add a block's input to its output, if both have the same shape."""
    if stride != 1 or int(before.shape[-1]) != int(x.shape[-1]):
        return x
    if rate:
        x = layers.Dropout(rate, noise_shape=(None, 1, 1, 1), name=f"{name}drop")(x)
    outputs: Tensor = layers.Add(name=f"{name}add")([x, before])
    return outputs


def _convolution(
    filters: int,
    name: str,
    *,
    kernel: int = 1,
    strides: int = 1,
    activation: str | None = None,
    use_bias: bool = False,
) -> layers.Layer:
    return layers.Conv2D(
        filters,
        kernel,
        strides=strides,
        padding="same",
        activation=activation,
        use_bias=use_bias,
        kernel_initializer=_fan_out(2.0, "truncated_normal"),
        name=name,
    )


def _fan_out(scale: float, distribution: str) -> VarianceScaling:
    return VarianceScaling(scale, "fan_out", distribution)


def _normalization(prefix: str) -> layers.Layer:
    return layers.BatchNormalization(momentum=0.9, name=f"{prefix}bn")


def _normalized(prefix: str) -> tuple[layers.Layer, layers.Layer]:
    return _normalization(prefix), layers.Activation("swish", name=f"{prefix}activation")


def _top(x: Tensor, classes: int, activation: Any) -> Tensor:
    return chain(
        x,
        layers.GlobalAveragePooling2D(name="avg_pool"),
        layers.Dropout(0.2, name="top_dropout"),
        layers.Dense(
            classes,
            activation=activation,
            kernel_initializer=_fan_out(1 / 3, "uniform"),
            bias_initializer=Constant(0.0),
            name="predictions",
        ),
    )


def _efficientnet(kind: str, scaling: _Scaling, size: int) -> Any:
    label = f"EfficientNetV2{kind}"

    def make(
        include_top: bool = True,
        weights: str | Path | None = "imagenet",
        input_tensor: Tensor | None = None,
        input_shape: Sequence[int | None] | None = None,
        pooling: str | None = None,
        classes: int = 1000,
        classifier_activation: Any = "softmax",
        include_preprocessing: bool = True,
        name: str = f"efficientnetv2-{kind.lower()}",
    ) -> Model:
        options = NetworkArguments(
            include_top, weights, input_tensor, input_shape, pooling, classes, classifier_activation, name
        )
        body = partial(_body, scaling, include_preprocessing)
        return assemble(options, body, _top, size=size, named_pooling=True)

    make.__name__ = make.__qualname__ = label
    make.__doc__ = _ABOUT.format(name=label, size=size)
    return make


EfficientNetV2B0 = _efficientnet("B0", _Scaling(_B, 32, 1.0, 1.0, True), 224)
EfficientNetV2B1 = _efficientnet("B1", _Scaling(_B, 32, 1.0, 1.1, True), 240)
EfficientNetV2B2 = _efficientnet("B2", _Scaling(_B, 32, 1.1, 1.2, True), 260)
EfficientNetV2B3 = _efficientnet("B3", _Scaling(_B, 32, 1.2, 1.4, True), 300)
EfficientNetV2S = _efficientnet("S", _Scaling(_S, 24, 1.0, 1.0, False), 384)
EfficientNetV2M = _efficientnet("M", _Scaling(_M, 24, 1.0, 1.0, False), 480)
EfficientNetV2L = _efficientnet("L", _Scaling(_L, 32, 1.0, 1.0, False), 480)
