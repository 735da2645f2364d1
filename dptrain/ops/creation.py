"""Tensors of known numbers, and questions about tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.arrays import convert_to_tensor, linspace
from dptrain.ops.common import limits
from dptrain.ops.elementwise import cast, clip, power
from dptrain.ops.manipulation import expand_dims, ones_like, zeros, zeros_like
from dptrain.ops.operation_calls import operation
from dptrain.program.tensor import Tensor, Variable, as_tensors, constant
from dptrain.runtime.floatx import floatx
from dptrain.runtime.types import DType, is_floating


@operation
def array(x: Any, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return a tensor of an array, number, variable or list."""
    return convert_to_tensor(x, dtype)


@operation
def copy(x: Any) -> Tensor:
    """Return x itself: tensors are immutable."""
    return convert_to_tensor(x)


def empty(shape: Sequence[int] | int, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return zeros: uninitialized memory would differ from run to run."""
    return zeros(shape, dtype)


@operation
def empty_like(x: Any, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return zeros of x's shape, by default of its type."""
    return zeros_like(x, dtype)


def is_tensor(x: Any) -> bool:
    """Return whether x is a tensor; a variable is not, it has one."""
    return isinstance(x, Tensor)


def dtype(x: Any) -> str:
    """Return the name of the type of a tensor, a variable or an array."""
    return x.dtype.name if isinstance(x, Tensor | Variable) else as_tensors([x])[0].dtype.name


@operation
def saturate_cast(x: Any, dtype: npt.DTypeLike) -> Tensor:
    """Cast, by default to floatx, clamping to the type's range."""
    (tensor,), target = as_tensors([x]), np.dtype(dtype or floatx())
    if tensor.dtype.kind == "b" or target.kind == "b":
        return cast(tensor, target)
    (low, high), (own_low, own_high) = _range(target), _range(tensor.dtype)
    least, greatest = max(low, own_low), min(high, own_high)
    if is_floating(tensor.dtype):
        # Limits that both types can hold: for float32 and int32 the greatest number below 2^31.
        top = np.array(greatest, tensor.dtype)
        greatest = float(np.nextafter(top, np.array(0, tensor.dtype)) if float(top) > greatest else top)
        least = max(float(least), -greatest) if is_floating(target) else float(least)
    elif (least, greatest) == (own_low, own_high):
        return cast(tensor, target)
    return cast(clip(tensor, least, greatest), target)


def _range(dtype: DType) -> tuple[float, float]:
    if is_floating(dtype):
        return float(limits(dtype).min), float(limits(dtype).max)
    return np.iinfo(dtype).min, np.iinfo(dtype).max


@operation
def real(x: Any) -> Tensor:
    """Return x: all numbers here are real."""
    return convert_to_tensor(x)


@operation
def conj(x: Any) -> Tensor:
    """Return x: all numbers here are real."""
    return convert_to_tensor(x)


conjugate = conj


@operation
def isreal(x: Any) -> Tensor:
    """Return true for every element."""
    return ones_like(x, "bool")


@operation
def logspace(
    start: Any,
    stop: Any,
    num: int = 50,
    endpoint: bool = True,
    base: float = 10,
    dtype: npt.DTypeLike | None = None,
    axis: int = 0,
) -> Tensor:
    """Return numbers from base^start to base^stop along a new axis, evenly spaced in the exponent."""
    if any(isinstance(end, Tensor) and end.value is None for end in (start, stop)):
        return cast(power(float(base), linspace(start, stop, num, endpoint, axis=axis)), dtype or floatx())
    return constant(np.logspace(start, stop, num, endpoint, base, axis=axis).astype(dtype or floatx()))


@operation
def geomspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, dtype: npt.DTypeLike | None = None, axis: int = 0
) -> Tensor:
    """Return numbers from start to stop along a new axis, in a geometric series; both above 0, or both below."""
    if any(isinstance(end, Tensor) and end.value is None for end in (start, stop)):
        first, last = as_tensors([start, stop])
        ratio = last / first
        exponents = linspace(zeros_like(ratio), ones_like(ratio), num, endpoint, axis=axis)
        axis += ratio.ndim + 1 if axis < 0 else 0
        factors = power(expand_dims(ratio, axis), exponents)
        return cast(expand_dims(zeros_like(ratio) + first, axis) * factors, dtype or floatx())
    return constant(np.geomspace(start, stop, num, endpoint, axis=axis).astype(dtype or floatx()))


def _window(function: Callable[..., Any], length: Any, *arguments: Any) -> Tensor:
    if isinstance(length, Tensor | np.ndarray | np.generic) and not np.ndim(length) and length.dtype.kind in "iu":
        length = int(length)
    if not isinstance(length, int) or length < 0:
        raise ConfigError(f"{function.__name__}: x={length!r}; expected an integer of at least 0")
    return constant(function(length, *arguments).astype(floatx()))


def bartlett(x: int) -> Tensor:
    """Return the Bartlett (triangular) window of this length."""
    return _window(np.bartlett, x)


def blackman(x: int) -> Tensor:
    """Return the Blackman window of this length."""
    return _window(np.blackman, x)


def hamming(x: int) -> Tensor:
    """Return the Hamming window of this length."""
    return _window(np.hamming, x)


def hanning(x: int) -> Tensor:
    """Return the von Hann window of this length."""
    return _window(np.hanning, x)


def kaiser(x: int, beta: float) -> Tensor:
    """Return the Kaiser window of this length."""
    return _window(np.kaiser, x, beta)
