"""Pooling: the maximum or mean of windows of images, or of whole images."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain import ops
from dptrain.layers.arguments import lengths, padding_mode
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.masks import require_mask
from dptrain.layers.spatial import SpatialLayer
from dptrain.program.tensor import Tensor


class Pooling(SpatialLayer):
    """Reduces each window of each channel to a number.

    Args:
        pool_size: of the windows, for all axes of space, or each.
        strides: between them; by default their size.
        padding: "valid" (none), or "same": windows may reach beyond the image; only the part inside counts.
        data_format: "channels_last" (the default) or "channels_first".
    """

    _has_no_weights = True
    _pool: Callable[..., Tensor]

    def __init__(
        self,
        pool_size: int | Sequence[int] = 2,
        strides: int | Sequence[int] | None = None,
        padding: str = "valid",
        data_format: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name=name, **options)
        self.pool_size = lengths("pool_size", pool_size, self.rank)
        self.strides = self.pool_size if strides is None else lengths("strides", strides, self.rank)
        self.padding = padding_mode(padding)
        self._set_format(data_format)
        self.input_spec = InputSpec(ndim=self.rank + 2)

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, *space, channels), or (rows, channels, *space)."""
        return type(self)._pool(inputs, self.pool_size, self.strides, self.padding, self.data_format)


class MaxPooling1D(Pooling):
    """`Pooling` by the maximum, of sequences."""

    rank, _pool = 1, staticmethod(ops.max_pool)


class MaxPooling2D(Pooling):
    """`Pooling` by the maximum, of images."""

    rank, _pool = 2, staticmethod(ops.max_pool)


class MaxPooling3D(Pooling):
    """`Pooling` by the maximum, of volumes."""

    rank, _pool = 3, staticmethod(ops.max_pool)


class AveragePooling1D(Pooling):
    """`Pooling` by the mean, of sequences."""

    rank, _pool = 1, staticmethod(ops.average_pool)


class AveragePooling2D(Pooling):
    """`Pooling` by the mean, of images."""

    rank, _pool = 2, staticmethod(ops.average_pool)


class AveragePooling3D(Pooling):
    """`Pooling` by the mean, of volumes."""

    rank, _pool = 3, staticmethod(ops.average_pool)


class AdaptivePooling(SpatialLayer):
    """Reduces a fixed number of windows of each channel to a number each; they overlap where lengths do not divide.

    `output_size` is the number of windows along all axes of space, or each.
    """

    _pool: Callable[..., Tensor]

    def __init__(self, output_size: int | Sequence[int], data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.output_size = lengths("output_size", output_size, self.rank)
        self._set_format(data_format)
        self.input_spec = InputSpec(ndim=self.rank + 2)

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, *output_size, channels), or (rows, channels, *output_size)."""
        return type(self)._pool(inputs, self.output_size, self.data_format)


class AdaptiveMaxPooling1D(AdaptivePooling):
    """`AdaptivePooling` by the maximum, of sequences."""

    rank, _pool = 1, staticmethod(ops.adaptive_max_pool)


class AdaptiveMaxPooling2D(AdaptivePooling):
    """`AdaptivePooling` by the maximum, of images."""

    rank, _pool = 2, staticmethod(ops.adaptive_max_pool)


class AdaptiveMaxPooling3D(AdaptivePooling):
    """`AdaptivePooling` by the maximum, of volumes."""

    rank, _pool = 3, staticmethod(ops.adaptive_max_pool)


class AdaptiveAveragePooling1D(AdaptivePooling):
    """`AdaptivePooling` by the mean, of sequences."""

    rank, _pool = 1, staticmethod(ops.adaptive_average_pool)


class AdaptiveAveragePooling2D(AdaptivePooling):
    """`AdaptivePooling` by the mean, of images."""

    rank, _pool = 2, staticmethod(ops.adaptive_average_pool)


class AdaptiveAveragePooling3D(AdaptivePooling):
    """`AdaptivePooling` by the mean, of volumes."""

    rank, _pool = 3, staticmethod(ops.adaptive_average_pool)


class GlobalPooling(SpatialLayer):
    """Reduces each channel of an image to a number; `keepdims` keeps the axes of space, with length 1."""

    _has_no_weights = True
    _reduce: Callable[..., Tensor]

    def __init__(self, data_format: str | None = None, keepdims: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.keepdims = bool(keepdims)
        self.input_spec = InputSpec(ndim=self.rank + 2)

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, channels), or with `keepdims` with axes of space of length 1."""
        return type(self)._reduce(inputs, self._space, self.keepdims)


class GlobalMaxPooling1D(GlobalPooling):
    """`GlobalPooling` by the maximum, of sequences."""

    rank, _reduce = 1, staticmethod(ops.max)


class GlobalMaxPooling2D(GlobalPooling):
    """`GlobalPooling` by the maximum, of images."""

    rank, _reduce = 2, staticmethod(ops.max)


class GlobalMaxPooling3D(GlobalPooling):
    """`GlobalPooling` by the maximum, of volumes."""

    rank, _reduce = 3, staticmethod(ops.max)


class GlobalAveragePooling1D(GlobalPooling):
    """`GlobalPooling` by the mean, of sequences."""

    rank, _reduce = 1, staticmethod(ops.mean)
    _passes_masks = True

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """Return None: the result has no steps."""

    def call(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `GlobalPooling`; `mask` (rows, length) says which elements count."""
        if mask is None:
            return super().call(inputs)
        require_mask(self, mask, (inputs.shape[0], *(inputs.shape[axis] for axis in self._space)))
        counts = ops.cast(ops.expand_dims(ops.cast(mask, "bool"), self._channel_axis), inputs.dtype)
        total = ops.sum(ops.where(counts > 0, inputs, 0), self._space, self.keepdims)
        return total / ops.sum(counts, self._space, self.keepdims)


class GlobalAveragePooling2D(GlobalPooling):
    """`GlobalPooling` by the mean, of images."""

    rank, _reduce = 2, staticmethod(ops.mean)


class GlobalAveragePooling3D(GlobalPooling):
    """`GlobalPooling` by the mean, of volumes."""

    rank, _reduce = 3, staticmethod(ops.mean)


MaxPool1D, MaxPool2D, MaxPool3D = MaxPooling1D, MaxPooling2D, MaxPooling3D
AvgPool1D, AvgPool2D, AvgPool3D = AveragePooling1D, AveragePooling2D, AveragePooling3D
GlobalMaxPool1D, GlobalMaxPool2D, GlobalMaxPool3D = GlobalMaxPooling1D, GlobalMaxPooling2D, GlobalMaxPooling3D
GlobalAvgPool1D, GlobalAvgPool2D, GlobalAvgPool3D = (
    GlobalAveragePooling1D,
    GlobalAveragePooling2D,
    GlobalAveragePooling3D,
)
