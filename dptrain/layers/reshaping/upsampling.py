"""Larger images: repeated or interpolated elements."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import lengths, positive
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.spatial import SpatialLayer
from dptrain.ops.image.resizing import RESIZE_INTERPOLATIONS
from dptrain.program.tensor import Tensor


class _UpSampling(SpatialLayer):
    """Repeats every element along each axis of space."""

    size: Any

    def call(self, inputs: Tensor) -> Tensor:
        times = (self.size,) if isinstance(self.size, int) else self.size
        expanded, repeated, joined = [inputs.shape[0]], [inputs.shape[0]], [inputs.shape[0]]
        for axis, length in enumerate(inputs.shape[1:], 1):
            number = times[self._space.index(axis)] if axis in self._space else 1
            expanded += [length] if number == 1 else [length, 1]
            repeated += [length] if number == 1 else [length, number]
            joined.append(length * number)
        return ops.reshape(ops.broadcast_to(ops.reshape(inputs, expanded), repeated), joined)


class UpSampling1D(_UpSampling):
    """Repeats every element of sequences (rows, length, channels) `size` times."""

    rank = 1

    def __init__(self, size: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(None)
        self.size = positive("size", size)
        self.input_spec = InputSpec(ndim=3)


class UpSampling2D(_UpSampling):
    """Enlarges images (rows, height, width, channels).

    `size` is a factor for both axes, or a pair; `interpolation` "nearest" repeats every pixel, for others see
    `ops.image.resize`.
    """

    rank = 2

    def __init__(
        self,
        size: int | Sequence[int] = (2, 2),
        data_format: str | None = None,
        interpolation: str = "nearest",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.size = lengths("size", size, self.rank)
        self.interpolation = interpolation.lower()
        if self.interpolation not in RESIZE_INTERPOLATIONS:
            raise ConfigError(
                "`interpolation` argument should be one of: "
                f"{', '.join(map(repr, RESIZE_INTERPOLATIONS))}. Received: {interpolation}."
            )
        self.input_spec = InputSpec(ndim=4)

    def call(self, inputs: Tensor) -> Tensor:
        """Return larger images."""
        if self.interpolation == "nearest":
            return super().call(inputs)
        height, width = (int(inputs.shape[axis]) * n for axis, n in zip(self._space, self.size, strict=True))
        x = self._floating(inputs)
        return ops.image.resize(x, (height, width), self.interpolation, data_format=self.data_format)


class UpSampling3D(_UpSampling):
    """Repeats every element of volumes (rows, depth, height, width, channels); `size` is for all axes, or each."""

    rank = 3

    def __init__(self, size: int | Sequence[int] = (2, 2, 2), data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.size = lengths("size", size, self.rank)
        self.input_spec = InputSpec(ndim=5)
