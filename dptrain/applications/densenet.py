"""DenseNet: preprocessing, class names and the networks, under Keras' names."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import chain, classified, network
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = ["DenseNet121", "DenseNet169", "DenseNet201", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.densenet", __all__)

preprocess_input = preprocessing("torch")

# Channels that each convolution block adds.
_GROWTH = 32


def _body(blocks: Sequence[int], x: Tensor) -> Tensor:
    stem = layers.Conv2D(64, 7, strides=2, use_bias=False, name="conv1_conv")
    x = chain(x, layers.ZeroPadding2D(3), stem, *_normalized("conv1"), layers.ZeroPadding2D(1))
    x = layers.MaxPooling2D(3, strides=2, name="pool1")(x)
    for stage, number in enumerate(blocks, start=2):
        for place in range(1, number + 1):
            x = _grown(x, f"conv{stage}_block{place}")
        if stage < len(blocks) + 1:
            half = layers.Conv2D(int(x.shape[-1]) // 2, 1, use_bias=False, name=f"pool{stage}_conv")
            pool = layers.AveragePooling2D(2, strides=2, name=f"pool{stage}_pool")
            x = chain(x, *_normalized(f"pool{stage}"), half, pool)
    return chain(x, layers.BatchNormalization(epsilon=1.001e-5, name="bn"), layers.Activation("relu", name="relu"))


def _grown(x: Tensor, name: str) -> Tensor:
    """Concatenate x with the output of a convolution block."""
    grown = chain(
        x,
        *_normalized(f"{name}_0"),
        layers.Conv2D(4 * _GROWTH, 1, use_bias=False, name=f"{name}_1_conv"),
        *_normalized(f"{name}_1"),
        layers.Conv2D(_GROWTH, 3, padding="same", use_bias=False, name=f"{name}_2_conv"),
    )
    outputs: Tensor = layers.Concatenate(name=f"{name}_concat")([x, grown])
    return outputs


def _normalized(name: str) -> tuple[layers.Layer, layers.Layer]:
    normalization = layers.BatchNormalization(epsilon=1.001e-5, name=f"{name}_bn")
    return normalization, layers.Activation("relu", name=f"{name}_relu")


def _densenet(number: int, *blocks: int) -> Any:
    source = "Huang et al., Densely Connected Convolutional Networks, 2016, https://arxiv.org/abs/1608.06993"
    return network(f"DenseNet{number}", partial(_body, blocks), classified, source=source, named_pooling=True)


DenseNet121 = _densenet(121, 6, 12, 24, 16)
DenseNet169 = _densenet(169, 6, 12, 32, 32)
DenseNet201 = _densenet(201, 6, 12, 48, 32)
