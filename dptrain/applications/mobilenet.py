"""MobileNet: preprocessing, class names and the network, under Keras' names."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import NetworkArguments, assemble, chain
from dptrain.models import Model
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = ["MobileNet", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.mobilenet", __all__)

preprocess_input = preprocessing("tf")

# Filters and stride of each block.
_BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


def MobileNet(  # noqa: N802 - Keras' name
    input_shape: Sequence[int | None] | None = None,
    alpha: float = 1.0,
    depth_multiplier: int = 1,
    dropout: float = 1e-3,
    include_top: bool = True,
    weights: str | Path | None = "imagenet",
    input_tensor: Tensor | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: Any = "softmax",
    name: str | None = None,
) -> Model:
    """MobileNet, like `keras.applications.MobileNet`: the same layers, names, shapes and order of weights.

    For other arguments and errors see `applications.ResNet50`.

    Args:
        alpha: factor of the filters of all layers.
        depth_multiplier: depthwise outputs of each channel.
        dropout: rate before the classifier.
        name: of the model; by default from `alpha` and the height.

    Source: Howard et al., MobileNets, 2017, https://arxiv.org/abs/1704.04861
    """
    options = NetworkArguments(
        include_top, weights, input_tensor, input_shape, pooling, classes, classifier_activation, name
    )
    if name is None:
        options = options.with_name(f"mobilenet_{alpha:0.2f}_{options.shape()[0]}")
    return assemble(options, partial(_body, alpha, depth_multiplier), partial(_top, dropout))


def _body(alpha: float, depth_multiplier: int, x: Tensor) -> Tensor:
    first = layers.Conv2D(int(32 * alpha), 3, strides=2, padding="same", use_bias=False, name="conv1")
    x = chain(x, first, *_normalized("conv1"))
    for number, (filters, stride) in enumerate(_BLOCKS, start=1):
        padding = "same" if stride == 1 else "valid"
        if stride == 2:
            x = layers.ZeroPadding2D(((0, 1), (0, 1)), name=f"conv_pad_{number}")(x)
        x = chain(
            x,
            layers.DepthwiseConv2D(
                3,
                strides=stride,
                padding=padding,
                depth_multiplier=depth_multiplier,
                use_bias=False,
                name=f"conv_dw_{number}",
            ),
            *_normalized(f"conv_dw_{number}"),
            layers.Conv2D(int(filters * alpha), 1, padding="same", use_bias=False, name=f"conv_pw_{number}"),
            *_normalized(f"conv_pw_{number}"),
        )
    return x


def _normalized(name: str) -> tuple[layers.Layer, layers.Layer]:
    return layers.BatchNormalization(name=f"{name}_bn"), layers.ReLU(6.0, name=f"{name}_relu")


def _top(dropout: float, x: Tensor, classes: int, activation: Any) -> Tensor:
    return chain(
        x,
        layers.GlobalAveragePooling2D(keepdims=True),
        layers.Dropout(dropout, name="dropout"),
        layers.Conv2D(classes, 1, padding="same", name="conv_preds"),
        layers.Reshape((classes,), name="reshape_2"),
        layers.Activation(activation, name="predictions"),
    )
