"""Boxes around objects in images, like Keras' `utils.bounding_boxes`: formats, overlaps, limits.

All functions raise ConfigError for unknown formats, boxes without four numbers, and fractions without an image's size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.tensor import Tensor

__all__ = [
    "affine_transform",
    "clip_to_image_size",
    "compute_ciou",
    "compute_iou",
    "convert_format",
    "crop",
    "decode_deltas_to_boxes",
    "encode_box_to_deltas",
    "pad",
]

_FORMATS = ("xyxy", "yxyx", "xywh", "center_xywh", "center_yxhw")
_EPSILON = 1e-7


def convert_format(
    boxes: Any,
    source: str,
    target: str,
    height: float | None = None,
    width: float | None = None,
    dtype: str = "float32",
) -> Any:
    """Return boxes in another format.

    Args:
        boxes: (..., 4), or a dictionary with them as "boxes".
        source, target: "xyxy" (left, top, right, bottom), "yxyx", "xywh" (left, top, width, height), "center_xywh" or
            "center_yxhw"; prefixed with "rel_" as fractions of the image.
        height, width: of the image, for fractions.
        dtype: of the result.
    """
    if isinstance(boxes, Mapping):
        return {**boxes, "boxes": convert_format(boxes["boxes"], source, target, height, width, dtype)}
    tensor = ops.cast(ops.convert_to_tensor(boxes), dtype)
    if not tensor.ndim or tensor.shape[-1] != 4:
        raise ConfigError(
            f"Expected `boxes` to be a tensor with last dimension 4. Received: boxes.shape={tensor.shape}"
        )
    names = [str(form).lower() for form in (source, target)]
    for name in names:
        if name.removeprefix("rel_") not in _FORMATS:
            formats = ", ".join(map(repr, _FORMATS))
            raise ConfigError(
                f"bounding box format {name!r}: expected {formats}, or one of these with the prefix 'rel_'"
            )
    if names[0] == names[1]:
        return tensor
    if any(name.startswith("rel_") for name in names) and (height is None or width is None):
        raise ConfigError("convert_format() must receive `height` and `width` arguments with relative formats")
    corners = _corners(tensor, names[0].removeprefix("rel_"))
    scale = [width or 1.0, height or 1.0]
    if names[0].startswith("rel_"):
        corners = [corner * scale[number % 2] for number, corner in enumerate(corners)]
    if names[1].startswith("rel_"):
        corners = [corner / scale[number % 2] for number, corner in enumerate(corners)]
    return ops.stack(_from_corners(corners, names[1].removeprefix("rel_")), -1)


def clip_to_image_size(
    bounding_boxes: Mapping[str, Any],
    height: float | None = None,
    width: float | None = None,
    bounding_box_format: str = "xyxy",
) -> dict[str, Any]:
    """Clip boxes to the image, of this size; boxes of which nothing is left get the label -1.

    `bounding_boxes` has "boxes" (..., boxes, 4) and "labels" (..., boxes); for the format see `convert_format`.
    """
    if height is None or width is None:
        raise ConfigError("clip_to_image_size: expected the `height` and `width` of the image")
    size: dict[str, Any] = {"height": height, "width": width}
    left, top, right, bottom = _corners(
        convert_format(bounding_boxes["boxes"], bounding_box_format, "xyxy", **size), "xyxy"
    )
    left, right = (ops.clip(edge, 0.0, width) for edge in (left, right))
    top, bottom = (ops.clip(edge, 0.0, height) for edge in (top, bottom))
    is_inside = ops.logical_and(right > left, bottom > top)
    boxes = convert_format(ops.stack([left, top, right, bottom], -1), "xyxy", bounding_box_format, **size)
    labels = ops.convert_to_tensor(bounding_boxes["labels"])
    return {
        **bounding_boxes,
        "boxes": boxes,
        "labels": ops.where(is_inside, labels, -1),
    }


def compute_iou(
    boxes1: Any,
    boxes2: Any,
    bounding_box_format: str,
    use_masking: bool = False,
    mask_val: float = -1,
    image_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the intersection over union of each two boxes, (M, N) or (rows, M, N).

    Args:
        boxes1: (M, 4) or (rows, M, 4).
        boxes2: (N, 4) or (rows, N, 4).
        bounding_box_format: see `convert_format`.
        use_masking: boxes with negative numbers are missing.
        mask_val: their result.
        image_shape: (height, width, channels), for fractions.
    """
    height, width = (None, None) if image_shape is None else image_shape[:2]
    pair = [convert_format(boxes, bounding_box_format, "xyxy", height, width) for boxes in (boxes1, boxes2)]
    if any(boxes.ndim not in (2, 3) for boxes in pair):
        raise ConfigError(
            "compute_iou() expects boxes1 to be batched, or to be unbatched. Received: shapes "
            f"{' and '.join(str(boxes.shape) for boxes in pair)}"
        )
    first = [ops.expand_dims(corner, -1) for corner in _corners(pair[0], "xyxy")]
    second = [ops.expand_dims(corner, -2) for corner in _corners(pair[1], "xyxy")]
    across = ops.maximum(ops.minimum(first[2], second[2]) - ops.maximum(first[0], second[0]), 0.0)
    down = ops.maximum(ops.minimum(first[3], second[3]) - ops.maximum(first[1], second[1]), 0.0)
    shared = across * down
    areas = [(right - left) * (bottom - top) for left, top, right, bottom in (first, second)]
    iou = shared / (areas[0] + areas[1] - shared + _EPSILON)
    if use_masking:
        absent = [ops.less(ops.max(boxes, -1), 0.0) for boxes in pair]
        masked = ops.logical_or(ops.expand_dims(absent[0], -1), ops.expand_dims(absent[1], -2))
        iou = ops.where(masked, float(mask_val), iou)
    return iou


def compute_ciou(
    boxes1: Any, boxes2: Any, bounding_box_format: str, image_shape: Sequence[int] | None = None
) -> Tensor:
    """Return the complete intersection over union, which includes centers and proportions, of pairs of boxes.

    Both are (..., 4), the result (...): 1 for equal boxes, less the farther apart. The format must not be of fractions;
    `image_shape` is not used.

    Source: Z. Zheng et al., Distance-IoU Loss, 2020, https://arxiv.org/abs/1911.08287
    """
    if "rel" in bounding_box_format:
        raise ConfigError(
            "When using relative bounding box formats (e.g. `rel_yxyx`) the `image_shape` argument must be provided."
            f"Received `image_shape`: {image_shape}"
        )
    first, second = (_corners(convert_format(boxes, bounding_box_format, "xyxy"), "xyxy") for boxes in (boxes1, boxes2))
    across = ops.maximum(ops.minimum(first[2], second[2]) - ops.maximum(first[0], second[0]), 0.0)
    down = ops.maximum(ops.minimum(first[3], second[3]) - ops.maximum(first[1], second[1]), 0.0)
    widths = [corners[2] - corners[0] for corners in (first, second)]
    heights = [corners[3] - corners[1] + _EPSILON for corners in (first, second)]
    union = widths[0] * heights[0] + widths[1] * heights[1] - across * down + _EPSILON
    iou = across * down / (union + _EPSILON)
    hull = [ops.maximum(first[n + 2], second[n + 2]) - ops.minimum(first[n], second[n]) for n in range(2)]
    offsets = [(first[n] + first[n + 2]) / 2 - (second[n] + second[n + 2]) / 2 for n in range(2)]
    distance = (offsets[0] ** 2 + offsets[1] ** 2) / (hull[0] ** 2 + hull[1] ** 2 + _EPSILON)
    angles = [ops.arctan(width / height) for width, height in zip(widths, heights, strict=True)]
    unlike: Tensor = 4 / math.pi**2 * (angles[1] - angles[0]) ** 2
    ciou: Tensor = iou - (distance + unlike * (unlike / (unlike - iou + (1 + _EPSILON))))
    return ciou


def crop(boxes: Any, top: Any, left: Any, height: Any, width: Any, bounding_box_format: str = "xyxy") -> Tensor:
    """Return "xyxy" boxes (..., 4) in a part of an image, which begins at (top, left), clipped to the part."""
    corners = _shifted_corners(boxes, -left, -top, bounding_box_format, "crop")
    return ops.stack([ops.clip(corner, 0, (width, height)[number % 2]) for number, corner in enumerate(corners)], -1)


def pad(
    boxes: Any, top: Any, left: Any, height: Any = None, width: Any = None, bounding_box_format: str = "xyxy"
) -> Tensor:
    """Return "xyxy" boxes (..., 4) in an image with `top` rows and `left` columns added; the rest is not used."""
    return ops.stack(_shifted_corners(boxes, left, top, bounding_box_format, "pad"), -1)


def _shifted_corners(boxes: Any, right: Any, down: Any, form: str, name: str) -> list[Tensor]:
    """Return the corners of shifted boxes, in the boxes' type."""
    _require_corners(form, name)
    corners = _corners(ops.convert_to_tensor(boxes), "xyxy")
    return [corner + (right, down)[number % 2] for number, corner in enumerate(corners)]


def _require_corners(form: str, name: str) -> None:
    if form != "xyxy":
        raise ConfigError(
            f"not supported: {name} of boxes in format {form!r}; convert them to 'xyxy' with convert_format"
        )


def affine_transform(
    boxes: Any,
    angle: Any,
    translate_x: Any,
    translate_y: Any,
    scale: Any,
    shear_x: Any,
    shear_y: Any,
    height: int,
    width: int,
    center_x: float | None = None,
    center_y: float | None = None,
    bounding_box_format: str = "xyxy",
) -> Tensor:
    """Return upright boxes around boxes that were rotated, shifted, scaled and sheared, in each image differently.

    Args:
        boxes: (rows, boxes, 4), "xyxy".
        angle: (rows,), of the rotation, in degrees.
        translate_x, translate_y: (rows,), as fractions of width and height.
        scale: (rows,), factor of the boxes.
        shear_x, shear_y: (rows,), in degrees.
        height, width: of the image.
        center_x, center_y: of the rotation, as fractions; 0.5 by default.
        bounding_box_format: "xyxy".
    """
    _require_corners(bounding_box_format, "affine_transform")
    numbers = [ops.cast(number, "float32") for number in (angle, translate_x, translate_y, scale, shear_x, shear_y)]
    turn, right, down, scale, along, across = numbers
    turn, along, across = (degrees * (-math.pi / 180) for degrees in (turn, along, across))
    x = (0.5 if center_x is None else center_x) * (width - 1)
    y = (0.5 if center_y is None else center_y) * (height - 1)
    moved_x, moved_y = x - right * (width - 1), y - down * (height - 1)
    a, c = ops.cos(turn - across) / ops.cos(across), -ops.sin(turn - across) / ops.cos(across)
    b, d = a * ops.tan(along) + ops.sin(turn), ops.cos(turn) - c * ops.tan(along)
    matrix = [[d * scale, -b * scale], [-c * scale, a * scale]]
    corners = _corners(ops.cast(boxes, "float32"), "xyxy")
    ends = []
    for (first, second), center in zip(matrix, (x, y), strict=True):
        constant = ops.expand_dims(center - first * moved_x - second * moved_y, -1)
        first, second = ops.expand_dims(first, -1), ops.expand_dims(second, -1)
        places = [
            first * x_corner + second * y_corner + constant for x_corner in corners[::2] for y_corner in corners[1::2]
        ]
        ends.append(ops.stack(places, -1))
    return ops.stack([ops.min(ends[0], -1), ops.min(ends[1], -1), ops.max(ends[0], -1), ops.max(ends[1], -1)], -1)


def encode_box_to_deltas(
    anchors: Any,
    boxes: Any,
    anchor_format: str,
    box_format: str,
    encoding_format: str = "center_yxhw",
    variance: Any = None,
    image_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return offsets of boxes from anchors: between centers in anchor sizes, and logarithms of relative sizes.

    Args:
        anchors: (boxes, 4).
        boxes: (boxes, 4) or (rows, boxes, 4).
        anchor_format, box_format: see `convert_format`.
        encoding_format: of the result, "center_yxhw" or "center_xywh".
        variance: four divisors of the results; None for none.
        image_shape: (height, width, channels), for fractions.
    """
    divisors = _variance(variance)
    _check_encoding("encoding_format", encoding_format)
    height, width = (None, None) if image_shape is None else image_shape[:2]
    anchor_boxes = convert_format(anchors, anchor_format, encoding_format, height, width)
    encoded_boxes = convert_format(boxes, box_format, encoding_format, height, width)
    anchor_sizes, box_sizes = (
        ops.maximum(anchor_boxes[..., 2:], _EPSILON),
        ops.maximum(encoded_boxes[..., 2:], _EPSILON),
    )
    deltas = ops.concatenate(
        [(encoded_boxes[..., :2] - anchor_boxes[..., :2]) / anchor_sizes, ops.log(box_sizes / anchor_sizes)], -1
    )
    encoded: Tensor = deltas if divisors is None else deltas / divisors
    return encoded


def decode_deltas_to_boxes(
    anchors: Any,
    boxes_delta: Any,
    anchor_format: str,
    box_format: str,
    encoded_format: str = "center_yxhw",
    variance: Any = None,
    image_shape: Sequence[int] | None = None,
) -> Any:
    """Return boxes from anchors and offsets: the inverse of `encode_box_to_deltas`, see there.

    `anchors` and `boxes_delta` may also be dictionaries by level; `variance` multiplies.
    """
    factors = _variance(variance)
    _check_encoding("encoded_format", encoded_format)
    height, width = (None, None) if image_shape is None else image_shape[:2]

    def decoded(anchor: Any, delta: Any) -> Any:
        encoded = convert_format(anchor, anchor_format, encoded_format, height, width)
        deltas = ops.cast(delta, encoded.dtype) if factors is None else ops.cast(delta, encoded.dtype) * factors
        centers = deltas[..., :2] * encoded[..., 2:] + encoded[..., :2]
        boxes = ops.concatenate([centers, ops.exp(deltas[..., 2:]) * encoded[..., 2:]], -1)
        return convert_format(boxes, encoded_format, box_format, height, width)

    if isinstance(anchors, Mapping) and isinstance(boxes_delta, Mapping):
        return {level: decoded(anchor, boxes_delta[level]) for level, anchor in anchors.items()}
    return decoded(anchors, boxes_delta)


def _check_encoding(name: str, form: str) -> None:
    if form not in ("center_xywh", "center_yxhw"):
        raise ConfigError(f"`{name}` should be one of 'center_xywh' or 'center_yxhw', got {form}")


def _variance(variance: Any) -> Tensor | None:
    if variance is None:
        return None
    factors = ops.convert_to_tensor(variance, "float32")
    if factors.shape[-1:] != (4,):
        raise ConfigError(f"`variance` must be length 4, got {variance}")
    return factors


def _corners(boxes: Tensor, form: str) -> list[Tensor]:
    """Return left, top, right and bottom."""
    a, b, c, d = (boxes[..., number] for number in range(4))
    if form in ("yxyx", "center_yxhw"):
        a, b, c, d = b, a, d, c
    if form.startswith("center_"):
        return [a - c / 2, b - d / 2, a + c / 2, b + d / 2]
    return [a, b, a + c, b + d] if form == "xywh" else [a, b, c, d]


def _from_corners(corners: Sequence[Tensor], form: str) -> list[Tensor]:
    left, top, right, bottom = a, b, c, d = corners
    if form == "xywh":
        c, d = right - left, bottom - top
    elif form.startswith("center_"):
        a, b, c, d = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
    return [b, a, d, c] if form in ("yxyx", "center_yxhw") else [a, b, c, d]
