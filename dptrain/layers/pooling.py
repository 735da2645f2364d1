"""Pooling: the greatest element or the mean of windows of images (rows, height, width, channels), or of whole ones."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain import ops
from dptrain.layers.arguments import channels_last, padding_mode, pair
from dptrain.layers.base import Layer
from dptrain.layers.input_spec import InputSpec
from dptrain.program.tensor import Tensor


class _Pooling(Layer):
    """One number of each window of each channel."""

    _pool: Callable[..., Tensor]

    def __init__(
        self,
        pool_size: int | Sequence[int] = (2, 2),
        strides: int | Sequence[int] | None = None,
        padding: str = "valid",
        data_format: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name=name, **options)
        self.pool_size = pair("pool_size", pool_size)
        self.strides = self.pool_size if strides is None else pair("strides", strides)
        self.padding, self.data_format = padding_mode(padding), channels_last(self, data_format)
        self.input_spec = InputSpec(ndim=4)

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, height out, width out, channels)."""
        return type(self)._pool(inputs, self.pool_size, self.strides, self.padding)


class MaxPooling2D(_Pooling):
    """The greatest element of each window of each channel; the arguments are those of `AveragePooling2D`."""

    _pool = staticmethod(ops.max_pool)


class AveragePooling2D(_Pooling):
    """The mean of each window of each channel.

    Args:
        pool_size: of the windows, one number for height and width, or two.
        strides: between them; by default their size.
        padding: "valid" (none), or "same": windows may reach beyond the image, and then count what of them is in it.
        data_format: only "channels_last", which None stands for.
        name: as `Layer`.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range or not supported.
    """

    _pool = staticmethod(ops.average_pool)


class _GlobalPooling(Layer):
    """One number of each channel."""

    _reduce: Callable[..., Tensor]

    def __init__(self, data_format: str | None = None, keepdims: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.data_format, self.keepdims = channels_last(self, data_format), bool(keepdims)
        self.input_spec = InputSpec(ndim=4)

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, channels), or (rows, 1, 1, channels)."""
        return type(self)._reduce(inputs, (1, 2), self.keepdims)


class GlobalMaxPooling2D(_GlobalPooling):
    """The greatest element of each channel; the arguments are those of `GlobalAveragePooling2D`."""

    _reduce = staticmethod(ops.max)


class GlobalAveragePooling2D(_GlobalPooling):
    """The mean of each channel of an image.

    Args:
        data_format: only "channels_last", which None stands for.
        keepdims: whether height and width stay, 1 each.
        options: as `Layer`.

    Raises:
        ConfigError: another data format.
    """

    _reduce = staticmethod(ops.mean)


MaxPool2D, AvgPool2D = MaxPooling2D, AveragePooling2D
GlobalMaxPool2D, GlobalAvgPool2D = GlobalMaxPooling2D, GlobalAveragePooling2D
