"""Filters of images: Gaussian blur, Sobel edges, structural similarity, patches."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import tile
from dptrain.ops.elementwise import absolute, cast, exp, floating, less, square
from dptrain.ops.image.formats import batched, exact_dtype, to_dtype
from dptrain.ops.indexing import take
from dptrain.ops.manipulation import expand_dims, reshape, squeeze, transpose
from dptrain.ops.nn.spatial import channels_first, channels_last, depthwise_conv
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.padding import pad
from dptrain.ops.products import along_axis
from dptrain.ops.reduction import mean
from dptrain.ops.reduction import sum as sum_over
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.image_format import checked_format

# Kernel for downward slopes; its transpose is for those to the right.
_SOBEL = np.array([[-1, -2, -1], [0, 0, 0], [1, 2, 1]])


@operation
@for_open_shapes
def gaussian_blur(
    images: Any, kernel_size: Sequence[int] = (3, 3), sigma: Any = (1.0, 1.0), data_format: str | None = None
) -> Tensor:
    """Blur images with a Gaussian; they are surrounded by zeros.

    Args:
        images, data_format: see `resize`.
        kernel_size: (width, height) of the Gaussian in pixels.
        sigma: its standard deviation to the right, and downwards, in pixels; two numbers, or a tensor of them.
    """
    if len(kernel_size) != 2 or min(kernel_size) < 1:
        raise ConfigError(f"kernel_size={kernel_size}: expected two integers of at least 1")
    x, restored = batched(images, data_format)
    smooth = floating(x)
    deviations = to_dtype(sigma, exact_dtype(smooth))
    for axis, number in ((2, 0), (1, 1)):
        bell = cast(_bell(int(kernel_size[number]), deviations[number]), smooth.dtype)
        smooth = depthwise_conv(
            smooth, _kernel(bell, axis, int(x.shape[3])), padding="same", data_format="channels_last"
        )
    return restored(smooth)


def _bell(size: int, sigma: Any) -> Tensor:
    """Return a Gaussian window with sum 1."""
    bell = exp(-0.5 * square((np.arange(size) - (size - 1) / 2).astype(sigma.dtype) / sigma))
    return bell / sum_over(bell)


def _kernel(weights: Tensor, axis: int, channels: int) -> Tensor:
    """Return the same kernel along an axis of space for each channel."""
    extents = (1, -1) if axis == 2 else (-1, 1)
    return tile(reshape(weights, (*extents, 1, 1)), (1, 1, channels, 1))


def blurred(x: Tensor, axis: int, sigma: Tensor) -> Tensor:
    """Blur zero-padded images along an axis with the deviation `sigma`, a tensor.

    The window is int(6 sigma) | 1 pixels wide, as in Keras' elastic deformations.
    """
    length = int(x.shape[axis])
    distances = (np.arange(length)[:, None] - np.arange(length)).astype(x.dtype)
    around = np.arange(-length, length + 1).astype(x.dtype)

    def weights(places: Any) -> Tensor:
        # Of an odd width w the offsets are those with 2 |offset| < w.
        width = cast(cast(6 * sigma, "int32") // 2 * 2 + 1, x.dtype)
        return exp(-0.5 * square(places / sigma)) * cast(less(2 * absolute(as_tensors([places])[0]), width), x.dtype)

    matrix = weights(distances) / sum_over(weights(around))
    return along_axis(x, axis, matrix)


@operation
@for_open_shapes
def sobel_edges(images: Any, data_format: str | None = None) -> Tensor:
    """Return the slopes of channels downwards and to the right, on a new last axis; images are zero-padded."""
    (x,) = as_tensors([images])
    if x.ndim != 4:
        raise ConfigError(f"sobel_edges: images of shape {tuple(x.shape)}; expected (rows, height, width, channels)")
    first = checked_format(data_format) == "channels_first"
    x, _ = batched(floating(x), data_format)
    kernels = np.stack([_SOBEL, _SOBEL.T], -1)[:, :, None].astype(np.float32)
    edges = depthwise_conv(
        x, cast(np.tile(kernels, (1, 1, int(x.shape[3]), 1)), x.dtype), padding="same", data_format="channels_last"
    )
    edges = reshape(edges, (*x.shape, 2))
    return transpose(edges, (0, 3, 1, 2, 4)) if first else edges


@operation
@for_open_shapes
def ssim(
    image1: Any,
    image2: Any,
    max_val: float = 1.0,
    filter_size: int = 11,
    filter_sigma: float = 1.5,
    k1: float = 0.01,
    k2: float = 0.03,
    data_format: str | None = None,
) -> Tensor:
    """Return the structural similarity of images, 1 for equal ones: (rows,), or a number for single images.

    Args:
        image1, image2, data_format: see `resize`.
        max_val: width of the range of pixels.
        filter_size, filter_sigma: size and standard deviation of the Gaussian for local means; images must not be
            smaller.
        k1, k2: the paper's constants.

    Source: Z. Wang et al., "Image quality assessment: from error visibility to structural similarity", IEEE Trans.
    Image Processing 13 (2004).
    """
    (a, _), (b, _) = batched(image1, data_format), batched(image2, data_format)
    a, b = floating(a), floating(b)
    bell = _bell(filter_size, to_dtype(filter_sigma, exact_dtype(a)))

    def local(x: Tensor) -> Tensor:
        for axis in (1, 2):
            x = depthwise_conv(x, _kernel(cast(bell, x.dtype), axis, int(x.shape[3])), data_format="channels_last")
        return x

    mean_a, mean_b = local(a), local(b)
    c1, c2 = (k1 * max_val) ** 2, (k2 * max_val) ** 2
    variances = local(square(a)) - square(mean_a) + (local(square(b)) - square(mean_b))
    covariance = local(a * b) - mean_a * mean_b
    likeness = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    similarity = mean(likeness / ((square(mean_a) + square(mean_b) + c1) * (variances + c2)), (1, 2, 3))
    return squeeze(similarity, 0) if as_tensors([image1])[0].ndim == 3 else similarity


@operation
@for_open_shapes
def extract_patches(
    images: Any,
    size: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    dilation_rate: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str | None = None,
) -> Tensor:
    """Return what each window sees, in its channels: its pixels row by row, all channels of each.

    Args:
        images, data_format: see `resize`; with three sizes, volumes with a depth before the height.
        size: of the windows, for all axes, or each.
        strides: between windows; by default their size.
        dilation_rate: between the pixels of a window, for all axes, or each.
        padding: "valid" (none), or "same": zeros, so that ceil(length / stride) windows result.
    """
    if not isinstance(size, int) and len(size) not in (2, 3):
        raise ConfigError(
            f"Invalid `size` argument. Expected a tuple of length 2 or 3. Received: size={size} with length {len(size)}"
        )
    return _patches(
        images, 2 if isinstance(size, int) else len(size), size, strides, dilation_rate, padding, data_format
    )


@operation
@for_open_shapes
def extract_patches_3d(
    volumes: Any,
    size: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    dilation_rate: int | Sequence[int] = 1,
    padding: str = "valid",
    data_format: str | None = None,
) -> Tensor:
    """`extract_patches` of volumes, with a depth before the height."""
    return _patches(volumes, 3, size, strides, dilation_rate, padding, data_format)


def _patches(
    images: Any,
    axes: int,
    size: int | Sequence[int],
    strides: int | Sequence[int] | None,
    dilation: int | Sequence[int],
    padding: str,
    data_format: str | None,
) -> Tensor:
    (x,) = as_tensors([images])
    if x.ndim not in (axes + 1, axes + 2):
        raise ConfigError(f"extract_patches: images of shape {tuple(x.shape)}; expected {axes + 1} or {axes + 2} axes")
    if padding not in ("valid", "same"):
        raise ConfigError(f"padding = {padding!r}: expected 'valid' or 'same'")
    windows = []
    for name, argument in (("size", size), ("strides", strides or size), ("dilation_rate", dilation)):
        lengths = (argument,) * axes if isinstance(argument, int) else tuple(argument)
        if len(lengths) != axes or min(lengths) < 1:
            raise ConfigError(
                f"Invalid `{name}` argument. Expected {axes} integers of at least 1. Received: {name}={argument}"
            )
        windows.append(lengths)
    single = x.ndim == axes + 1
    x = expand_dims(x, 0) if single else x
    x = channels_last(x) if checked_format(data_format) == "channels_first" else x
    for axis, (extent, stride, step) in enumerate(zip(*windows, strict=True)):
        at = 1 + 2 * axis  # each earlier axis has become two: windows and their pixels
        length, reach = int(x.shape[at]), (extent - 1) * step + 1
        number = -(-length // stride) if padding == "same" else (length - reach) // stride + 1
        if number < 1:
            raise ConfigError(f"extract_patches: windows of {reach} pixels do not fit into images of {length}")
        if padding == "same":
            missing = max((number - 1) * stride + reach - length, 0)
            x = pad(x, [(missing // 2, missing - missing // 2) if n == at else (0, 0) for n in range(x.ndim)])
        x = take(x, stride * np.arange(number)[:, None] + step * np.arange(extent), at)
    order = (0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1)
    x = transpose(x, order)
    x = reshape(x, (*x.shape[: axes + 1], math.prod(int(n) for n in x.shape[axes + 1 :])))
    x = channels_first(x) if checked_format(data_format) == "channels_first" else x
    return squeeze(x, 0) if single else x
