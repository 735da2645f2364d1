"""Keras' convolutions and pooling over one to three axes of space, on top of `convolution`'s two-dimensional ops.

Letters: B rows of the batch, I channels in, O channels out; "space" stands for the axes between rows and channels, the
last two of them height and width. One axis is a width beside a height of 1. The depth of a three-dimensional kernel
moves into its channels: a two-dimensional convolution reads as many slices as the kernel is deep.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import floating, multiply
from dptrain.ops.manipulation import concatenate, expand_dims, reshape, transpose
from dptrain.ops.nn.convolution import Window, conv2d, conv2d_input, max_pool2d
from dptrain.ops.nn.depthwise import depthwise2d, taps
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.padding import pad
from dptrain.program.dims import greatest, is_number
from dptrain.program.shapes import Shape, differ
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.image_format import checked_format

Lengths = tuple[int, ...]


def channels_last(x: Tensor) -> Tensor:
    """Return (B, C, *space) as (B, *space, C)."""
    return transpose(x, (0, *range(2, x.ndim), 1))


def channels_first(x: Tensor) -> Tensor:
    """Return (B, *space, C) as (B, C, *space)."""
    return transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


@operation
@for_open_shapes
def conv(
    inputs: Any,
    kernel: Any,
    strides: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: int | Sequence[int] = 1,
) -> Tensor:
    """Return the convolution (cross-correlation) of images with a kernel.

    Where images have g times as many channels as the kernel, both fall into g groups: the first O / g channels of the
    result see the first I / g of the images, and so on.

    Args:
        inputs: (B, *space, I), one to three axes of space.
        kernel: (*size, I / g, O).
        strides: for all axes of space, or each.
        padding: "valid" (none), or "same": zeros, so that ceil(length / stride) positions result.
        data_format: of inputs and result, "channels_last" by default, or "channels_first": (B, I, *space).
        dilation_rate: for all axes of space, or each.
    """
    x, k, in_format = _images("conv", inputs, kernel, data_format)
    groups = _groups(x, k)
    stride, dilation = (
        _per_axis(x, *argument) for argument in (("strides", strides), ("dilation_rate", dilation_rate))
    )
    size, before = _output_size(x.shape[1:-1], k.shape[:-2], stride, dilation, padding)
    if groups > 1 and k.shape[-2] == 1:
        grouped = reshape(k, (*k.shape[:-2], groups, int(k.shape[-1]) // groups))
        return in_format(_depthwise(x, grouped, stride, dilation, before, size))
    parts = []
    for part, kernel_part in zip(_parts(x, groups), _parts(k, groups), strict=True):
        parts.append(_convolved(part, kernel_part, stride, dilation, before, size))
    return in_format(parts[0] if groups == 1 else concatenate(parts, -1))


@operation
@for_open_shapes
def depthwise_conv(
    inputs: Any,
    kernel: Any,
    strides: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: int | Sequence[int] = 1,
) -> Tensor:
    """Return each channel's convolutions with its own M kernels: (B, *space, I * M), the first channel's M first.

    `kernel` is (*size, I, M); for the other arguments see `conv`.
    """
    x, k, in_format = _images("depthwise_conv", inputs, kernel, data_format)
    if differ(x.shape[-1], k.shape[-2]):
        raise _different_channels(x, k)
    stride, dilation = (
        _per_axis(x, *argument) for argument in (("strides", strides), ("dilation_rate", dilation_rate))
    )
    size, before = _output_size(x.shape[1:-1], k.shape[:-2], stride, dilation, padding)
    return in_format(_depthwise(x, k, stride, dilation, before, size))


@operation
@for_open_shapes
def separable_conv(
    inputs: Any,
    depthwise_kernel: Any,
    pointwise_kernel: Any,
    strides: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: int | Sequence[int] = 1,
) -> Tensor:
    """Return `depthwise_conv` with one kernel, then `conv` with another, which sees one position at a time.

    `depthwise_kernel` is (*size, I, M), `pointwise_kernel` (1, ..., I * M, O). Strides and dilation are the first's;
    see `conv`.
    """
    filtered = depthwise_conv(inputs, depthwise_kernel, strides, padding, data_format, dilation_rate)
    return conv(filtered, pointwise_kernel, data_format=data_format)


@operation
@for_open_shapes
def conv_transpose(
    inputs: Any,
    kernel: Any,
    strides: int | Sequence[int] = 1,
    padding: str = "valid",
    output_padding: int | Sequence[int] | None = None,
    data_format: str | None = None,
    dilation_rate: int | Sequence[int] = 1,
) -> Tensor:
    """Return the transposed convolution: the gradient of `conv` in its input.

    For length n, stride s and a kernel that spans r = (size - 1) * dilation + 1, "valid" gives (n - 1) s + r positions
    and max(s - r, 0) zeros; "same" gives n s of them, from the middle.

    Args:
        inputs, strides, data_format, dilation_rate: see `conv`.
        kernel: (*size, O, I).
        padding: "valid" or "same".
        output_padding: for all axes of space, or each: positions that "valid" adds at the end instead of the zeros;
            with "same", (n - 1) s + r mod 2 plus this result.
    """
    x, k, in_format = _images("conv_transpose", inputs, kernel, data_format)
    if differ(x.shape[-1], k.shape[-1]):
        raise ConfigError(
            "The number of input channels must match the kernel's input channels. Received: input channels="
            f"{x.shape[-1]}, kernel input channels={k.shape[-1]}, data_format={checked_format(data_format)!r}."
        )
    stride, dilation = (
        _per_axis(x, *argument) for argument in (("strides", strides), ("dilation_rate", dilation_rate))
    )
    padding = _padding(padding)
    extras = [None] * len(stride) if output_padding is None else _per_axis(x, "output_padding", output_padding, least=0)
    size, before = [], []
    for length, extent, s, step, extra in zip(x.shape[1:-1], k.shape[:-2], stride, dilation, extras, strict=True):
        reach = (int(extent) - 1) * step + 1
        size.append(_transposed_length(length, reach, s, padding, extra))
        # Keras crops here what a convolution of the result pads.
        total = s + reach - 2 if extra is None else reach + reach % 2 - 2 + extra
        before.append(0 if padding == "valid" else reach - 1 - min((total + 1) // 2, reach - 1))
    return in_format(_convolved_transpose(x, k, stride, dilation, tuple(before), tuple(size)))


def _transposed_length(length: Any, reach: int, stride: int, padding: str, extra: int | None) -> Any:
    if padding == "same":
        return length * stride if extra is None else (length - 1) * stride + reach % 2 + extra
    return (length - 1) * stride + (max(reach, stride) if extra is None else reach + extra)


@operation
@for_open_shapes
def max_pool(
    inputs: Any,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: str = "valid",
    data_format: str | None = None,
) -> Tensor:
    """Return the greatest element of each window of each channel.

    Args:
        inputs: (B, *space, C), one to three axes of space.
        pool_size: of the windows, for all axes of space, or each; no larger than the image.
        strides: between them; by default their size.
        padding: see `conv`; padding is never the greatest.
        data_format: see `conv`.
    """
    x, window, stride, size, before, in_format = _windows("max_pool", inputs, pool_size, strides, padding, data_format)
    if len(size) < 3:
        return in_format(_pool_1d_or_2d(max_pool2d, x, window, stride, before, size))
    # Within each slice, then over slices: the first of equal maxima stays the same.
    rows, depth, height, width, channels = x.shape
    flat = reshape(x, (rows * depth, height, width, channels))
    slices = max_pool2d(flat, window=window[1:], strides=stride[1:], before=before[1:], size=size[1:])
    places = size[1] * size[2]
    options = {"window": (window[0], 1), "strides": (stride[0], 1), "before": (before[0], 0), "size": (size[0], places)}
    pooled = max_pool2d(reshape(slices, (rows, depth, places, channels)), **options)
    return in_format(reshape(pooled, (rows, *size, channels)))


@operation
@for_open_shapes
def average_pool(
    inputs: Any,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: str = "valid",
    data_format: str | None = None,
) -> Tensor:
    """Return the mean of each window within the image, for each channel, of integers in float32; see `max_pool`."""
    x, window, stride, size, before, in_format = _windows(
        "average_pool", floating(inputs), pool_size, strides, padding, data_format
    )
    image, size = tuple(map(int, x.shape[1:-1])), tuple(map(int, size))
    total: Any = None
    for _, part in taps(x, window, stride, (1,) * len(size), before, size):
        total = part if total is None else total + part
    counts = np.ones((1,))
    for axis, n in enumerate(size):
        first = np.arange(n) * stride[axis] - before[axis]
        inside = np.minimum(first + window[axis], image[axis]) - np.maximum(first, 0)
        counts = counts[..., None, :] * inside[:, None]
    return in_format(multiply(total, (1 / counts).astype(x.dtype)))


# Arguments


def _images(
    name: str, inputs: Any, kernel: Any, data_format: str | None
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Return images with channels last, the kernel, and a function that restores the format."""
    x, k = as_tensors([inputs, kernel])
    if not 3 <= x.ndim <= 5 or k.ndim != x.ndim:
        raise ConfigError(
            f"{name}: expected inputs and a kernel of equal rank, 3 to 5 (one to three spatial axes), found shapes "
            f"{x.shape} and {k.shape}"
        )
    x, in_format = _in_format(x, data_format)
    return x, k, in_format


def _in_format(x: Tensor, data_format: str | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    if checked_format(data_format) == "channels_first":
        return channels_last(x), channels_first
    return x, lambda result: result


def _groups(x: Tensor, kernel: Tensor) -> int:
    channels, kernel_channels = x.shape[-1], kernel.shape[-2]
    if not differ(channels, kernel_channels):
        return 1
    groups = int(channels) // int(kernel_channels)
    if channels % kernel_channels or kernel.shape[-1] % groups:
        raise _different_channels(x, kernel)
    return groups


def _different_channels(x: Tensor, kernel: Tensor) -> ConfigError:
    return ConfigError(
        f"inputs of shape {x.shape} have {x.shape[-1]} channels, the kernel of shape {kernel.shape} takes "
        f"{kernel.shape[-2]}"
    )


def _per_axis(x: Tensor, name: str, value: int | Sequence[int], least: int = 1) -> Lengths:
    rank = x.ndim - 2
    lengths = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(lengths) != rank or any(n < least for n in lengths):
        raise ConfigError(f"{name} = {value}: expected an integer, or {rank} of them, of at least {least}")
    return lengths


def _windows(
    name: str,
    inputs: Any,
    pool_size: int | Sequence[int],
    strides: int | Sequence[int] | None,
    padding: str,
    data_format: str | None,
) -> tuple[Tensor, Lengths, Lengths, Shape, Lengths, Callable[[Tensor], Tensor]]:
    """Return images, window, strides, output size, padding before, and a function that restores the format."""
    (x,) = as_tensors([inputs])
    if not 3 <= x.ndim <= 5:
        raise ConfigError(f"{name}: expected inputs of rank 3 to 5 (one to three spatial axes), found shape {x.shape}")
    x, in_format = _in_format(x, data_format)
    window = _per_axis(x, "pool_size", pool_size)
    stride = window if strides is None else _per_axis(x, "strides", strides)
    size, before = _output_size(x.shape[1:-1], window, stride, (1,) * len(window), padding)
    return x, window, stride, size, before, in_format


def _padding(padding: Any) -> str:
    mode = padding.lower() if isinstance(padding, str) else padding
    if mode not in ("valid", "same"):
        raise ConfigError(f"padding = {padding!r}: expected 'valid' or 'same'")
    return str(mode)


def _output_size(
    image: Sequence[int], window: Sequence[int], strides: Lengths, dilation: Lengths, padding: str
) -> tuple[Shape, Lengths]:
    """Return the output's lengths, and the zeros before the image along each axis."""
    padding = _padding(padding)
    sizes, before = [], []
    for length, extent, stride, step in zip(image, map(int, window), strides, dilation, strict=True):
        reach = (extent - 1) * step + 1
        if padding == "same":
            sizes.append((length + stride - 1) // stride)
            before.append(greatest(0, (sizes[-1] - 1) * stride + reach - length) // 2)
        else:
            if is_number(length) and reach > length:
                raise ConfigError(f"a window of {reach} does not fit into a length of {length}; use padding='same'")
            sizes.append((length - reach) // stride + 1)
            before.append(0)
    return tuple(sizes), tuple(before)


# What they are made of


def _parts(x: Tensor, groups: int) -> list[Tensor]:
    if groups == 1:
        return [x]
    length = int(x.shape[-1]) // groups
    return [x[..., n * length : (n + 1) * length] for n in range(groups)]


def _pool_1d_or_2d(function: Any, x: Tensor, window: Lengths, strides: Lengths, before: Lengths, size: Shape) -> Tensor:
    if len(size) == 2:
        pooled: Tensor = function(x, window=window, strides=strides, before=before, size=size)
        return pooled
    options = {"window": (1, *window), "strides": (1, *strides), "before": (0, *before), "size": (1, *size)}
    return reshape(function(expand_dims(x, 1), **options), (x.shape[0], *size, x.shape[-1]))


def _convolved(x: Tensor, kernel: Tensor, strides: Lengths, dilation: Lengths, before: Lengths, size: Shape) -> Tensor:
    """Compute `conv` of one group."""
    if len(size) == 2:
        return conv2d(x, kernel, strides=strides, dilation=dilation, before=before, size=size)
    rows, channels, filters = x.shape[0], x.shape[-1], kernel.shape[-1]
    if len(size) == 1:
        options = {"strides": (1, *strides), "dilation": (1, *dilation), "before": (0, *before), "size": (1, *size)}
        return reshape(conv2d(expand_dims(x, 1), expand_dims(kernel, 0), **options), (rows, *size, filters))
    deep = kernel.shape[0]
    slices = [part for _, part in taps(x, (deep,), strides[:1], dilation[:1], before[:1], size[:1])]
    flat = reshape(concatenate(slices, -1), (rows * size[0], *x.shape[2:4], deep * channels))
    beside = reshape(transpose(kernel, (1, 2, 0, 3, 4)), (*kernel.shape[1:3], deep * channels, filters))
    options = {"strides": strides[1:], "dilation": dilation[1:], "before": before[1:], "size": size[1:]}
    return reshape(conv2d(flat, beside, **options), (rows, *size, filters))


def _convolved_transpose(
    x: Tensor, kernel: Tensor, strides: Lengths, dilation: Lengths, before: Lengths, size: Shape
) -> Tensor:
    """Compute the transpose of `_convolved`, with this output size."""
    if len(size) == 2:
        return conv2d_input(x, kernel, strides=strides, dilation=dilation, before=before, size=size)
    rows, filters = x.shape[0], kernel.shape[-2]
    if len(size) == 1:
        options = {"strides": (1, *strides), "dilation": (1, *dilation), "before": (0, *before), "size": (1, *size)}
        return reshape(conv2d_input(expand_dims(x, 1), expand_dims(kernel, 0), **options), (rows, *size, filters))
    deep, depth = int(kernel.shape[0]), x.shape[1]
    beside = reshape(transpose(kernel, (1, 2, 0, 3, 4)), (*kernel.shape[1:3], deep * filters, kernel.shape[-1]))
    options = {"strides": strides[1:], "dilation": dilation[1:], "before": before[1:], "size": size[1:]}
    convolved = conv2d_input(reshape(x, (rows * depth, *x.shape[2:])), beside, **options)
    slices = reshape(convolved, (rows, depth, *size[1:], deep, filters))
    window = Window((deep, 1), (strides[0], 1), (dilation[0], 1), (before[0], 0))
    total: Any = None
    for (at, _), (ours, _), (theirs, _) in window.places((int(size[0]), 1), (int(depth), 1)):
        if ours.start < ours.stop:
            part = _dilated(slices[:, ours, :, :, at], strides[0])
            around = (theirs.start, size[0] - theirs.start - part.shape[1])
            part = pad(part, [(0, 0), around, (0, 0), (0, 0), (0, 0)])
            total = part if total is None else total + part
    result: Tensor = total
    return result


def _dilated(x: Tensor, step: int) -> Tensor:
    """Insert zeros between elements of the first axis of space, `step` apart."""
    if step == 1:
        return x
    rows, length, *trailing = x.shape
    wide = pad(expand_dims(x, 2), [(0, 0), (0, 0), (0, step - 1), *[(0, 0)] * len(trailing)])
    return reshape(wide, (rows, length * step, *trailing))[:, : (length - 1) * step + 1]


def _depthwise(x: Tensor, kernel: Tensor, strides: Lengths, dilation: Lengths, before: Lengths, size: Shape) -> Tensor:
    """Sum the kernel's elements times the image positions that each of them sees."""
    channels, multiplier = kernel.shape[-2:]
    if len(size) == 2 and not differ(multiplier, 1):
        options = {"strides": strides, "dilation": dilation, "before": before, "size": size}
        return depthwise2d(x, reshape(kernel, kernel.shape[:-1]), **options)
    total: Any = None
    for at, part in taps(x, kernel.shape[:-2], strides, dilation, before, size):
        product = part * kernel[at][:, 0] if multiplier == 1 else expand_dims(part, -1) * kernel[at]
        total = product if total is None else total + product
    return total if multiplier == 1 else reshape(total, (*total.shape[:-2], channels * multiplier))
