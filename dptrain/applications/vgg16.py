"""VGG16: preprocessing, class names and the network, under Keras' names."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import chain, network
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = ["VGG16", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.vgg16", __all__)

preprocess_input = preprocessing("caffe")


def vgg(label: str, depths: Sequence[int]) -> Any:
    """Return the function that builds a network; `depths` are the convolutions of its five blocks."""
    source = "Simonyan and Zisserman, Very Deep Convolutional Networks, 2015, https://arxiv.org/abs/1409.1556"
    return network(label, partial(_body, depths), _top, source=source)


def _body(depths: Sequence[int], x: Tensor) -> Tensor:
    for block, (depth, filters) in enumerate(zip(depths, (64, 128, 256, 512, 512), strict=True), start=1):
        for number in range(1, depth + 1):
            name = f"block{block}_conv{number}"
            x = layers.Conv2D(filters, 3, activation="relu", padding="same", name=name)(x)
        x = layers.MaxPooling2D(2, name=f"block{block}_pool")(x)
    return x


def _top(x: Tensor, classes: int, activation: Any) -> Tensor:
    return chain(
        x,
        layers.Flatten(name="flatten"),
        layers.Dense(4096, activation="relu", name="fc1"),
        layers.Dense(4096, activation="relu", name="fc2"),
        layers.Dense(classes, activation=activation, name="predictions"),
    )


VGG16 = vgg("VGG16", (2, 2, 3, 3, 3))
