"""Zero padding and cropping of images."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import lengths
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.spatial import SpatialLayer
from dptrain.program.dims import is_number
from dptrain.program.shapes import without_rows
from dptrain.program.tensor import Tensor

Pairs = tuple[tuple[int, ...], ...]


def _pairs(name: str, value: Any, rank: int) -> Pairs:
    """Check and return (before, after) for each axis of space."""
    if isinstance(value, int):
        return (lengths(name, value, 2, least=0),) * rank
    if not isinstance(value, Sequence):
        raise ConfigError(
            f"`{name}` should be either an int, a tuple of {rank} ints, or a tuple of {rank} tuples of 2 ints. "
            f"Received: {name}={value}."
        )
    if len(value) != rank:
        raise ConfigError(f"`{name}` should have {('two', '3')[rank - 2]} elements. Received: {name}={value}.")
    ordinals = ("1st", "2nd", "3rd")
    return tuple(lengths(f"{ordinals[n]} entry of {name}", pair, 2, least=0) for n, pair in enumerate(value))


class _Padding(SpatialLayer):
    """Pads images with zeros."""

    _moves_values = True

    padding: Any

    @property
    def _widths(self) -> Pairs:
        return self.padding if self.rank > 1 else (self.padding,)

    def call(self, inputs: Tensor) -> Tensor:
        widths = [(0, 0)] * (self.rank + 2)
        for axis, pair in zip(self._space, self._widths, strict=True):
            widths[axis] = (pair[0], pair[1])
        return ops.pad(inputs, widths)


class ZeroPadding1D(_Padding):
    """Pads sequences (rows, length, channels) with zeros; `padding` is a number, or (before, after)."""

    rank = 1

    def __init__(self, padding: int | Sequence[int] = 1, data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.padding = lengths("padding", padding, 2, least=0)
        self.input_spec = InputSpec(ndim=3)


class ZeroPadding2D(_Padding):
    """Pads images (rows, height, width, channels) with zeros.

    `padding` is a number of rows and columns, one each, or ((above, below), (left, right)).
    """

    rank = 2

    def __init__(self, padding: Any = (1, 1), data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.padding = _pairs("padding", padding, self.rank)
        self.input_spec = InputSpec(ndim=4)


class ZeroPadding3D(_Padding):
    """Pads volumes (rows, depth, height, width, channels) with zeros: a number, three, or three (before, after)."""

    rank = 3

    def __init__(self, padding: Any = ((1, 1), (1, 1), (1, 1)), data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.padding = _pairs("padding", padding, self.rank)
        self.input_spec = InputSpec(ndim=5)


class _Cropping(SpatialLayer):
    """Crops images."""

    _moves_values = True

    cropping: Any

    @property
    def _widths(self) -> Pairs:
        return self.cropping if self.rank > 1 else (self.cropping,)

    def call(self, inputs: Tensor) -> Tensor:
        key = [slice(None)] * (self.rank + 2)
        for axis, (before, behind) in zip(self._space, self._widths, strict=True):
            length = inputs.shape[axis]
            if is_number(length) and before + behind >= length:
                raise ConfigError(
                    "Values in `cropping` argument should be smaller than the corresponding spatial dimension of the "
                    f"input. Received: inputs.shape={without_rows(inputs.shape)}, cropping={self.cropping}"
                )
            key[axis] = slice(before, length - behind)
        return inputs[tuple(key)]


class Cropping1D(_Cropping):
    """Crops sequences (rows, length, channels) at both ends; `cropping` is a number, or (before, after)."""

    rank = 1

    def __init__(self, cropping: int | Sequence[int] = (1, 1), **options: Any) -> None:
        super().__init__(**options)
        self._set_format(None)
        self.cropping = lengths("cropping", cropping, 2, least=0)
        self.input_spec = InputSpec(ndim=3)


class Cropping2D(_Cropping):
    """Crops images (rows, height, width, channels).

    `cropping` is a number of rows and columns, or ((above, below), (left, right)), where a number may replace a pair.
    """

    rank = 2

    def __init__(self, cropping: Any = ((0, 0), (0, 0)), data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.cropping = _pairs("cropping", cropping, self.rank)
        self.input_spec = InputSpec(ndim=4)


class Cropping3D(_Cropping):
    """Crops volumes (rows, depth, height, width, channels) by a number, three, or three (before, after)."""

    rank = 3

    def __init__(
        self, cropping: Any = ((1, 1), (1, 1), (1, 1)), data_format: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.cropping = _pairs("cropping", cropping, self.rank)
        self.input_spec = InputSpec(ndim=5)
