"""Resizing, cropping and padding of images: a matrix of weights along each axis of space, as in JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.creation import saturate_cast
from dptrain.ops.elementwise import (
    absolute,
    cast,
    floating,
    greater,
    greater_equal,
    less_equal,
    logical_and,
    maximum,
    sin,
    square,
    where,
)
from dptrain.ops.image.formats import batched, check_choice
from dptrain.ops.indexing import take
from dptrain.ops.math.rounding import rint
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.padding import pad
from dptrain.ops.products import along_axis
from dptrain.ops.reduction import sum as sum_over
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import is_floating

RESIZE_INTERPOLATIONS = ("bilinear", "nearest", "lanczos3", "lanczos5", "bicubic")


@operation
@for_open_shapes
def resize(
    images: Any,
    size: Sequence[int],
    interpolation: str = "bilinear",
    antialias: bool = False,
    crop_to_aspect_ratio: bool = False,
    pad_to_aspect_ratio: bool = False,
    fill_mode: str = "constant",
    fill_value: float = 0.0,
    data_format: str | None = None,
) -> Tensor:
    """Resize images as Keras on JAX does; integers are rounded and stay integers.

    Args:
        images: see `ops.image`.
        size: (height, width) of the output.
        interpolation: "nearest", "bilinear", "bicubic", "lanczos3" or "lanczos5".
        antialias: when shrinking, average over all pixels that an output pixel stands for.
        crop_to_aspect_ratio: crop equally on both sides rather than distort.
        pad_to_aspect_ratio: pad equally on both sides rather than distort, with `fill_value`.
        fill_mode: only "constant".
        fill_value: of padding.
        data_format: "channels_last" (the default) or "channels_first".

    Source: R. Keys, "Cubic convolution interpolation for digital image processing", IEEE Trans. ASSP 29 (1981).
    """
    if not hasattr(size, "__len__") or len(size) != 2:
        raise ConfigError(f"Expected `size` to be a tuple of 2 integers. Received: size={size}")
    if min(size) <= 0:
        raise ConfigError(f"`size` must have positive height and width. Received: size={size}")
    check_choice("interpolation", interpolation, RESIZE_INTERPOLATIONS)
    if fill_mode != "constant":
        raise ConfigError(
            f"Invalid value for argument `fill_mode`. Only `'constant'` is supported. Received: fill_mode={fill_mode}"
        )
    if pad_to_aspect_ratio and crop_to_aspect_ratio:
        raise ConfigError("Only one of `pad_to_aspect_ratio` & `crop_to_aspect_ratio` can be `True`.")
    x, restored = batched(images, data_format)
    height, width = int(size[0]), int(size[1])
    if crop_to_aspect_ratio:
        x = _cropped(x, height, width)
    elif pad_to_aspect_ratio:
        x = _padded(x, height, width, fill_value)
    kind = x.dtype
    for axis, target in ((1, height), (2, width)):
        x = _resized(x, axis, target, interpolation, antialias)
    return restored(saturate_cast(rint(x), kind) if kind.kind in "iu" and x.dtype != kind else x)


def cropped_box(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of the largest centered box with a target's aspect ratio."""
    own_height = max(min(height, int(float(width * target_height) / target_width)), 1)
    own_width = max(min(width, int(float(height * target_width) / target_height)), 1)
    return int((height - own_height) / 2), int((width - own_width) / 2), own_height, own_width


def _cropped(x: Tensor, height: int, width: int) -> Tensor:
    top, left, own_height, own_width = cropped_box(int(x.shape[1]), int(x.shape[2]), height, width)
    return x[:, top : top + own_height, left : left + own_width]


def border_around(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int]:
    """Return the padding above and at the left that gives images a target's aspect ratio."""
    above = int((max(height, int(float(width * target_height) / target_width)) - height) / 2)
    return above, int((max(width, int(float(height * target_width) / target_height)) - width) / 2)


def _padded(x: Tensor, height: int, width: int, value: float) -> Tensor:
    above, left = border_around(int(x.shape[1]), int(x.shape[2]), height, width)
    return pad(x, [(0, 0), (above, above), (left, left), (0, 0)], constant_values=value)


def _resized(x: Tensor, axis: int, target: int, interpolation: str, antialias: bool) -> Tensor:
    """Resize one axis."""
    length = int(x.shape[axis])
    if length == target:
        return x if interpolation == "nearest" else floating(x)
    if interpolation == "nearest":
        return take(x, nearest_pixels(length, target), axis)
    pixels = floating(x)
    weights = pixel_weights(length, target, np.asarray(length / target), 0.0, interpolation, antialias)
    return along_axis(pixels, axis, cast(weights, pixels.dtype))


def nearest_pixels(length: int, target: int) -> npt.NDArray[np.int32]:
    """Return the index of the nearest of `length` pixels for each of `target`."""
    places = ((np.arange(target, dtype=np.float32) + 0.5) * length / target).astype(np.float32)
    return np.floor(places).astype(np.int32)


@operation
@for_open_shapes
def scale_and_translate(
    images: Any,
    output_shape: Sequence[int],
    scale: Any,
    translation: Any,
    spatial_dims: Sequence[int],
    method: str,
    antialias: bool = True,
) -> Tensor:
    """Scale and then move images along some axes; 0 where nothing of them lies.

    Args:
        images: of any shape.
        output_shape: of the result.
        scale, translation: a factor, and an offset in pixels of the result, for each of `spatial_dims`.
        spatial_dims: the axes.
        method: "linear" ("bilinear", "trilinear"), "cubic" ("bicubic", "tricubic"), "lanczos3" or "lanczos5".
        antialias: see `resize`.
    """
    check_choice("method", method, tuple(_METHODS))
    (x,), scales, moves = as_tensors([images]), floating(as_tensors([scale])[0]), floating(as_tensors([translation])[0])
    axes = [axis % x.ndim for axis in spatial_dims]
    fixed_axes = [axis for axis in range(x.ndim) if axis not in axes]
    if len(output_shape) != x.ndim or any(x.shape[axis] != output_shape[axis] for axis in fixed_axes):
        raise ConfigError(
            f"scale_and_translate: output_shape={tuple(output_shape)} for images of shape {tuple(x.shape)}; expected "
            f"equal lengths except along axes {tuple(spatial_dims)}"
        )
    scaled = floating(x)
    for number, axis in enumerate(axes):
        length, target = int(x.shape[axis]), int(output_shape[axis])
        weights = pixel_weights(length, target, 1 / scales[number], moves[number], _METHODS[method], antialias)
        scaled = along_axis(scaled[None], axis + 1, cast(weights, scaled.dtype))[0]
    return scaled if is_floating(x.dtype) else saturate_cast(rint(scaled), x.dtype)


def pixel_weights(length: int, target: int, step: Any, shift: Any, interpolation: str, antialias: bool) -> Tensor:
    """Return the weight of each of `length` pixels in each of `target`, (target, length), float64.

    Args:
        length, target: of the axis before and after.
        step: pixels between two of the target.
        shift: translation in pixels of the target.
        interpolation: of `_KERNELS`.
        antialias: widen the kernel where the image shrinks.
    """
    centers = (np.arange(target) + 0.5 - shift) * step - 0.5
    (centers,) = as_tensors([centers])
    distances = absolute(centers[:, None] - np.arange(length)) / (maximum(step, 1.0) if antialias else 1.0)
    weights = _KERNELS[interpolation](distances)
    total = sum_over(weights, 1, keepdims=True)
    enough = greater(absolute(total), 1000 * float(np.finfo(np.float32).eps))
    weights = where(enough, weights / where(enough, total, 1.0), 0.0)
    inside = logical_and(greater_equal(centers, -0.5), less_equal(centers, length - 0.5))
    return where(inside[:, None], weights, 0.0)


def _triangle(x: Tensor) -> Tensor:
    return maximum(0.0, 1 - x)


def _cubic(x: Tensor) -> Tensor:
    inner, outer = ((1.5 * x - 2.5) * x) * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return where(x >= 2, 0.0, where(x >= 1, outer, inner))


def _lanczos(radius: int) -> Callable[[Tensor], Tensor]:
    def kernel(x: Tensor) -> Tensor:
        y = radius * sin(np.pi * x) * sin(np.pi * x / radius)
        value = where(x > 1e-3, y / where(x > 1e-3, np.pi**2 * square(x), 1.0), 1.0)
        return where(x > radius, 0.0, value)

    return kernel


_KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": _triangle,
    "bicubic": _cubic,
    "lanczos3": _lanczos(3),
    "lanczos5": _lanczos(5),
}
_METHODS = {
    **dict.fromkeys(("linear", "bilinear", "trilinear"), "bilinear"),
    **dict.fromkeys(("cubic", "bicubic", "tricubic"), "bicubic"),
    **{name: name for name in ("lanczos3", "lanczos5")},
}


@operation
@for_open_shapes
def pad_images(
    images: Any,
    top_padding: int | None = None,
    left_padding: int | None = None,
    bottom_padding: int | None = None,
    right_padding: int | None = None,
    target_height: int | None = None,
    target_width: int | None = None,
    data_format: str | None = None,
) -> Tensor:
    """Pad images with zeros; exactly two of the three arguments of each axis say how much.

    Args:
        images, data_format: see `resize`.
        top_padding, bottom_padding, target_height: rows above, below, and of the output.
        left_padding, right_padding, target_width: columns before, after, and of the output.

    Raises:
        ConfigError: not two of three arguments, or a negative padding.
    """
    x, restored = batched(images, data_format)
    names = (("top_padding", "bottom_padding", "target_height"), ("left_padding", "right_padding", "target_width"))
    amounts = ((top_padding, bottom_padding, target_height), (left_padding, right_padding, target_width))
    widths = [
        _two_of_three(name, amount, int(length), 1)
        for name, amount, length in zip(names, amounts, x.shape[1:3], strict=True)
    ]
    return restored(pad(x, [(0, 0), *widths, (0, 0)]))


@operation
@for_open_shapes
def crop_images(
    images: Any,
    top_cropping: int | None = None,
    left_cropping: int | None = None,
    bottom_cropping: int | None = None,
    right_cropping: int | None = None,
    target_height: int | None = None,
    target_width: int | None = None,
    data_format: str | None = None,
) -> Tensor:
    """Crop images; exactly two of the three arguments of each axis say what is left.

    Args:
        images, data_format: see `resize`.
        top_cropping, bottom_cropping, target_height: rows to drop above, below, and rows of the output.
        left_cropping, right_cropping, target_width: columns to drop before, after, and columns of the output.

    Raises:
        ConfigError: not two of three arguments, or a negative cropping.
    """
    x, restored = batched(images, data_format)
    names = (("top_cropping", "bottom_cropping", "target_height"), ("left_cropping", "right_cropping", "target_width"))
    amounts = ((top_cropping, bottom_cropping, target_height), (left_cropping, right_cropping, target_width))
    (top, below), (left, behind) = (
        _two_of_three(name, amount, int(length), -1)
        for name, amount, length in zip(names, amounts, x.shape[1:3], strict=True)
    )
    return restored(x[:, top : int(x.shape[1]) - below, left : int(x.shape[2]) - behind])


def _two_of_three(names: Sequence[str], amounts: Sequence[int | None], length: int, sign: int) -> tuple[int, int]:
    """Return (before, after) from (before, after, target), exactly one of which is None; sign -1 crops."""
    if sum(amount is not None for amount in amounts) != 2:
        raise ConfigError(
            f"Must specify exactly two of {', '.join(names)}. Received: "
            f"{', '.join(f'{name}={amount}' for name, amount in zip(names, amounts, strict=True))}"
        )
    before, behind, target = amounts
    change = 0 if target is None else sign * (target - length)
    first = change - (behind or 0) if before is None else before
    last = change - first if behind is None else behind
    solved = {names[0]: first, names[1]: last, names[2]: length + sign * (first + last)}
    for name, amount in solved.items():
        if amount < 0:
            raise ConfigError(f"{name} must be >= 0. Received: {name}={amount}")
    return first, last
