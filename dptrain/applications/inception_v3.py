"""InceptionV3: preprocessing, class names and the network, under Keras' names."""

from itertools import count
from typing import TYPE_CHECKING

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import chain, classified, network
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = ["InceptionV3", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.inception_v3", __all__)

preprocess_input = preprocessing("tf")


class _Convolutions:
    """Convolutions with normalization and activation, numbered in order as Keras does."""

    def __init__(self) -> None:
        self._numbers = count()

    def __call__(self, x: Tensor, *shapes: tuple[int, int, int], strides: int = 1, padding: str = "same") -> Tensor:
        """Apply convolutions of (filters, height, width); only the last has the strides and the padding."""
        for filters, height, width in shapes[:-1]:
            x = self._normalized_convolution(x, filters, (height, width), 1, "same")
        filters, height, width = shapes[-1]
        return self._normalized_convolution(x, filters, (height, width), strides, padding)

    def _normalized_convolution(
        self, x: Tensor, filters: int, kernel: tuple[int, int], strides: int, padding: str
    ) -> Tensor:
        number = next(self._numbers)
        ending = f"_{number}" if number else ""
        return chain(
            x,
            layers.Conv2D(filters, kernel, strides=strides, padding=padding, use_bias=False, name=f"conv2d{ending}"),
            layers.BatchNormalization(scale=False, name=f"batch_normalization{ending}"),
            layers.Activation("relu", name=f"activation{ending}"),
        )


def _body(x: Tensor) -> Tensor:
    conv = _Convolutions()
    x = conv(x, (32, 3, 3), strides=2, padding="valid")
    x = conv(x, (32, 3, 3), padding="valid")
    x = layers.MaxPooling2D(3, strides=2)(conv(x, (64, 3, 3)))
    x = conv(x, (80, 1, 1), padding="valid")
    x = layers.MaxPooling2D(3, strides=2)(conv(x, (192, 3, 3), padding="valid"))
    for number, pooled in enumerate((32, 64, 64)):
        branches = [conv(x, (64, 1, 1)), conv(x, (48, 1, 1), (64, 5, 5)), conv(x, (64, 1, 1), (96, 3, 3), (96, 3, 3))]
        x = _joined(number, *branches, _averaged(conv, x, pooled))
    halved = conv(x, (384, 3, 3), strides=2, padding="valid")
    twice = conv(x, (64, 1, 1), (96, 3, 3), (96, 3, 3), strides=2, padding="valid")
    x = _joined(3, halved, twice, layers.MaxPooling2D(3, strides=2)(x))
    for number, within in enumerate((128, 160, 160, 192), start=4):
        branches = [
            conv(x, (192, 1, 1)),
            conv(x, (within, 1, 1), (within, 1, 7), (192, 7, 1)),
            conv(x, (within, 1, 1), (within, 7, 1), (within, 1, 7), (within, 7, 1), (192, 1, 7)),
        ]
        x = _joined(number, *branches, _averaged(conv, x, 192))
    halved = conv(x, (192, 1, 1), (320, 3, 3), strides=2, padding="valid")
    crossed = conv(x, (192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3), strides=2, padding="valid")
    x = _joined(8, halved, crossed, layers.MaxPooling2D(3, strides=2)(x))
    for number in range(2):
        x = _widest(conv, x, number)
    return x


def _widest(conv: _Convolutions, x: Tensor, number: int) -> Tensor:
    """Apply a final block, whose 3 x 3 kernels are split into rows and columns."""
    single = conv(x, (320, 1, 1))
    split = conv(x, (384, 1, 1))
    split = layers.Concatenate(name=f"mixed9_{number}")([conv(split, (384, 1, 3)), conv(split, (384, 3, 1))])
    deep = conv(x, (448, 1, 1), (384, 3, 3))
    deep = layers.Concatenate()([conv(deep, (384, 1, 3)), conv(deep, (384, 3, 1))])
    return _joined(9 + number, single, split, deep, _averaged(conv, x, 192))


def _averaged(conv: _Convolutions, x: Tensor, filters: int) -> Tensor:
    return conv(layers.AveragePooling2D(3, strides=1, padding="same")(x), (filters, 1, 1))


def _joined(number: int, *branches: Tensor) -> Tensor:
    outputs: Tensor = layers.Concatenate(name=f"mixed{number}")(list(branches))
    return outputs


InceptionV3 = network(
    "InceptionV3",
    _body,
    classified,
    source="Szegedy et al., Rethinking the Inception Architecture, 2015, https://arxiv.org/abs/1512.00567",
    size=299,
    smallest=75,
    model_name="inception_v3",
)
