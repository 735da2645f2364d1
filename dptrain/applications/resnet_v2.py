"""ResNetV2: preprocessing, class names and the networks, under Keras' names."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dptrain import layers
from dptrain.applications.imagenet_utils import decode_predictions, preprocessing
from dptrain.applications.networks import chain, network
from dptrain.applications.resnet import DEPTHS, classifier, normalized, stacks, stem
from dptrain.program.tensor import Tensor
from dptrain.registry.names import not_there

__all__ = ["ResNet50V2", "ResNet101V2", "ResNet152V2", "decode_predictions", "preprocess_input"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("applications.resnet_v2", __all__)

preprocess_input = preprocessing("tf")


def _block(x: Tensor, filters: int, name: str, number: int, depth: int, stack: int) -> Tensor:
    """Apply a bottleneck, normalized before its convolutions; the last of three stacks halves."""
    stride = 2 if number == depth and stack < 5 else 1
    before = chain(x, *normalized(f"{name}_preact"))
    if number == 1:
        shortcut = layers.Conv2D(4 * filters, 1, strides=stride, name=f"{name}_0_conv")(before)
    else:
        shortcut = layers.MaxPooling2D(1, strides=stride)(x) if stride > 1 else x
    x = chain(
        before,
        layers.Conv2D(filters, 1, use_bias=False, name=f"{name}_1_conv"),
        *normalized(f"{name}_1"),
        layers.ZeroPadding2D(1, name=f"{name}_2_pad"),
        layers.Conv2D(filters, 3, strides=stride, use_bias=False, name=f"{name}_2_conv"),
        *normalized(f"{name}_2"),
        layers.Conv2D(4 * filters, 1, name=f"{name}_3_conv"),
    )
    outputs: Tensor = layers.Add(name=f"{name}_out")([shortcut, x])
    return outputs


def _body(depths: Sequence[int], x: Tensor) -> Tensor:
    return chain(stacks(stem(x), depths, _block), *normalized("post"))


def _resnet(depth: int) -> Any:
    source = "He et al., Identity Mappings in Deep Residual Networks, 2016, https://arxiv.org/abs/1603.05027"
    body = partial(_body, DEPTHS[depth])
    return network(f"ResNet{depth}V2", body, classifier, source=source, named_pooling=True)


ResNet50V2, ResNet101V2, ResNet152V2 = _resnet(50), _resnet(101), _resnet(152)
