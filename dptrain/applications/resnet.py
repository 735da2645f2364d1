"""ResNet: preprocessing, class names and the networks, under Keras' names."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import chain, network
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = ["ResNet50", "ResNet101", "ResNet152", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.resnet", __all__)

preprocess_input = preprocessing("caffe")

# Blocks of the four stacks, by depth.
DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def normalized(name: str, of: str = "relu") -> tuple[layers.Layer, layers.Layer]:
    """Apply BatchNormalization and ReLU, `name`_bn and `name`_`of`."""
    return batch_norm(f"{name}_bn"), layers.Activation("relu", name=f"{name}_{of}")


def batch_norm(name: str) -> layers.Layer:
    """Return BatchNormalization with ResNet's epsilon."""
    return layers.BatchNormalization(epsilon=1.001e-5, name=name)


def stem(x: Tensor, *between: layers.Layer) -> Tensor:
    """Apply the first convolution and pooling, both of stride 2, with layers between them."""
    return chain(
        x,
        layers.ZeroPadding2D(3, name="conv1_pad"),
        layers.Conv2D(64, 7, strides=2, name="conv1_conv"),
        *between,
        layers.ZeroPadding2D(1, name="pool1_pad"),
        layers.MaxPooling2D(3, strides=2, name="pool1_pool"),
    )


def stacks(x: Tensor, depths: Sequence[int], block: Callable[..., Tensor]) -> Tensor:
    """Apply the four stacks; `block` takes (x, filters, name, number, depth, stack), counted from 1, 1 and 2."""
    for stack, depth in enumerate(depths, start=2):
        for number in range(1, depth + 1):
            x = block(x, 16 * 2**stack, f"conv{stack}_block{number}", number, depth, stack)
    return x


def classifier(x: Tensor, classes: int, activation: Any) -> Tensor:
    """Apply the classifier to the mean of each channel."""
    return chain(
        x,
        layers.GlobalAveragePooling2D(name="avg_pool"),
        layers.Dense(classes, activation=activation, name="predictions"),
    )


def _block(x: Tensor, filters: int, name: str, number: int, depth: int, stack: int) -> Tensor:
    """Apply a bottleneck; the first of a stack halves the images, but not in the first stack."""
    stride = 2 if number == 1 and stack > 2 else 1
    shortcut = x
    if number == 1:
        project = layers.Conv2D(4 * filters, 1, strides=stride, name=f"{name}_0_conv")
        shortcut = chain(x, project, batch_norm(f"{name}_0_bn"))
    x = chain(
        x,
        layers.Conv2D(filters, 1, strides=stride, name=f"{name}_1_conv"),
        *normalized(f"{name}_1"),
        layers.Conv2D(filters, 3, padding="same", name=f"{name}_2_conv"),
        *normalized(f"{name}_2"),
        layers.Conv2D(4 * filters, 1, name=f"{name}_3_conv"),
        batch_norm(f"{name}_3_bn"),
    )
    return chain(layers.Add(name=f"{name}_add")([shortcut, x]), layers.Activation("relu", name=f"{name}_out"))


def _body(depths: Sequence[int], x: Tensor) -> Tensor:
    return stacks(stem(x, *normalized("conv1")), depths, _block)


def _resnet(depth: int) -> Any:
    source = "He et al., Deep Residual Learning for Image Recognition, 2016, https://arxiv.org/abs/1512.03385"
    body = partial(_body, DEPTHS[depth])
    return network(f"ResNet{depth}", body, classifier, source=source, named_pooling=True)


ResNet50, ResNet101, ResNet152 = _resnet(50), _resnet(101), _resnet(152)
