"""MobileNetV3: preprocessing, class names and the networks, under Keras' names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import NetworkArguments, assemble, chain, divisible, padding_before
from dptrain.models import Model
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = ["decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.mobilenet_v3", __all__)

preprocess_input = preprocessing(None)

# Of each block: factor of the channels within, filters that come out, kernel, stride, whether channels are squeezed and
# excited, and whether the activation is the network's (hard_swish), not ReLU.
_SMALL = (
    (1, 16, 3, 2, True, False),
    (72 / 16, 24, 3, 2, False, False),
    (88 / 24, 24, 3, 1, False, False),
    (4, 40, 5, 2, True, True),
    (6, 40, 5, 1, True, True),
    (6, 40, 5, 1, True, True),
    (3, 48, 5, 1, True, True),
    (3, 48, 5, 1, True, True),
    (6, 96, 5, 2, True, True),
    (6, 96, 5, 1, True, True),
    (6, 96, 5, 1, True, True),
)
_LARGE = (
    (1, 16, 3, 1, False, False),
    (4, 24, 3, 2, False, False),
    (3, 24, 3, 1, False, False),
    (3, 40, 5, 2, True, False),
    (3, 40, 5, 1, True, False),
    (3, 40, 5, 1, True, False),
    (6, 80, 3, 2, False, True),
    (2.5, 80, 3, 1, False, True),
    (2.3, 80, 3, 1, False, True),
    (2.3, 80, 3, 1, False, True),
    (6, 112, 3, 1, True, True),
    (6, 112, 3, 1, True, True),
    (6, 160, 5, 2, True, True),
    (6, 160, 5, 1, True, True),
    (6, 160, 5, 1, True, True),
)
_Blocks = Sequence[tuple[float, int, int, int, bool, bool]]
_ABOUT = """{name}, like `keras.applications.{name}`: the same layers, names, shapes and order of weights.

For other arguments and errors see `applications.ResNet50`.

Args:
    input_shape: by default images of any size.
    alpha: factor of the filters of all layers.
    minimalistic: neither squeezes nor hard_swish, and no kernel above 3.
    dropout_rate: before the classifier.
    include_preprocessing: scale pixels from 0 to 255 to -1 to 1 in the model.

Source: Howard et al., Searching for MobileNetV3, 2019, https://arxiv.org/abs/1905.02244
"""


@dataclass(frozen=True)
class _Kind:
    """Arguments that define a network."""

    blocks: _Blocks
    last: int  # filters of the last convolution before the classifier
    alpha: float  # factor of filters
    minimalistic: bool  # without squeezes, hard_swish and large kernels
    rescales: bool  # pixels from 0 to 255
    dropout_rate: float  # before the classifier

    def activation(self) -> layers.Layer:
        return layers.ReLU() if self.minimalistic else layers.Activation("hard_swish")


def _body(kind: _Kind, x: Tensor) -> Tensor:
    if kind.rescales:
        x = layers.Rescaling(1 / 127.5, offset=-1.0)(x)
    stem = layers.Conv2D(16, 3, strides=2, padding="same", use_bias=False, name="conv")
    x = chain(x, stem, _normalization("conv"), kind.activation())
    for number, (factor, filters, kernel, stride, squeezes, is_hard) in enumerate(kind.blocks):
        activation = kind.activation if is_hard else layers.ReLU
        kernel, squeezes = (3, False) if kind.minimalistic else (kernel, squeezes)
        x = _block(x, number, factor, divisible(filters * kind.alpha), kernel, stride, squeezes, activation)
    last = layers.Conv2D(divisible(int(x.shape[-1]) * 6), 1, padding="same", use_bias=False, name="conv_1")
    return chain(x, last, _normalization("conv_1"), kind.activation())


def _block(
    x: Tensor,
    number: int,
    factor: float,
    filters: int,
    kernel: int,
    stride: int,
    squeezes: bool,
    activation: Callable[[], layers.Layer],
) -> Tensor:
    """Apply an inverted residual block."""
    before, channels = x, int(x.shape[-1])
    name, within = "expanded_conv_", divisible(channels * factor)
    if number:
        name = f"expanded_conv_{number}_"
        expand = layers.Conv2D(within, 1, padding="same", use_bias=False, name=f"{name}expand")
        x = chain(x, expand, _normalization(f"{name}expand"), activation())
    if stride == 2:
        x = layers.ZeroPadding2D(padding_before(x, kernel), name=f"{name}depthwise_pad")(x)
    padding = "same" if stride == 1 else "valid"
    depthwise = layers.DepthwiseConv2D(kernel, strides=stride, padding=padding, use_bias=False, name=f"{name}depthwise")
    x = chain(x, depthwise, _normalization(f"{name}depthwise"), activation())
    if squeezes:
        x = _excited(x, within, f"{name}squeeze_excite_")
    project = layers.Conv2D(filters, 1, padding="same", use_bias=False, name=f"{name}project")
    x = chain(x, project, _normalization(f"{name}project"))
    if stride == 1 and channels == filters:
        x = layers.Add(name=f"{name}add")([before, x])
    return x


def _excited(x: Tensor, filters: int, name: str) -> Tensor:
    """Return x times a factor for each channel, from the means of all channels."""
    factors = chain(
        x,
        layers.GlobalAveragePooling2D(keepdims=True, name=f"{name}avg_pool"),
        layers.Conv2D(divisible(filters * 0.25), 1, padding="same", name=f"{name}conv"),
        layers.ReLU(name=f"{name}relu"),
        layers.Conv2D(filters, 1, padding="same", name=f"{name}conv_1"),
    )
    factors = layers.ReLU(6.0)(factors + 3.0) * (1.0 / 6.0)
    outputs: Tensor = layers.Multiply(name=f"{name}mul")([x, factors])
    return outputs


def _normalization(name: str) -> layers.Layer:
    return layers.BatchNormalization(epsilon=1e-3, momentum=0.999, name=f"{name}_bn")


def _top(kind: _Kind, x: Tensor, classes: int, activation: Any) -> Tensor:
    last = divisible(kind.last * kind.alpha) if kind.alpha > 1 else kind.last
    x = chain(x, layers.GlobalAveragePooling2D(keepdims=True), layers.Conv2D(last, 1, padding="same", name="conv_2"))
    x = kind.activation()(x)
    if kind.dropout_rate > 0:
        x = layers.Dropout(kind.dropout_rate)(x)
    logits = layers.Conv2D(classes, 1, padding="same", name="logits")
    return chain(x, logits, layers.Flatten(), layers.Activation(activation, name="predictions"))


def _mobilenet(label: str, blocks: _Blocks, last: int) -> Any:
    def make(
        input_shape: Sequence[int | None] | None = None,
        alpha: float = 1.0,
        minimalistic: bool = False,
        include_top: bool = True,
        weights: str | Path | None = "imagenet",
        input_tensor: Tensor | None = None,
        classes: int = 1000,
        pooling: str | None = None,
        dropout_rate: float = 0.2,
        classifier_activation: Any = "softmax",
        include_preprocessing: bool = True,
        name: str = label,
    ) -> Model:
        kind = _Kind(blocks, last, alpha, minimalistic, include_preprocessing, dropout_rate)
        shape = input_shape or (None, None, 3)
        options = NetworkArguments(
            include_top, weights, input_tensor, shape, pooling, classes, classifier_activation, name
        )
        return assemble(options, partial(_body, kind), partial(_top, kind), named_pooling=True, any_size=True)

    make.__name__ = make.__qualname__ = label
    make.__doc__ = _ABOUT.format(name=label)
    return make


# Keras has these two only in `applications`.
MobileNetV3Small = _mobilenet("MobileNetV3Small", _SMALL, 1024)
MobileNetV3Large = _mobilenet("MobileNetV3Large", _LARGE, 1280)
