"""EfficientNet: preprocessing, class names and the networks, under Keras' names."""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import chain, divisible, network, padding_before
from dptrain.initializers import VarianceScaling
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = [
    "EfficientNetB0",
    "EfficientNetB1",
    "EfficientNetB2",
    "EfficientNetB3",
    "EfficientNetB4",
    "EfficientNetB5",
    "EfficientNetB6",
    "EfficientNetB7",
    "decode_predictions",
    "preprocess_input",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.efficientnet", __all__)

preprocess_input = preprocessing(None)

# Kernel, blocks, output filters, expansion factor, stride of the first block of each stage.
_STAGES = (
    (3, 1, 16, 1, 1),
    (3, 2, 24, 6, 2),
    (5, 2, 40, 6, 2),
    (3, 3, 80, 6, 2),
    (5, 3, 112, 6, 1),
    (5, 4, 192, 6, 2),
    (3, 1, 320, 6, 1),
)
# Squeeze and excitation: inner channels, as a fraction of the block's input channels.
_SQUEEZED = 0.25
# Drop rate of the last block; the first one's is 0.
_LEFT_OUT = 0.2


@dataclass(frozen=True)
class _Scaling:
    """Factors of filters and blocks that define a network."""

    width: float
    depth: float

    def filters(self, number: int) -> int:
        return divisible(number * self.width)

    def blocks(self, number: int) -> int:
        return math.ceil(number * self.depth)


def _body(scaling: _Scaling, x: Tensor) -> Tensor:
    x = chain(x, layers.Rescaling(1 / 255), layers.Normalization())
    x = layers.ZeroPadding2D(padding_before(x, 3), name="stem_conv_pad")(x)
    stem = _convolution(scaling.filters(32), "stem_conv", kernel=3, strides=2, padding="valid")
    x = chain(x, stem, *_normalized("stem_"))
    total, number = sum(scaling.blocks(stage[1]) for stage in _STAGES), 0
    for stage, (kernel, blocks, filters, factor, stride) in enumerate(_STAGES, start=1):
        for place in range(scaling.blocks(blocks)):
            name = f"block{stage}{chr(ord('a') + place)}_"
            step = stride if place == 0 else 1
            x = _block(x, name, kernel, scaling.filters(filters), factor, step, _LEFT_OUT * number / total)
            number += 1
    return chain(x, _convolution(scaling.filters(1280), "top_conv"), *_normalized("top_"))


def _block(x: Tensor, name: str, kernel: int, filters: int, factor: int, stride: int, rate: float) -> Tensor:
    """Apply an inverted residual block with squeeze and excitation."""
    before, channels = x, int(x.shape[-1])
    within = channels * factor
    if factor != 1:
        x = chain(x, _convolution(within, f"{name}expand_conv"), *_normalized(f"{name}expand_"))
    if stride == 2:
        x = layers.ZeroPadding2D(padding_before(x, kernel), name=f"{name}dwconv_pad")(x)
    depthwise = layers.DepthwiseConv2D(
        kernel,
        strides=stride,
        padding="same" if stride == 1 else "valid",
        use_bias=False,
        depthwise_initializer=_fan_out(2.0, "truncated_normal"),
        name=f"{name}dwconv",
    )
    x = chain(x, depthwise, *_normalized(name))
    squeezed = chain(
        x,
        layers.GlobalAveragePooling2D(name=f"{name}se_squeeze"),
        layers.Reshape((1, 1, within), name=f"{name}se_reshape"),
        _convolution(max(1, int(channels * _SQUEEZED)), f"{name}se_reduce", "swish", use_bias=True),
        _convolution(within, f"{name}se_expand", "sigmoid", use_bias=True),
    )
    x = layers.Multiply(name=f"{name}se_excite")([x, squeezed])
    x = chain(x, _convolution(filters, f"{name}project_conv"), layers.BatchNormalization(name=f"{name}project_bn"))
    if stride != 1 or channels != filters:
        return x
    if rate > 0:
        x = layers.Dropout(rate, noise_shape=(None, 1, 1, 1), name=f"{name}drop")(x)
    outputs: Tensor = layers.Add(name=f"{name}add")([x, before])
    return outputs


def _convolution(
    filters: int,
    name: str,
    activation: str | None = None,
    *,
    kernel: int = 1,
    strides: int = 1,
    padding: str = "same",
    use_bias: bool = False,
) -> layers.Layer:
    return layers.Conv2D(
        filters,
        kernel,
        strides=strides,
        padding=padding,
        activation=activation,
        use_bias=use_bias,
        kernel_initializer=_fan_out(2.0, "truncated_normal"),
        name=name,
    )


def _fan_out(scale: float, distribution: str) -> VarianceScaling:
    return VarianceScaling(scale, "fan_out", distribution)


def _normalized(prefix: str) -> tuple[layers.Layer, layers.Layer]:
    return layers.BatchNormalization(name=f"{prefix}bn"), layers.Activation("swish", name=f"{prefix}activation")


def _top(dropout: float, x: Tensor, classes: int, activation: Any) -> Tensor:
    return chain(
        x,
        layers.GlobalAveragePooling2D(name="avg_pool"),
        layers.Dropout(dropout, name="top_dropout"),
        layers.Dense(classes, activation=activation, kernel_initializer=_fan_out(1 / 3, "uniform"), name="predictions"),
    )


def _efficientnet(number: int, width: float, depth: float, size: int, dropout: float) -> Any:
    source = "Tan and Le, EfficientNet: Rethinking Model Scaling, 2019, https://arxiv.org/abs/1905.11946"
    body, top = partial(_body, _Scaling(width, depth)), partial(_top, dropout)
    return network(f"EfficientNetB{number}", body, top, source=source, size=size, named_pooling=True)


EfficientNetB0 = _efficientnet(0, 1.0, 1.0, 224, 0.2)
EfficientNetB1 = _efficientnet(1, 1.0, 1.1, 240, 0.2)
EfficientNetB2 = _efficientnet(2, 1.1, 1.2, 260, 0.3)
EfficientNetB3 = _efficientnet(3, 1.2, 1.4, 300, 0.3)
EfficientNetB4 = _efficientnet(4, 1.4, 1.8, 380, 0.4)
EfficientNetB5 = _efficientnet(5, 1.6, 2.2, 456, 0.4)
EfficientNetB6 = _efficientnet(6, 1.8, 2.6, 528, 0.5)
EfficientNetB7 = _efficientnet(7, 2.0, 3.1, 600, 0.5)
