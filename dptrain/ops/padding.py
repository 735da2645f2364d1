"""Padding in the modes of Keras and NumPy: with a number, the last element, a mirror or a period."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import cast
from dptrain.ops.indexing import take
from dptrain.ops.manipulation import broadcast_to, concatenate, put
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.program.dims import UnknownLengthError, is_number
from dptrain.program.tensor import Tensor, as_tensors

_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


@operation
@for_open_shapes
def pad(x: Any, pad_width: Any, mode: str = "constant", constant_values: float | None = None) -> Tensor:
    """Pad x at both ends of every axis.

    Args:
        x: a tensor or an array.
        pad_width: (before, after) for each axis, such a pair for all, or a number.
        mode: "constant" fills with a number, "edge" repeats the outermost element, "reflect" mirrors at it, "symmetric"
            mirrors including it, "wrap" continues with the other end.
        constant_values: of "constant", 0 by default.
    """
    (tensor,) = as_tensors([x])
    if mode not in _MODES:
        raise ConfigError(f"pad: mode={mode!r}; expected one of {', '.join(_MODES)}")
    if mode != "constant" and constant_values is not None:
        raise ConfigError(
            "Argument `constant_values` can only be provided when `mode == 'constant'`. "
            f"Received: mode={mode}, constant_values={constant_values}"
        )
    widths = _widths(pad_width, tensor.ndim)
    if mode == "constant" and not constant_values:
        return _with_zeros(tensor, widths)
    for axis, (before, behind) in enumerate(widths):
        if not before and not behind:
            continue
        length = tensor.shape[axis]
        if mode == "constant":
            value = cast(constant_values, tensor.dtype)
            ends = [(*tensor.shape[:axis], n, *tensor.shape[axis + 1 :]) for n in (before, behind)]
            first, last = (broadcast_to(value, shape) for shape in ends)
            tensor = concatenate([first, tensor, last], axis)
        elif not is_number(length) or not length:
            error = ConfigError if is_number(length) else UnknownLengthError
            raise error(f"pad: mode={mode!r} along axis {axis} of shape {tensor.shape}; expected a known length")
        else:
            tensor = take(tensor, np.pad(np.arange(int(length)), (before, behind), mode), axis)  # type: ignore[call-overload]
    return tensor


def _widths(pad_width: Any, rank: int) -> list[tuple[int, int]]:
    array = np.asarray(pad_width)
    is_valid = array.shape in ((), (1,), (2,), (1, 2), (rank, 1), (rank, 2))
    if array.dtype.kind not in "iu" or not is_valid or (array < 0).any():
        raise ConfigError(
            f"pad: pad_width={pad_width} for {rank} axes; expected (before, after) for each, one pair, or an integer"
        )
    return [(int(before), int(behind)) for before, behind in np.broadcast_to(array, (rank, 2))]


def _with_zeros(x: Tensor, widths: Sequence[tuple[int, int]]) -> Tensor:
    pairs = list(zip(x.shape, widths, strict=True))
    key = tuple((before, before + n if before else n, 1) for n, (before, _) in pairs)
    return put(x, key=key, shape=tuple(before + n + behind if before + behind else n for n, (before, behind) in pairs))
