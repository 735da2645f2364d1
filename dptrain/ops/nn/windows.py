"""Windows as columns, blocks of pixels as channels, adaptive pooling, and PSNR."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.arrays import log10
from dptrain.ops.elementwise import cast, floating, square
from dptrain.ops.indexing import take
from dptrain.ops.manipulation import reshape, transpose
from dptrain.ops.nn.spatial import channels_first, channels_last
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.padding import pad
from dptrain.ops.products import along_axis
from dptrain.ops.reduction import max, mean
from dptrain.program.shapes import differ
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.image_format import checked_format

Array = npt.NDArray[Any]
Pair = int | Sequence[int]


@operation
@for_open_shapes
def depth_to_space(x: Any, block_size: int, data_format: str = "channels_last") -> Tensor:
    """Move channels into space: height and width grow by `block_size`, from 2, and channels shrink by its square."""
    images, size = _blocks(x, block_size, data_format)
    rows, height, width, channels = images.shape
    out_channels, remainder = divmod(int(channels), size * size)
    if remainder:
        raise ConfigError(f"depth_to_space: {int(channels)} channels; expected a multiple of {size} x {size}")
    # With channels first, a pixel's channels are not adjacent.
    first = checked_format(data_format) == "channels_first"
    inner, order = (
        ((out_channels, size, size), (0, 1, 4, 2, 5, 3)) if first else ((size, size, out_channels), (0, 1, 3, 2, 4, 5))
    )
    pixels = transpose(reshape(images, (rows, height, width, *inner)), order)
    return _in_format(reshape(pixels, (rows, height * size, width * size, out_channels)), data_format)


@operation
@for_open_shapes
def space_to_depth(x: Any, block_size: int, data_format: str = "channels_last") -> Tensor:
    """Move blocks of `block_size` x `block_size` pixels (from 2) into channels; height and width shrink."""
    images, size = _blocks(x, block_size, data_format)
    rows, height, width, channels = images.shape
    if int(height) % size or int(width) % size:
        raise ConfigError(f"space_to_depth: images of {int(height)} x {int(width)}; expected multiples of {size}")
    blocks = reshape(images, (rows, int(height) // size, size, int(width) // size, size, channels))
    order = (0, 1, 3, 5, 2, 4) if checked_format(data_format) == "channels_first" else (0, 1, 3, 2, 4, 5)
    pixels = transpose(blocks, order)
    return _in_format(reshape(pixels, (*pixels.shape[:3], int(channels) * size * size)), data_format)


def _blocks(x: Any, block_size: int, data_format: str) -> tuple[Tensor, int]:
    (images,) = as_tensors([x])
    if block_size < 2:
        raise ConfigError(f"`block_size` must be at least 2. Received: block_size={block_size}")
    if images.ndim != 4:
        raise ConfigError(f"images of shape {tuple(images.shape)}, data_format={data_format!r}: expected 4 axes")
    return (channels_last(images) if checked_format(data_format) == "channels_first" else images), int(block_size)


def _in_format(x: Tensor, data_format: str | None) -> Tensor:
    return channels_first(x) if checked_format(data_format) == "channels_first" else x


@operation
@for_open_shapes
def unfold(x: Any, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1) -> Tensor:
    """Return what each window of images (rows, channels, height, width) sees: (rows, channels * window, windows).

    Args:
        x: the images.
        kernel_size: of the windows; like the following, a number or a pair.
        dilation: between the pixels of a window.
        padding: zeros on each side.
        stride: between windows.
    """
    (images,) = as_tensors([x])
    if images.ndim != 4:
        raise ConfigError(f"Input must be a 4D tensor. Received: input.shape={tuple(images.shape)}")
    rows, channels, height, width = images.shape
    places, around = _windows((int(height), int(width)), kernel_size, dilation, padding, stride)
    windows = pad(images, [(0, 0), (0, 0), *((n, n) for n in around)]) if any(around) else images
    windows = take(take(windows, places[0], 2), places[1], 4)
    windows = transpose(windows, (0, 1, 3, 5, 2, 4))
    (down, high), (across, wide) = (axis_places.shape for axis_places in places)
    return reshape(windows, (rows, int(channels) * high * wide, down * across))


@operation
def fold(
    x: Any, output_size: Pair, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1
) -> Tensor:
    """Sum columns (rows, channels * window, windows) into images where `unfold` takes them from; see there.

    The result is (rows, channels, height, width) with `output_size`, a number or a pair; `padding` is cut off.
    """
    (columns,) = as_tensors([x])
    if columns.ndim != 3:
        raise ConfigError(f"Input must be a 3D tensor. Received: input.shape={tuple(columns.shape)}")
    lengths = _pair("output_size", output_size, 1)
    places, around = _windows(lengths, kernel_size, dilation, padding, stride)
    (down, high), (across, wide) = (axis_places.shape for axis_places in places)
    rows, column_length, number = columns.shape
    if int(column_length) % (high * wide) or int(number) != down * across:
        raise ConfigError(
            f"fold: columns of shape {(int(column_length), int(number))}; expected (a multiple of {high} x {wide}, "
            f"{down * across}), the windows' pixels and number in images of {lengths}"
        )
    channels = int(column_length) // (high * wide)
    summed = transpose(reshape(columns, (rows, channels, high, wide, down, across)), (0, 1, 4, 2, 5, 3))
    summed = reshape(summed, (rows, channels, down * high, across * wide))
    for axis, (axis_places, length, border) in enumerate(zip(places, lengths, around, strict=True), 2):
        to = np.arange(border, border + length)[:, None] == axis_places.reshape(1, -1)
        summed = along_axis(summed, axis, cast(to, summed.dtype))
    return summed


def _windows(
    lengths: Sequence[int], kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair
) -> tuple[list[Array], Sequence[int]]:
    """Return the pixel indices of each window along each axis, (windows, pixels), and the padding."""
    around = _pair("padding", padding, 0)
    arguments = (lengths, _pair("kernel_size", kernel_size, 1), _pair("dilation", dilation, 1), around)
    places = []
    for length, extent, step, border, gap in zip(*arguments, _pair("stride", stride, 1), strict=True):
        number = (length + 2 * border - (extent - 1) * step - 1) // gap + 1
        if number < 1:
            raise ConfigError(
                f"windows of {(extent - 1) * step + 1} pixels do not fit into images of {length + 2 * border}"
            )
        places.append(gap * np.arange(number)[:, None] + step * np.arange(extent))
    return places, around


def _pair(name: str, value: Pair, least: int) -> tuple[int, ...]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or any(not isinstance(number, int) or number < least for number in pair):
        raise ConfigError(f"{name}={value}: expected one or two integers of at least {least}")
    return pair


@operation
@for_open_shapes
def adaptive_average_pool(inputs: Any, output_size: Pair, data_format: str | None = None) -> Tensor:
    """Return the means of `output_size` windows along all axes of space, or each; windows may overlap.

    `inputs` are (rows, *space, channels), one to three axes of space, or with `data_format` "channels_first".
    """
    x, sizes = _adaptive_arguments(inputs, output_size, data_format)
    pooled = floating(x)
    for axis, size in enumerate(sizes, 1):
        length = int(x.shape[axis])
        starts, ends = _bounds(length, size)
        inside = (np.arange(length) >= starts[:, None]) & (np.arange(length) < ends[:, None])
        pooled = along_axis(pooled, axis, cast(inside / (ends - starts)[:, None], pooled.dtype))
    return _in_format(pooled, data_format)


@operation
@for_open_shapes
def adaptive_max_pool(inputs: Any, output_size: Pair, data_format: str | None = None) -> Tensor:
    """Return the greatest elements of windows; see `adaptive_average_pool`."""
    x, sizes = _adaptive_arguments(inputs, output_size, data_format)
    for axis, size in enumerate(sizes, 1):
        starts, ends = _bounds(int(x.shape[axis]), size)
        # Windows get equal lengths: shorter ones repeat their last element.
        places = np.minimum(starts[:, None] + np.arange((ends - starts).max()), ends[:, None] - 1)
        x = max(take(x, places, axis), axis + 1)
    return _in_format(x, data_format)


def _adaptive_arguments(inputs: Any, output_size: Pair, data_format: str | None) -> tuple[Tensor, tuple[int, ...]]:
    (x,) = as_tensors([inputs])
    if x.ndim not in (3, 4, 5):
        raise ConfigError(f"adaptive pooling: inputs of shape {tuple(x.shape)}; expected rank 3 to 5")
    sizes = (output_size,) * (x.ndim - 2) if isinstance(output_size, int) else tuple(output_size)
    if len(sizes) != x.ndim - 2 or min(sizes) < 1:
        raise ConfigError(f"output_size={output_size}: expected {x.ndim - 2} integers of at least 1")
    return (channels_last(x) if checked_format(data_format) == "channels_first" else x), sizes


def _bounds(length: int, size: int) -> tuple[Array, Array]:
    numbers = np.arange(size)
    return numbers * length // size, -(-(numbers + 1) * length // size)


@operation
@for_open_shapes
def psnr(x1: Any, x2: Any, max_val: float) -> Tensor:
    """Return the peak signal-to-noise ratio of two images in decibels; `max_val` is the greatest possible value."""
    a, b = (floating(tensor) for tensor in as_tensors([x1, x2]))
    if a.ndim != b.ndim or any(differ(n, m) for n, m in zip(a.shape, b.shape, strict=True)):
        raise ConfigError(f"Input shapes {tuple(a.shape)} and {tuple(b.shape)} must match for PSNR calculation.")
    return 20 * math.log10(max_val) - 10 * log10(mean(square(a - b)))
