"""Warps of images: affine and projective maps, elastic deformation, any coordinates."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops import random
from dptrain.ops.elementwise import (
    absolute,
    cast,
    clip,
    floating,
    floor_divide,
    greater_equal,
    less,
    logical_and,
    multiply,
    where,
)
from dptrain.ops.image.filters import blurred
from dptrain.ops.image.formats import batched, check_choice, exact_dtype, to_dtype
from dptrain.ops.indexing import take, take_each
from dptrain.ops.manipulation import expand_dims, reshape, stack, zeros
from dptrain.ops.math.division import mod
from dptrain.ops.math.rounding import floor, rint
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import is_floating

INTERPOLATIONS = ("nearest", "bilinear")
FILL_MODES = ("constant", "nearest", "wrap", "mirror", "reflect")
_ORDERS = {0: "nearest", 1: "bilinear"}


@operation
@for_open_shapes
def affine_transform(
    images: Any,
    transform: Any,
    interpolation: str = "bilinear",
    fill_mode: str = "constant",
    fill_value: float = 0,
    data_format: str | None = None,
) -> Tensor:
    """Return images whose pixel (x, y) is that at (a0 x + a1 y + a2, b0 x + b1 y + b2) of the originals.

    Args:
        images, data_format: see `resize`.
        transform: a0, a1, a2, b0, b1, b2, c0, c1 of all images, (8,), or of each, (rows, 8); c0 and c1, of projections,
            are not read.
        interpolation: "nearest", or "bilinear" between the four pixels around a coordinate.
        fill_mode: outside the image: "constant", or the image continued by its last pixel ("nearest"), its period
            ("wrap"), or its mirror, at the last pixel ("mirror") or after it ("reflect").
        fill_value: of "constant".
    """
    check_choice("interpolation", interpolation, INTERPOLATIONS)
    check_choice("fill_mode", fill_mode, FILL_MODES)
    (numbers,) = as_tensors([transform])
    if numbers.ndim not in (1, 2) or numbers.shape[-1] != 8:
        raise ConfigError(
            "Invalid transform rank: expected rank 1 (single transform) or rank 2 (batch of transforms) of 8 numbers. "
            f"Received input with shape: transform.shape={numbers.shape}"
        )
    x, restored = batched(images, data_format)
    a0, a1, a2, b0, b1, b2 = _per_image(numbers, x)[:6]
    down, across = _grid(x)
    places = b0 * across + b1 * down + b2, a0 * across + a1 * down + a2
    return restored(_read_at(x, places, interpolation, fill_mode, fill_value))


@operation
@for_open_shapes
def perspective_transform(
    images: Any,
    start_points: Any,
    end_points: Any,
    interpolation: str = "bilinear",
    fill_value: float = 0,
    data_format: str | None = None,
) -> Tensor:
    """Return images in perspective, so that four points of each move to other places.

    Args:
        images, interpolation, data_format: see `affine_transform`.
        start_points: (x, y) of the four, of all images, (4, 2), or of each, (rows, 4, 2).
        end_points: where they move, of the same shape.
        fill_value: of pixels outside the image.
    """
    check_choice("interpolation", interpolation, INTERPOLATIONS)
    starts, ends = (floating(points) for points in as_tensors([start_points, end_points]))
    for name, points in (("start_points", starts), ("end_points", ends)):
        if points.ndim not in (2, 3) or tuple(map(int, points.shape[-2:])) != (4, 2):
            raise ConfigError(
                f"Invalid {name} shape: expected (4,2) for a single image or (N,4,2) for a batch. Received shape: "
                f"{points.shape}"
            )
    if starts.ndim != ends.ndim:
        raise ConfigError(
            "start_points and end_points must have the same shape. Received start_points.shape="
            f"{starts.shape}, end_points.shape={ends.shape}"
        )
    x, restored = batched(images, data_format)
    a0, a1, a2, b0, b1, b2, c0, c1 = _per_image(homography(starts, ends), x)
    down, across = _grid(x)
    depth = c0 * across + c1 * down + 1
    places = (b0 * across + b1 * down + b2) / depth, (a0 * across + a1 * down + a2) / depth
    return restored(_read_at(x, places, interpolation, "constant", fill_value))


def homography(start_points: Tensor, end_points: Tensor) -> Tensor:
    """Return the (..., 8) numbers a0 to c1 that map four points to others.

    (x, y) goes to (a0 x + a1 y + a2, b0 x + b1 y + b2) / (c0 x + c1 y + 1). Both arguments are (..., 4, 2), no three of
    `end_points` on a line; these are mapped to `start_points`.

    Source: P. Heckbert, "Fundamentals of texture mapping and image warping", 1989, section 2.2.3: from one quadrangle
    to the unit square by the adjoint of that square's map, and on to the other.
    """
    (a, b, c), (d, e, f), (g, h, i) = _from_square(end_points)
    adjoint = (
        (e * i - f * h, c * h - b * i, b * f - c * e),
        (f * g - d * i, a * i - c * g, c * d - a * f),
        (d * h - e * g, b * g - a * h, a * e - b * d),
    )
    start_map = _from_square(start_points)
    product = [
        sum((start_map[row][n] * adjoint[n][column] for n in range(1, 3)), start_map[row][0] * adjoint[0][column])
        for row, column in itertools.product(range(3), range(3))
    ]
    return stack([number / product[8] for number in product[:8]], -1)


def _from_square(points: Tensor) -> Sequence[Sequence[Any]]:
    """Return the projective map of (0, 0), (1, 0), (0, 1), (1, 1) to four points, as the rows of a matrix."""
    (x0, x1, x2, x3), (y0, y1, y2, y3) = ([points[..., n, axis] for n in range(4)] for axis in range(2))
    x_sum, y_sum = x0 - x1 - x2 + x3, y0 - y1 - y2 + y3
    determinant = (x1 - x3) * (y2 - y3) - (x2 - x3) * (y1 - y3)
    g = (x_sum * (y2 - y3) - (x2 - x3) * y_sum) / determinant
    h = ((x1 - x3) * y_sum - x_sum * (y1 - y3)) / determinant
    first = x1 - x0 + g * x1, x2 - x0 + h * x2, x0
    return first, (y1 - y0 + g * y1, y2 - y0 + h * y2, y0), (g, h, 1.0)


@operation
@for_open_shapes
def elastic_transform(
    images: Any,
    alpha: Any = 20.0,
    sigma: Any = 5.0,
    interpolation: str = "bilinear",
    fill_mode: str = "reflect",
    fill_value: float = 0.0,
    seed: random.Seed = None,
    data_format: str | None = None,
) -> Tensor:
    """Move the pixels of each image by smooth random fields, one in each direction.

    Args:
        images, interpolation, fill_mode, fill_value, data_format: see `affine_transform`.
        alpha: factor of the fields.
        sigma: deviation of the noise that they are made of, and of the Gaussian that smooths it, in pixels.
        seed: see `dptrain.random.normal`.

    Source: P. Simard, D. Steinkraus and J. Platt, "Best practices for convolutional neural networks applied to visual
    document analysis", ICDAR 2003.
    """
    check_choice("interpolation", interpolation, INTERPOLATIONS)
    check_choice("fill_mode", fill_mode, FILL_MODES)
    x, restored = batched(images, data_format)
    kind = exact_dtype(x)
    alpha, sigma = (to_dtype(value, kind) for value in (alpha, sigma))
    shape = (x.shape[0], int(x.shape[1]), int(x.shape[2]), 1)
    moves = []
    for _ in range(2):
        noise = random.normal(shape, dtype=kind, seed=seed) * sigma
        smooth = blurred(blurred(noise, 1, sigma), 2, sigma)
        moves.append(reshape(smooth, shape[:3]) * alpha)
    places = tuple(grid + move for grid, move in zip(_grid(x), moves, strict=True))
    return restored(_read_at(x, places, interpolation, fill_mode, fill_value))


@operation
@for_open_shapes
def map_coordinates(
    inputs: Any, coordinates: Any, order: int, fill_mode: str = "constant", fill_value: float = 0
) -> Tensor:
    """Return an array's values (...) at coordinates (axes of the array, ...), interpolated; integers are rounded.

    Args:
        inputs: an array.
        coordinates: in elements.
        order: 0 for the nearest element, 1 for linear interpolation.
        fill_mode, fill_value: see `affine_transform`.
    """
    if order not in _ORDERS:
        raise ConfigError(f"Invalid value for argument `order`. Expected one of [0, 1]. Received: order={order}")
    check_choice("fill_mode", fill_mode, FILL_MODES)
    table, places = as_tensors([inputs, coordinates])
    if places.ndim < 2:
        raise ConfigError(
            "Invalid coordinates rank: expected at least rank 2. Received input with shape: "
            f"{tuple(map(int, places.shape))}"
        )
    if places.shape[0] != table.ndim:
        raise ConfigError(
            "First dim of `coordinates` must be the same as the rank of `inputs`. Received inputs with shape: "
            f"{table.shape} and coordinate leading dim of {int(places.shape[0])}"
        )
    flat = reshape(floating(table), -1)
    axis_coordinates, lengths = [floating(places[n]) for n in range(table.ndim)], [int(n) for n in table.shape]
    values = _interpolated(lambda at: take(flat, at), axis_coordinates, lengths, _ORDERS[order], fill_mode, fill_value)
    return values if is_floating(table.dtype) else cast(rint(values), table.dtype)


def _per_image(numbers: Tensor, x: Tensor) -> list[Tensor]:
    """Return each number of a transformation, (8,) or (rows, 8), as (rows, 1, 1)."""
    rows, values = x.shape[0], floating(numbers)
    if values.ndim == 1:
        values = values + zeros((rows, 1), values.dtype)
    return [reshape(values[:, n], (-1, 1, 1)) for n in range(8)]


def _grid(x: Tensor) -> tuple[Any, Any]:
    """Return the pixel coordinates downwards and to the right, (height, 1) and (width,)."""
    return np.arange(int(x.shape[1]))[:, None], np.arange(int(x.shape[2]))


def _read_at(x: Tensor, places: Sequence[Tensor], interpolation: str, fill_mode: str, fill_value: float) -> Tensor:
    """Sample images (rows, height, width, channels) at coordinates (rows, height, width) of rows and columns."""
    tensor = floating(x)
    rows, height, width, channels = x.shape
    pixels = reshape(tensor, (rows, int(height) * int(width), channels))
    lengths = [int(height), int(width)]
    return _interpolated(lambda at: take_each(pixels, at), places, lengths, interpolation, fill_mode, fill_value, 1)


def _interpolated(
    read: Callable[[Tensor], Tensor],
    coordinates: Sequence[Tensor],
    lengths: Sequence[int],
    interpolation: str,
    fill_mode: str,
    fill_value: float,
    behind: int = 0,
) -> Tensor:
    """Return the weighted sum of the neighbours of each coordinate; `read` returns elements at row-major indices."""

    def along(mask: Tensor) -> Tensor:
        return expand_dims(mask, -1) if behind else mask

    total: Any = None
    for corner in itertools.product(
        *(_neighbours(axis_coordinates, interpolation) for axis_coordinates in coordinates)
    ):
        place: Any = 0
        for (at, _), length in zip(corner, lengths, strict=True):
            place = place * length + _index_within(at, length, fill_mode)
        part = read(place)
        if fill_mode == "constant":
            inside: Any = True
            for (at, _), length in zip(corner, lengths, strict=True):
                inside = logical_and(inside, _inside(at, length))
            part = where(along(inside), part, fill_value)
        if interpolation != "nearest":
            weight = functools.reduce(multiply, [axis_weight for _, axis_weight in corner])
            part = part * cast(along(weight), part.dtype)
        total = part if total is None else total + part
    return cast(total, part.dtype)


def _neighbours(x: Tensor, interpolation: str) -> list[tuple[Tensor, Any]]:
    """Return the integers around coordinates, and their weights."""
    if interpolation == "nearest":
        return [(cast(floor(x + 0.5), "int32"), None)]
    below = floor(x)
    below_index, above = cast(below, "int32"), x - below
    return [(below_index, 1 - above), (below_index + 1, above)]


def _inside(place: Tensor, length: int) -> Tensor:
    return logical_and(greater_equal(place, 0), less(place, length))


def _index_within(place: Tensor, length: int, fill_mode: str) -> Tensor:
    """Map indices outside of an axis into it."""
    if fill_mode == "wrap":
        return mod(place, length)
    if fill_mode == "mirror" and length > 1:
        return _mirrored(place, length)
    if fill_mode == "reflect":
        return floor_divide(_mirrored(2 * place + 1, 2 * length + 1) - 1, 2)
    return clip(place, 0, length - 1)


def _mirrored(place: Tensor, length: int) -> Tensor:
    return absolute(mod(place + (length - 1), 2 * (length - 1)) - (length - 1))
