"""Boxes around objects in images, as Keras' `utils.bounding_boxes`: their formats, overlaps and limits."""

from collections.abc import Mapping, Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.tensor import Tensor

__all__ = ["clip_to_image_size", "compute_iou", "convert_format"]

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
        boxes: (..., 4), or a dictionary whose "boxes" they are.
        source: "xyxy" (left, top, right, bottom), "yxyx", "xywh" (left, top, width, height), "center_xywh" or
            "center_yxhw"; with "rel_" before it as fractions of the image.
        target: likewise.
        height: of the image, for fractions.
        width: of the image, for fractions.
        dtype: of what is returned.

    Raises:
        ConfigError: there is no such format, boxes have not four numbers, or the image's size is missing.
    """
    if isinstance(boxes, Mapping):
        return {**boxes, "boxes": convert_format(boxes["boxes"], source, target, height, width, dtype)}
    found = ops.cast(ops.convert_to_tensor(boxes), dtype)
    if not found.ndim or found.shape[-1] != 4:
        raise ConfigError(f"Expected `boxes` to be a tensor with last dimension 4. Received: boxes.shape={found.shape}")
    names = [str(one).lower() for one in (source, target)]
    for name in names:
        if name.removeprefix("rel_") not in _FORMATS:
            known = ", ".join(map(repr, _FORMATS))
            raise ConfigError(f"bounding box format {name!r}: expected {known}, or one of these behind 'rel_'")
    if names[0] == names[1]:
        return found
    if any(name.startswith("rel_") for name in names) and (height is None or width is None):
        raise ConfigError("convert_format() must receive `height` and `width` arguments with relative formats")
    corners = _corners(found, names[0].removeprefix("rel_"))
    scale = [width or 1.0, height or 1.0]
    if names[0].startswith("rel_"):
        corners = [one * scale[number % 2] for number, one in enumerate(corners)]
    if names[1].startswith("rel_"):
        corners = [one / scale[number % 2] for number, one in enumerate(corners)]
    return ops.stack(_of_corners(corners, names[1].removeprefix("rel_")), -1)


def clip_to_image_size(
    bounding_boxes: Mapping[str, Any],
    height: float | None = None,
    width: float | None = None,
    bounding_box_format: str = "xyxy",
) -> dict[str, Any]:
    """Return boxes cut to the image; those of which nothing is left are zeros, with the label -1.

    Args:
        bounding_boxes: "boxes" (..., boxes, 4) and "labels" (..., boxes).
        height: of the image.
        width: of the image.
        bounding_box_format: as of `convert_format`.

    Raises:
        ConfigError: as `convert_format`, or the image's size is missing.
    """
    if height is None or width is None:
        raise ConfigError("clip_to_image_size: expected the `height` and `width` of the image")
    size: dict[str, Any] = {"height": height, "width": width}
    left, top, right, bottom = _corners(
        convert_format(bounding_boxes["boxes"], bounding_box_format, "xyxy", **size), "xyxy"
    )
    left, right = (ops.clip(one, 0.0, width) for one in (left, right))
    top, bottom = (ops.clip(one, 0.0, height) for one in (top, bottom))
    is_left = ops.logical_and(right > left, bottom > top)
    boxes = convert_format(ops.stack([left, top, right, bottom], -1), "xyxy", bounding_box_format, **size)
    labels = ops.convert_to_tensor(bounding_boxes["labels"])
    return {
        **bounding_boxes,
        "boxes": ops.where(ops.expand_dims(is_left, -1), boxes, 0.0),
        "labels": ops.where(is_left, labels, -1),
    }


def compute_iou(
    boxes1: Any,
    boxes2: Any,
    bounding_box_format: str,
    use_masking: bool = False,
    mask_val: float = -1,
    image_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the intersection of each two boxes over their union.

    Args:
        boxes1: (M, 4) or (rows, M, 4).
        boxes2: (N, 4) or (rows, N, 4).
        bounding_box_format: as of `convert_format`.
        use_masking: boxes of numbers below 0 are none.
        mask_val: their result.
        image_shape: (height, width, channels), for fractions.

    Returns:
        (M, N) or (rows, M, N).

    Raises:
        ConfigError: as `convert_format`, or boxes of another rank.
    """
    height, width = (None, None) if image_shape is None else image_shape[:2]
    each = [convert_format(one, bounding_box_format, "xyxy", height, width) for one in (boxes1, boxes2)]
    if any(one.ndim not in (2, 3) for one in each):
        raise ConfigError(
            "compute_iou() expects boxes1 to be batched, or to be unbatched. Received: shapes "
            f"{' and '.join(str(one.shape) for one in each)}"
        )
    first = [ops.expand_dims(one, -1) for one in _corners(each[0], "xyxy")]
    second = [ops.expand_dims(one, -2) for one in _corners(each[1], "xyxy")]
    across = ops.maximum(ops.minimum(first[2], second[2]) - ops.maximum(first[0], second[0]), 0.0)
    down = ops.maximum(ops.minimum(first[3], second[3]) - ops.maximum(first[1], second[1]), 0.0)
    shared = across * down
    areas = [(right - left) * (bottom - top) for left, top, right, bottom in (first, second)]
    found = shared / (areas[0] + areas[1] - shared + _EPSILON)
    if use_masking:
        none = [ops.less(ops.max(one, -1), 0.0) for one in each]
        masked = ops.logical_or(ops.expand_dims(none[0], -1), ops.expand_dims(none[1], -2))
        found = ops.where(masked, float(mask_val), found)
    return found


def _corners(boxes: Tensor, form: str) -> list[Tensor]:
    """Return left, top, right and bottom."""
    a, b, c, d = (boxes[..., number] for number in range(4))
    if form in ("yxyx", "center_yxhw"):
        a, b, c, d = b, a, d, c
    if form.startswith("center_"):
        return [a - c / 2, b - d / 2, a + c / 2, b + d / 2]
    return [a, b, a + c, b + d] if form == "xywh" else [a, b, c, d]


def _of_corners(corners: Sequence[Tensor], form: str) -> list[Tensor]:
    left, top, right, bottom = a, b, c, d = corners
    if form == "xywh":
        c, d = right - left, bottom - top
    elif form.startswith("center_"):
        a, b, c, d = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
    return [b, a, d, c] if form in ("yxyx", "center_yxhw") else [a, b, c, d]
