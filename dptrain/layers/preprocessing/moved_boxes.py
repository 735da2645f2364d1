"""Bounding boxes that move with the pixels of their images: corners left, top, right and bottom, in pixels."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.program.tensor import Tensor

Size = tuple[Any, Any]


def placed(corners: Tensor, scale: Size, offset: Size) -> Tensor:
    """Return boxes (..., 4) with x and y multiplied by `scale`, and moved by `offset` afterwards."""
    edges = [corners[..., index] * scale[index % 2] + offset[index % 2] for index in range(4)]
    return ops.stack(edges, -1)


def clipped(corners: Tensor, box: tuple[Any, Any, Any, Any]) -> Tensor:
    """Return boxes (..., 4) within a box of (top, left, height, width)."""
    top, left, height, width = box
    limits = ((left, left + width), (top, top + height))
    return ops.stack([ops.clip(corners[..., index], *limits[index % 2]) for index in range(4)], -1)


def in_box(corners: Tensor, box: tuple[int, int, int, int], size: tuple[int, int]) -> Tensor:
    """Return boxes (..., 4) of a box (top, left, height, width) of the image that is resized to (height, width)."""
    top, left, height, width = box
    scale = size[1] / width, size[0] / height
    return placed(clipped(corners, box), scale, (-left * scale[0], -top * scale[1]))


def through_affine(corners: Tensor, numbers: Sequence[Any]) -> Tensor:
    """Return the boxes (rows, boxes, 4) around what an image's affine map makes of them.

    `numbers` are a0, a1, a2, b0, b1 and b2 of the map from the new image's pixels to the old one's, each (rows,) or a
    number.
    """
    a0, a1, a2, b0, b1, b2 = (_column(number, corners) for number in numbers)
    determinant = a0 * b1 - a1 * b0

    def moved(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x - a2, y - b2
        return (b1 * x - a1 * y) / determinant, (a0 * y - b0 * x) / determinant

    return _around(corners, moved)


def through_homography(corners: Tensor, numbers: Tensor) -> Tensor:
    """Return the boxes (rows, boxes, 4) around what a perspective makes of them.

    `numbers` are the (rows, 8) of `ops.image.warping.homography` from the old image's pixels to the new one's.
    """
    a0, a1, a2, b0, b1, b2, c0, c1 = (_column(numbers[:, index], corners) for index in range(8))

    def moved(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        depth = c0 * x + c1 * y + 1
        return (a0 * x + a1 * y + a2) / depth, (b0 * x + b1 * y + b2) / depth

    return _around(corners, moved)


def _column(number: Any, corners: Tensor) -> Tensor:
    """Return a number, or one for each image, in the boxes' type, (rows or 1, 1)."""
    return ops.reshape(ops.cast(ops.convert_to_tensor(number), corners.dtype), (-1, 1))


def _around(corners: Tensor, moved: Any) -> Tensor:
    """Return the boxes around the four moved corners of each box."""
    left, top, right, bottom = (corners[..., index] for index in range(4))
    points = [moved(x, y) for x in (left, right) for y in (top, bottom)]
    xs, ys = (ops.stack([point[axis] for point in points], -1) for axis in (0, 1))
    return ops.stack([ops.min(xs, -1), ops.min(ys, -1), ops.max(xs, -1), ops.max(ys, -1)], -1)
