"""Fourier transforms and windows of signals; complex numbers are pairs of real tensors. The host transforms."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ArgumentTypeError, ConfigError
from dptrain.ops.common import first_dtype
from dptrain.ops.elementwise import floating
from dptrain.ops.indexing import add_rows, take, take_at_axis
from dptrain.ops.manipulation import stack, transpose
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.padding import pad
from dptrain.program.lowering import HostCall
from dptrain.program.op import op
from dptrain.program.shapes import Shape, without_rows
from dptrain.program.sharding.sharding_rule import names
from dptrain.program.tensor import Array, Tensor, as_tensors
from dptrain.runtime.types import is_floating

Pair = tuple[Tensor, Tensor]


def _letters(input_axes: str, output_axes: str) -> Any:
    """Return the sharding rule of an op whose last axes must be unsharded."""

    def letters(shapes: Sequence[Shape], out: Shape, attributes: Any) -> str:
        rows = names(len(shapes[0]) - len(input_axes))
        return f"{rows}{input_axes}->{rows}{output_axes}"

    return letters


def _write_pair(value: Array, out: Array) -> None:
    out[..., 0, :], out[..., 1, :] = value.real, value.imag


def _to_complex(x: Array) -> Array:
    return np.asarray(x[..., 0, :] + 1j * x[..., 1, :])


@op(
    shape=lambda shape, *, inverse: shape,
    letters=_letters("XX", "XX"),
    dtype=first_dtype,
    linear="each",
    lowering=HostCall(),
)
def fourier(x: Array, *, inverse: bool, out: Array) -> None:
    """Transforms of pairs (..., 2, n): real part, imaginary part."""
    _write_pair((np.fft.ifft if inverse else np.fft.fft)(_to_complex(x)), out)


@fourier.gradient
def _fourier(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    n, inverse = int(x.shape[-1]), y.attributes["inverse"]
    return fourier(dy, inverse=not inverse) * (1 / n if inverse else float(n))


@op(
    shape=lambda shape: (*shape[:-1], 2, int(shape[-1]) // 2 + 1),
    letters=_letters("X", "XX"),
    dtype=first_dtype,
    linear="each",
    lowering=HostCall(),
)
def half_spectrum(x: Array, *, out: Array) -> None:
    """The first half of the transforms of real (..., n), as pairs (..., 2, n // 2 + 1)."""
    _write_pair(np.fft.rfft(x), out)


@op(
    shape=lambda shape, *, length: (*shape[:-2], length),
    letters=_letters("XX", "X"),
    dtype=first_dtype,
    linear="each",
    lowering=HostCall(),
)
def from_half_spectrum(x: Array, *, length: int, out: Array) -> None:
    """The real signals whose transforms begin with pairs (..., 2, n // 2 + 1)."""
    out[...] = np.fft.irfft(_to_complex(x), length)


def _multiplicity(n: int, dtype: Any) -> Array:
    """Return how often each element of half a spectrum stands in the full one."""
    counts = np.full(n // 2 + 1, 2, dtype)
    counts[0] = 1
    if n % 2 == 0:
        counts[-1] = 1
    return counts


@half_spectrum.gradient
def _half_spectrum(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    n = int(x.shape[-1])
    return from_half_spectrum(dy / _multiplicity(n, dy.dtype), length=n) * float(n)


@from_half_spectrum.gradient
def _from_half_spectrum(y: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    n = int(y.shape[-1])
    return half_spectrum(dy) * (_multiplicity(n, dy.dtype) / n)


def _pair(x: Any) -> Tensor:
    """Check real and imaginary tensors and join them as (..., 2, n)."""
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise ConfigError(f"Input `x` should be a tuple of two tensors - real and imaginary.Received: x={x}")
    real, imaginary = as_tensors(x)
    _require_rank(real, 1)
    if real.shape != imaginary.shape:
        raise ConfigError(
            "Input `x` should be a tuple of two tensors - real and imaginary.Both the real and imaginary parts should "
            f"have the same shape. Received: x[0].shape = {real.shape}, x[1].shape = {imaginary.shape}"
        )
    if not is_floating(real.dtype) or not is_floating(imaginary.dtype):
        raise ConfigError(f"At least one tensor in input `x` is not of type float.Received: x={x}.")
    return stack([real, imaginary], -2)


def _parts(x: Tensor) -> Pair:
    return x[..., 0, :], x[..., 1, :]


@operation
def fft(x: Pair) -> Pair:
    """Return the discrete Fourier transform along the last axis of a pair of tensors (..., n), as such a pair."""
    return _parts(fourier(_pair(x), inverse=False))


@operation
def fft2(x: Pair) -> Pair:
    """Return the discrete Fourier transform along the last two axes; see `fft`."""
    return _transform_2d(x, False)


@operation
def ifft2(x: Pair) -> Pair:
    """Return the inverse of `fft2`."""
    return _transform_2d(x, True)


def _transform_2d(x: Pair, inverse: bool) -> Pair:
    _pair(x)
    _require_rank(as_tensors(x)[0], 2)
    along = x
    for _ in range(2):
        real, imaginary = _parts(fourier(_pair(along), inverse=inverse))
        order = (*range(real.ndim - 2), real.ndim - 1, real.ndim - 2)
        along = transpose(real, order), transpose(imaginary, order)
    return along


def _cut_or_padded(x: Tensor, length: int) -> Tensor:
    current = int(x.shape[-1])
    if current > length:
        return x[..., :length]
    return x if current == length else pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - current)])


@operation
@for_open_shapes
def rfft(x: Any, fft_length: int | None = None) -> Pair:
    """Return the first n // 2 + 1 elements of the transform of real numbers (..., n) along the last axis, as a pair.

    `fft_length` is the n to which x is cut or zero-padded.
    """
    tensor = floating(x)
    _require_rank(tensor, 1)
    return _parts(half_spectrum(_cut_or_padded(tensor, int(tensor.shape[-1] if fft_length is None else fft_length))))


@operation
@for_open_shapes
def irfft(x: Pair, fft_length: int | None = None) -> Tensor:
    """Return the real signal whose transform begins with a pair (..., k): the inverse of `rfft`.

    `fft_length` is the signal's, by default 2 (k - 1).
    """
    pair = _pair(x)
    length = 2 * (int(pair.shape[-1]) - 1) if fft_length is None else int(fft_length)
    return from_half_spectrum(_cut_or_padded(pair, length // 2 + 1), length=length)


# Windows of signals


@operation
@for_open_shapes
def extract_sequences(x: Any, sequence_length: int, sequence_stride: int) -> Tensor:
    """Return windows of the last axis: (..., n) becomes (..., 1 + (n - sequence_length) // stride, sequence_length)."""
    (tensor,) = as_tensors([x])
    _require_rank(tensor, 1)
    places = _windows(int(tensor.shape[-1]), sequence_length, sequence_stride)
    return (
        take_at_axis(tensor, as_tensors([places])[0], tensor.ndim - 1) if tensor.ndim > 1 else take(tensor, places, 0)
    )


def _require_rank(x: Tensor, rank: int) -> None:
    if x.ndim < rank:
        raise ConfigError(f"Input should have rank >= {rank}. Received: input.shape = {without_rows(x.shape)}")


def _require_lengths(**lengths: Any) -> None:
    for name, length in lengths.items():
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise ConfigError(f"`{name}` must be a positive integer. Received: {name}={length}")


def _windows(length: int, sequence_length: int, sequence_stride: int) -> Array:
    _require_lengths(sequence_length=sequence_length, sequence_stride=sequence_stride)
    if length < sequence_length:
        raise ConfigError(f"sequence_length={sequence_length}: the signal has only {length} samples")
    count = 1 + (length - sequence_length) // sequence_stride
    return np.arange(count)[:, None] * sequence_stride + np.arange(sequence_length)


def overlapped(x: Tensor, sequence_stride: int) -> Tensor:
    """Sum windows that begin a stride apart: (..., k, w) becomes (..., (k - 1) stride + w)."""
    count, width = map(int, x.shape[-2:])
    length = (count - 1) * sequence_stride + width
    front = transpose(x, (x.ndim - 2, x.ndim - 1, *range(x.ndim - 2)))
    summed = add_rows(front, _windows(length, width, sequence_stride), length=length)
    return transpose(summed, (*range(1, summed.ndim), 0))


def _window(window: Any, sequence_length: int, fft_length: int, dtype: Any) -> Array:
    """Return a window's weights, zero-padded on both sides; refuse unknown names and other lengths."""
    if window is None:
        return np.ones(fft_length, dtype)
    if isinstance(window, str):
        if window not in ("hann", "hamming"):
            raise ConfigError(
                f'If a string is passed to `window`, it must be one of `"hann"`, `"hamming"`. Received: window={window}'
            )
        turn = 2 * math.pi * np.arange(sequence_length) / sequence_length
        weights = 0.5 - 0.5 * np.cos(turn) if window == "hann" else 0.54 - 0.46 * np.cos(turn)
        weights = weights if sequence_length > 1 else np.ones(1)
    else:
        (vector,) = as_tensors([window])
        if vector.shape != (sequence_length,) or vector.value is None:
            raise ConfigError(
                f"The shape of `window` must be equal to [sequence_length].Received: window shape={vector.shape}"
            )
        weights = vector.value
    before = (fft_length - sequence_length) // 2
    return np.pad(weights, (before, fft_length - sequence_length - before)).astype(dtype)


def _checked(sequence_length: int, sequence_stride: int, fft_length: int) -> None:
    _require_lengths(sequence_length=sequence_length, sequence_stride=sequence_stride, fft_length=fft_length)
    if fft_length < sequence_length:
        raise ConfigError(
            "`fft_length` must equal or larger than `sequence_length`. "
            f"Received: sequence_length={sequence_length}, fft_length={fft_length}"
        )


@operation
@for_open_shapes
def stft(
    x: Any, sequence_length: int, sequence_stride: int, fft_length: int, window: Any = "hann", center: bool = True
) -> Pair:
    """Return the short-time Fourier transform as a pair (..., windows, fft_length // 2 + 1).

    Args:
        x: (..., n), float32 or float64.
        sequence_length, sequence_stride: of a window, and between two of them.
        fft_length: to which windows are zero-padded.
        window: "hann", "hamming", weights, or None for ones.
        center: reflect signals at both ends, so that window t is centered at t times the stride.
    """
    (signal,) = as_tensors([x])
    if signal.dtype.name not in ("float32", "float64"):
        raise ArgumentTypeError(
            f"Invalid input type. Expected `float32` or `float64`. Received: input type={signal.dtype.name}"
        )
    _checked(sequence_length, sequence_stride, fft_length)
    _require_rank(signal, 1)
    weights = _window(window, sequence_length, fft_length, signal.dtype)
    if center:
        half = fft_length // 2
        signal = pad(signal, [(0, 0)] * (signal.ndim - 1) + [(half, half)], mode="reflect")
    return _parts(half_spectrum(extract_sequences(signal, fft_length, sequence_stride) * weights))


@operation
@for_open_shapes
def istft(
    x: Pair,
    sequence_length: int,
    sequence_stride: int,
    fft_length: int,
    length: int | None = None,
    window: Any = "hann",
    center: bool = True,
) -> Tensor:
    """Return the signals whose windows have these transforms: the inverse of `stft`.

    Args:
        x: real and imaginary parts (..., windows, fft_length // 2 + 1).
        sequence_length, sequence_stride, fft_length, center: see `stft`.
        length: of the signals; by default as far as the windows reach.
        window: see `stft`; with None, overlaps are summed, as in Keras, not averaged.
    """
    pair = _pair(x)
    if pair.ndim < 3:
        raise ConfigError(f"Input `x` must have at least 2 dimensions. Received shape: {x[0].shape}")
    _checked(sequence_length, sequence_stride, fft_length)
    weights = _window(window, sequence_length, fft_length, pair.dtype)
    windows = from_half_spectrum(_cut_or_padded(pair, fft_length // 2 + 1), length=fft_length)
    count = int(windows.shape[-2])
    total = (count - 1) * sequence_stride + fft_length
    signal = overlapped(windows * weights, sequence_stride)
    if window is not None:
        power = np.zeros(total, pair.dtype)
        squares = np.broadcast_to(weights**2, (count, fft_length))
        np.add.at(power, _windows(total, fft_length, sequence_stride), squares)
        signal = signal / np.where(power > 1e-10, power, 1)
    start = fft_length // 2 if center else 0
    end = start + length if length is not None else total - (fft_length // 2 if center else 0)
    return signal[..., start : min(end, total)]
