"""Zeros around images, and images without their borders."""

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
    """Return (before, behind) for each axis of space, after checking them."""
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
    """Zeros around images."""

    _moves_values = True

    padding: Any

    @property
    def _widths(self) -> Pairs:
        return self.padding if self.rank > 1 else (self.padding,)

    def call(self, inputs: Tensor) -> Tensor:
        """Return larger images."""
        widths = [(0, 0)] * (self.rank + 2)
        for axis, pair in zip(self._space, self._widths, strict=True):
            widths[axis] = (pair[0], pair[1])
        return ops.pad(inputs, widths)


class ZeroPadding1D(_Padding):
    """Puts zeros before and behind sequences (rows, length, channels).

    Args:
        padding: how many: one number, or (before, behind).
        data_format: "channels_last" (the default) or "channels_first".
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: another form of padding, or another data format.
    """

    rank = 1

    def __init__(self, padding: int | Sequence[int] = 1, data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.padding = lengths("padding", padding, 2, least=0)
        self.input_spec = InputSpec(ndim=3)


class ZeroPadding2D(_Padding):
    """Puts zeros around images (rows, height, width, channels).

    Args:
        padding: rows and columns: one number, one each, or ((above, below), (left, right)).
        data_format: "channels_last" (the default) or "channels_first".
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: another form of padding, or another data format.
    """

    rank = 2

    def __init__(self, padding: Any = (1, 1), data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.padding = _pairs("padding", padding, self.rank)
        self.input_spec = InputSpec(ndim=4)


class ZeroPadding3D(_Padding):
    """Puts zeros around volumes (rows, depth, height, width, channels).

    Args:
        padding: along each axis: one number for all, one each, or (before, behind) each.
        data_format: "channels_last" (the default) or "channels_first".
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: another form of padding, or another data format.
    """

    rank = 3

    def __init__(self, padding: Any = ((1, 1), (1, 1), (1, 1)), data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.padding = _pairs("padding", padding, self.rank)
        self.input_spec = InputSpec(ndim=5)


class _Cropping(SpatialLayer):
    """Images without their borders."""

    _moves_values = True

    cropping: Any

    @property
    def _widths(self) -> Pairs:
        return self.cropping if self.rank > 1 else (self.cropping,)

    def call(self, inputs: Tensor) -> Tensor:
        """Return smaller images."""
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
    """Takes elements off both ends of sequences (rows, length, channels).

    Args:
        cropping: how many: one number, or (before, behind).
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: another form of cropping.
    """

    rank = 1

    def __init__(self, cropping: int | Sequence[int] = (1, 1), **options: Any) -> None:
        super().__init__(**options)
        self._set_format(None)
        self.cropping = lengths("cropping", cropping, 2, least=0)
        self.input_spec = InputSpec(ndim=3)


class Cropping2D(_Cropping):
    """Takes rows and columns off images (rows, height, width, channels).

    Args:
        cropping: rows and columns: one number, or ((above, below), (left, right)), each perhaps one number.
        data_format: "channels_last" (the default) or "channels_first".
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: another form of cropping, or another data format.
    """

    rank = 2

    def __init__(self, cropping: Any = ((0, 0), (0, 0)), data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.cropping = _pairs("cropping", cropping, self.rank)
        self.input_spec = InputSpec(ndim=4)


class Cropping3D(_Cropping):
    """Takes the borders off volumes (rows, depth, height, width, channels).

    Args:
        cropping: along each axis: one number for all, one each, or (before, behind) each.
        data_format: "channels_last" (the default) or "channels_first".
        options: keyword arguments of `Layer`.

    Raises:
        ConfigError: another form of cropping, or another data format.
    """

    rank = 3

    def __init__(
        self, cropping: Any = ((1, 1), (1, 1), (1, 1)), data_format: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._set_format(data_format)
        self.cropping = _pairs("cropping", cropping, self.rank)
        self.input_spec = InputSpec(ndim=5)
