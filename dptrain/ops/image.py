"""Keras' `keras.ops.image`: sizes, borders, colours and places of images.

Resizing is a product with a matrix of weights along each axis of space, as JAX has it; where these are known, a NumPy
array. Transformations take the pixels of each image from where they were, by `take_each`.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.arrays import mod
from dptrain.ops.elementwise import (
    absolute,
    cast,
    clip,
    floating,
    floor_divide,
    greater_equal,
    less,
    logical_and,
    where,
)
from dptrain.ops.indexing import take, take_each
from dptrain.ops.linear_algebra import batch_matmul
from dptrain.ops.manipulation import expand_dims, reshape, squeeze, zeros
from dptrain.ops.padding import pad
from dptrain.ops.rounding import floor
from dptrain.ops.spatial import FORMATS, channels_first, channels_last
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.registry.names import not_there

Array = npt.NDArray[np.float64]

__all__ = ["affine_transform", "crop_images", "pad_images", "resize", "rgb_to_grayscale"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("ops.image", __all__)

RESIZE_INTERPOLATIONS = ("bilinear", "nearest", "lanczos3", "lanczos5", "bicubic")
INTERPOLATIONS = ("nearest", "bilinear")
FILL_MODES = ("constant", "nearest", "wrap", "mirror", "reflect")
# Of red, green and blue: ITU-R BT.601.
_GRAY = (0.2989, 0.587, 0.114)


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
    """Return images of another size, as Keras on JAX and TensorFlow; floating-point numbers, "nearest" of any type.

    Args:
        images: (rows, height, width, channels) or (height, width, channels).
        size: (height, width) of what comes out.
        interpolation: "nearest", "bilinear", "bicubic", "lanczos3" or "lanczos5".
        antialias: where images become smaller, each pixel sees all that it stands for.
        crop_to_aspect_ratio: cut off what is too high or wide, equally on both sides, rather than distort.
        pad_to_aspect_ratio: add what is missing, equally on both sides, rather than distort.
        fill_mode: only "constant".
        fill_value: what is added.
        data_format: "channels_last", which None stands for, or "channels_first".

    Raises:
        ConfigError: an argument is unknown or out of range.

    Source: R. Keys, "Cubic convolution interpolation for digital image processing", IEEE Trans. ASSP 29 (1981).
    """
    if len(size) != 2:
        raise ConfigError(f"Expected `size` to be a tuple of 2 integers. Received: size={size}")
    if min(size) <= 0:
        raise ConfigError(f"`size` must have positive height and width. Received: size={size}")
    _one_of("interpolation", interpolation, RESIZE_INTERPOLATIONS)
    if fill_mode != "constant":
        raise ConfigError(
            f"Invalid value for argument `fill_mode`. Only `'constant'` is supported. Received: fill_mode={fill_mode}"
        )
    if pad_to_aspect_ratio and crop_to_aspect_ratio:
        raise ConfigError("Only one of `pad_to_aspect_ratio` & `crop_to_aspect_ratio` can be `True`.")
    x, restored = _batched(images, data_format)
    height, width = int(size[0]), int(size[1])
    if crop_to_aspect_ratio:
        x = _cropped(x, height, width)
    elif pad_to_aspect_ratio:
        x = _padded(x, height, width, fill_value)
    for axis, target in ((1, height), (2, width)):
        x = _resized(x, axis, target, interpolation, antialias)
    return restored(x)


def cropped_box(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of the greatest box in the middle that has a target's aspect ratio."""
    own_height = max(min(height, int(float(width * target_height) / target_width)), 1)
    own_width = max(min(width, int(float(height * target_width) / target_height)), 1)
    return int((height - own_height) / 2), int((width - own_width) / 2), own_height, own_width


def _cropped(x: Tensor, height: int, width: int) -> Tensor:
    top, left, own_height, own_width = cropped_box(int(x.shape[1]), int(x.shape[2]), height, width)
    return x[:, top : top + own_height, left : left + own_width]


def border_around(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int]:
    """Return how much is added above and below, and at each side, of pictures to have a target's aspect ratio."""
    above = int((max(height, int(float(width * target_height) / target_width)) - height) / 2)
    return above, int((max(width, int(float(height * target_width) / target_height)) - width) / 2)


def _padded(x: Tensor, height: int, width: int, value: float) -> Tensor:
    above, left = border_around(int(x.shape[1]), int(x.shape[2]), height, width)
    return pad(x, [(0, 0), (above, above), (left, left), (0, 0)], constant_values=value)


def _resized(x: Tensor, axis: int, target: int, interpolation: str, antialias: bool) -> Tensor:
    """Return images with another length of one axis."""
    length = int(x.shape[axis])
    if length == target:
        return x if interpolation == "nearest" else floating(x)
    if interpolation == "nearest":
        return take(x, nearest_pixels(length, target), axis)
    found = floating(x)
    weights = cast(pixel_weights(length, target, interpolation, antialias), found.dtype)
    rows, behind = found.shape[0], math.prod(found.shape[axis + 1 :])
    before = rows if axis == 1 else rows * found.shape[1]
    made = batch_matmul(weights, reshape(found, (before, length, behind)))
    return reshape(made, (*found.shape[:axis], target, *found.shape[axis + 1 :]))


def nearest_pixels(length: int, target: int) -> npt.NDArray[np.int32]:
    """Return which of `length` pixels lies nearest to each of `target`."""
    places = ((np.arange(target, dtype=np.float32) + 0.5) * length / target).astype(np.float32)
    return np.floor(places).astype(np.int32)


def pixel_weights(length: int, target: int, interpolation: str, antialias: bool) -> Array:
    """Return what each of `length` pixels weighs in each of `target`, (target, length)."""
    scale = length / target
    centers = (np.arange(target) + 0.5) * scale - 0.5
    apart = np.abs(centers[:, None] - np.arange(length)) / (max(scale, 1.0) if antialias else 1.0)
    found = _KERNELS[interpolation](apart)
    total = found.sum(1, keepdims=True)
    enough = np.abs(total) > 1000 * np.finfo(np.float32).eps
    found = np.where(enough, found / np.where(total == 0, 1, total), 0)
    inside = (centers >= -0.5) & (centers <= length - 0.5)
    return np.where(inside[:, None], found, 0)


def _triangle(x: Array) -> Array:
    return np.maximum(0, 1 - x)


def _cubic(x: Array) -> Array:
    near, far = ((1.5 * x - 2.5) * x) * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x >= 2, 0, np.where(x >= 1, far, near))


def _lanczos(radius: int) -> Callable[[Array], Array]:
    def kernel(x: Array) -> Array:
        y = radius * np.sin(np.pi * x) * np.sin(np.pi * x / radius)
        found = np.where(x > 1e-3, y / np.where(x != 0, np.pi**2 * x**2, 1), 1)
        return np.where(x > radius, 0, found)

    return kernel


_KERNELS: dict[str, Callable[[Array], Array]] = {
    "bilinear": _triangle,
    "bicubic": _cubic,
    "lanczos3": _lanczos(3),
    "lanczos5": _lanczos(5),
}


def affine_transform(
    images: Any,
    transform: Any,
    interpolation: str = "bilinear",
    fill_mode: str = "constant",
    fill_value: float = 0,
    data_format: str | None = None,
) -> Tensor:
    """Return images whose pixel (x, y) is that at (a0 x + a1 y + a2, b0 x + b1 y + b2) of the images given.

    Args:
        images: (rows, height, width, channels) or (height, width, channels).
        transform: a0, a1, a2, b0, b1, b2, c0, c1 of all images, (8,), or of each, (rows, 8); c0 and c1, of projections,
            are not read.
        interpolation: "nearest", or "bilinear" between the four pixels around a place.
        fill_mode: what lies outside: "constant", or the image continued by its last pixel ("nearest"), its period
            ("wrap"), or its mirror, at the last pixel ("mirror") or behind it ("reflect").
        fill_value: of "constant".
        data_format: "channels_last", which None stands for, or "channels_first".

    Raises:
        ConfigError: an argument is unknown, or another shape.
    """
    _one_of("interpolation", interpolation, INTERPOLATIONS)
    _one_of("fill_mode", fill_mode, FILL_MODES)
    (numbers,) = as_tensors([transform])
    if numbers.ndim not in (1, 2) or numbers.shape[-1] != 8:
        raise ConfigError(
            "Invalid transform rank: expected rank 1 (single transform) or rank 2 (batch of transforms) of 8 numbers. "
            f"Received input with shape: transform.shape={numbers.shape}"
        )
    x, restored = _batched(images, data_format)
    found, numbers = floating(x), floating(numbers)
    rows, height, width = x.shape[0], int(x.shape[1]), int(x.shape[2])
    if numbers.ndim == 1:
        numbers = numbers + zeros((rows, 1), numbers.dtype)
    down, across = np.arange(height)[:, None], np.arange(width)
    a0, a1, a2, b0, b1, b2 = (reshape(numbers[:, n], (rows, 1, 1)) for n in range(6))
    column, row = a0 * across + a1 * down + a2, b0 * across + b1 * down + b2
    pixels = reshape(found, (rows, height * width, x.shape[3]))
    total: Any = None
    for y, y_weight in _neighbours(row, interpolation):
        for z, z_weight in _neighbours(column, interpolation):
            place = _within(y, height, fill_mode) * width + _within(z, width, fill_mode)
            part = take_each(pixels, place)
            if fill_mode == "constant":
                part = where(expand_dims(logical_and(_inside(y, height), _inside(z, width)), -1), part, fill_value)
            if y_weight is not None and z_weight is not None:
                part = part * cast(expand_dims(y_weight * z_weight, -1), found.dtype)
            total = part if total is None else total + part
    return restored(total)


def _neighbours(x: Tensor, interpolation: str) -> list[tuple[Tensor, Tensor | None]]:
    """Return the whole numbers around coordinates, and what each weighs."""
    if interpolation == "nearest":
        return [(cast(floor(x + 0.5), "int32"), None)]
    below = floor(x)
    whole, above = cast(below, "int32"), x - below
    return [(whole, 1 - above), (whole + 1, above)]


def _inside(place: Tensor, length: int) -> Tensor:
    return logical_and(greater_equal(place, 0), less(place, length))


def _within(place: Tensor, length: int, fill_mode: str) -> Tensor:
    """Return places in an axis where they lie outside of it."""
    if fill_mode == "wrap":
        return mod(place, length)
    if fill_mode == "mirror" and length > 1:
        return _mirrored(place, length)
    if fill_mode == "reflect":
        return floor_divide(_mirrored(2 * place + 1, 2 * length + 1) - 1, 2)
    return clip(place, 0, length - 1)


def _mirrored(place: Tensor, length: int) -> Tensor:
    return absolute(mod(place + (length - 1), 2 * (length - 1)) - (length - 1))


def rgb_to_grayscale(images: Any, data_format: str | None = None) -> Tensor:
    """Return the brightness of images, one channel for three; images of one channel as they are.

    Args:
        images: (rows, height, width, channels) or (height, width, channels).
        data_format: "channels_last", which None stands for, or "channels_first".

    Raises:
        ConfigError: not one or three channels.
    """
    x, restored = _batched(images, data_format)
    if x.shape[3] not in (1, 3):
        raise ConfigError(
            "Invalid channel size: expected 3 (RGB) or 1 (Grayscale). Received input with shape: "
            f"images.shape={as_tensors([images])[0].shape}"
        )
    if x.shape[3] == 1:
        return as_tensors([images])[0]
    colours = floating(x)
    gray = sum((colours[..., n : n + 1] * weight for n, weight in enumerate(_GRAY[1:], 1)), colours[..., :1] * _GRAY[0])
    return restored(cast(gray, x.dtype))


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
    """Return images with zeros around them; two of the three arguments of each axis say how many.

    Args:
        images: (rows, height, width, channels) or (height, width, channels).
        top_padding: rows above.
        left_padding: columns before.
        bottom_padding: rows below.
        right_padding: columns behind.
        target_height: of what comes out.
        target_width: of what comes out.
        data_format: "channels_last", which None stands for, or "channels_first".

    Raises:
        ConfigError: not two of three arguments, or fewer than no rows or columns.
    """
    x, restored = _batched(images, data_format)
    names = (("top_padding", "bottom_padding", "target_height"), ("left_padding", "right_padding", "target_width"))
    given = ((top_padding, bottom_padding, target_height), (left_padding, right_padding, target_width))
    widths = [_solved(name, one, int(length), 1) for name, one, length in zip(names, given, x.shape[1:3], strict=True)]
    return restored(pad(x, [(0, 0), *widths, (0, 0)]))


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
    """Return a part of images; two of the three arguments of each axis say which.

    Args:
        images: (rows, height, width, channels) or (height, width, channels).
        top_cropping: rows to leave out above.
        left_cropping: columns before.
        bottom_cropping: rows below.
        right_cropping: columns behind.
        target_height: of what comes out.
        target_width: of what comes out.
        data_format: "channels_last", which None stands for, or "channels_first".

    Raises:
        ConfigError: not two of three arguments, or fewer than no rows or columns.
    """
    x, restored = _batched(images, data_format)
    names = (("top_cropping", "bottom_cropping", "target_height"), ("left_cropping", "right_cropping", "target_width"))
    given = ((top_cropping, bottom_cropping, target_height), (left_cropping, right_cropping, target_width))
    (top, below), (left, behind) = (
        _solved(name, one, int(length), -1) for name, one, length in zip(names, given, x.shape[1:3], strict=True)
    )
    return restored(x[:, top : int(x.shape[1]) - below, left : int(x.shape[2]) - behind])


def _solved(names: Sequence[str], given: Sequence[int | None], length: int, sign: int) -> tuple[int, int]:
    """Return how many elements come before and behind, of (before, behind, target) of which one is None.

    Args:
        names: of the arguments, for messages.
        given: as above.
        length: of the axis.
        sign: 1 where elements are added, -1 where they are left out.
    """
    if sum(one is not None for one in given) != 2:
        raise ConfigError(
            f"Must specify exactly two of {', '.join(names)}. Received: "
            f"{', '.join(f'{name}={one}' for name, one in zip(names, given, strict=True))}"
        )
    before, behind, target = given
    change = 0 if target is None else sign * (target - length)
    first = change - (behind or 0) if before is None else before
    last = change - first if behind is None else behind
    found = {names[0]: first, names[1]: last, names[2]: length + sign * (first + last)}
    for name, one in found.items():
        if one < 0:
            raise ConfigError(f"{name} must be >= 0. Received: {name}={one}")
    return first, last


def _batched(images: Any, data_format: str | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return (rows, height, width, channels), and what brings a result back into the images' form."""
    if data_format not in (None, *FORMATS):
        raise ConfigError(f"data_format={data_format!r}: expected None, 'channels_last' or 'channels_first'")
    (x,) = as_tensors([images])
    if x.ndim not in (3, 4):
        raise ConfigError(
            "Invalid images rank: expected rank 3 (single image) or rank 4 (batch of images). Received input with "
            f"shape: images.shape={x.shape}"
        )
    single, first = x.ndim == 3, data_format == "channels_first"
    x = expand_dims(x, 0) if single else x
    x = channels_last(x) if first else x

    def restored(found: Tensor) -> Tensor:
        found = channels_first(found) if first else found
        return squeeze(found, 0) if single else found

    return x, restored


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"Invalid value for argument `{name}`. Expected of one {tuple(known)}. Received: {name}={value}"
        )
