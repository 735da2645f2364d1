"""Boxes in every format, anywhere in and around an image, against counts of the cells of a grid that they cover."""

import itertools

import numpy as np
import pytest

from dptrain.utils import bounding_boxes

HEIGHT, WIDTH, BORDER = 5, 7, 4
FORMATS = [prefix + name for prefix in ("", "rel_") for name in ("xyxy", "yxyx", "xywh", "center_xywh", "center_yxhw")]
SIZE = {"height": HEIGHT, "width": WIDTH}


def ends(length: int) -> list[tuple[int, int]]:
    """Return beginnings and ends along an axis: before, across, within and behind an image."""
    return [
        (-3, -1),
        (-1, 1),
        (0, length),
        (-2, length + 2),
        (2, 4),
        (length - 1, length + 1),
        (length + 1, length + 3),
    ]


BOXES = np.array([(x[0], y[0], x[1], y[1]) for x, y in itertools.product(ends(WIDTH), ends(HEIGHT))], np.float32)


def cells(box) -> np.ndarray:
    """Return the cells of a grid around the image that a box of whole corners covers."""
    left, top, right, bottom = (int(corner) + BORDER for corner in np.rint(box))
    covered = np.zeros((HEIGHT + 2 * BORDER, WIDTH + 2 * BORDER), bool)
    covered[top:bottom, left:right] = True
    return covered


IMAGE = cells((0, 0, WIDTH, HEIGHT))


def in_format(boxes, form):
    return bounding_boxes.convert_format(boxes, "xyxy", form, **SIZE)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_left_of_a_box_and_its_label(form):
    labels = 1 + np.arange(len(BOXES))
    clipped = bounding_boxes.clip_to_image_size(
        {"boxes": in_format(BOXES, form), "labels": labels}, **SIZE, bounding_box_format=form
    )
    corners = np.asarray(bounding_boxes.convert_format(clipped["boxes"], form, "xyxy", **SIZE))
    for box, left_over, label, number in zip(BOXES, corners, np.asarray(clipped["labels"]), labels, strict=True):
        expected = cells(box) & IMAGE
        assert label == (number if expected.any() else -1), box
        np.testing.assert_array_equal(cells(left_over), expected, err_msg=str(box))


@pytest.mark.parametrize("form", FORMATS)
def test_overlaps(form):
    boxes = in_format(BOXES, form)
    overlaps = np.asarray(bounding_boxes.compute_iou(boxes, boxes, form, image_shape=(HEIGHT, WIDTH, 3)))
    covered = np.stack([cells(box).ravel() for box in BOXES]).astype(np.float64)
    shared = covered @ covered.T
    union = covered.sum(1)[:, None] + covered.sum(1) - shared
    np.testing.assert_allclose(overlaps, shared / union, atol=1e-5)


@pytest.mark.parametrize(
    ("top", "left", "height", "width"), [(0, 0, HEIGHT, WIDTH), (1, 2, 3, 4), (2, 0, 1, 7), (0, 3, 5, 1)]
)
def test_parts_of_images(top, left, height, width):
    cropped = np.asarray(bounding_boxes.crop(BOXES, top, left, height, width))
    padded = np.asarray(bounding_boxes.pad(BOXES, top, left))
    part, shift = cells((left, top, left + width, top + height)), np.array([left, top, left, top])
    for box, in_part, in_padded in zip(BOXES, cropped, padded, strict=True):
        np.testing.assert_array_equal(cells(in_part + shift), cells(box) & part, err_msg=str(box))
        np.testing.assert_array_equal(in_padded, box + shift)
