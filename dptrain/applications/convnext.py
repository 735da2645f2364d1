"""ConvNeXt: preprocessing, class names and the networks, under Keras' names."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import NetworkArguments, assemble, chain
from dptrain.layers.core.layer_scale import LayerScale
from dptrain.models import Model, Sequential
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = [
    "ConvNeXtBase",
    "ConvNeXtLarge",
    "ConvNeXtSmall",
    "ConvNeXtTiny",
    "ConvNeXtXLarge",
    "decode_predictions",
    "preprocess_input",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.convnext", __all__)

preprocess_input = preprocessing(None)

_MEAN = tuple(255 * mean for mean in (0.485, 0.456, 0.406))
_VARIANCE = tuple((255 * std) ** 2 for std in (0.229, 0.224, 0.225))
_ABOUT = """{name}, like `keras.applications.{name}`: the same layers, names, shapes and order of weights.

For other arguments and errors see `applications.ResNet50`.

Args:
    include_preprocessing: normalize pixels from 0 to 255 in the model, if there are three channels.
    name: of the model, and prefix of its layers' names.

Source: Liu et al., A ConvNet for the 2020s, 2022, https://arxiv.org/abs/2201.03545
"""


@dataclass(frozen=True)
class _Kind:
    """Blocks and channels of each stage, and the user's arguments."""

    blocks: Sequence[int]
    channels: Sequence[int]
    name: str
    normalizes: bool


def _body(kind: _Kind, x: Tensor) -> Tensor:
    name = kind.name
    if kind.normalizes and int(x.shape[-1]) == 3:
        x = layers.Normalization(mean=_MEAN, variance=_VARIANCE, name=f"{name}_prestem_normalization")(x)
    for stage, (blocks, channels) in enumerate(zip(kind.blocks, kind.channels, strict=True)):
        if stage == 0:
            conv = layers.Conv2D(channels, 4, strides=4, name=f"{name}_stem_conv")
            x = Sequential([conv, _normalization(f"{name}_stem_layernorm")], name=f"{name}_stem")(x)
        else:
            normalization = _normalization(f"{name}_downsampling_layernorm_{stage - 1}")
            conv = layers.Conv2D(channels, 2, strides=2, name=f"{name}_downsampling_conv_{stage - 1}")
            x = Sequential([normalization, conv], name=f"{name}_downsampling_block_{stage - 1}")(x)
        for block in range(blocks):
            x = _block(x, channels, f"{name}_stage_{stage}_block_{block}")
    return x


def _block(x: Tensor, channels: int, name: str) -> Tensor:
    return x + chain(
        x,
        layers.Conv2D(channels, 7, padding="same", groups=channels, name=f"{name}_depthwise_conv"),
        _normalization(f"{name}_layernorm"),
        layers.Dense(4 * channels, name=f"{name}_pointwise_conv_1"),
        layers.Activation("gelu", name=f"{name}_gelu"),
        layers.Dense(channels, name=f"{name}_pointwise_conv_2"),
        LayerScale(1e-6, channels, name=f"{name}_layer_scale"),
        layers.Activation("linear", name=f"{name}_identity"),
    )


def _normalization(name: str | None = None) -> layers.Layer:
    return layers.LayerNormalization(epsilon=1e-6, name=name)


def _top(name: str, x: Tensor, classes: int, activation: Any) -> Tensor:
    return chain(
        x,
        layers.GlobalAveragePooling2D(name=f"{name}_head_gap"),
        _normalization(f"{name}_head_layernorm"),
        layers.Dense(classes, activation=activation, name=f"{name}_head_dense"),
    )


def _convnext(label: str, blocks: int, channels: int) -> Any:
    def make(
        include_top: bool = True,
        include_preprocessing: bool = True,
        weights: str | Path | None = "imagenet",
        input_tensor: Tensor | None = None,
        input_shape: Sequence[int | None] | None = None,
        pooling: str | None = None,
        classes: int = 1000,
        classifier_activation: Any = "softmax",
        name: str = f"convnext_{label.lower()}",
    ) -> Model:
        kind = _Kind((3, 3, blocks, 3), [channels * 2**stage for stage in range(4)], name, include_preprocessing)
        options = NetworkArguments(
            include_top, weights, input_tensor, input_shape, pooling, classes, classifier_activation, name
        )
        return assemble(options, partial(_body, kind), partial(_top, name), headless=_normalization())

    make.__name__ = make.__qualname__ = f"ConvNeXt{label}"
    make.__doc__ = _ABOUT.format(name=make.__name__)
    return make


ConvNeXtTiny = _convnext("Tiny", 9, 96)
ConvNeXtSmall = _convnext("Small", 27, 96)
ConvNeXtBase = _convnext("Base", 27, 128)
ConvNeXtLarge = _convnext("Large", 27, 192)
ConvNeXtXLarge = _convnext("XLarge", 27, 256)
