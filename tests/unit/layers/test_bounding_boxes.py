"""Boxes: their formats, overlaps and limits."""

import numpy as np
import pytest

from dptrain.errors import ConfigError
from dptrain.utils import bounding_boxes

# The same box in each format, in an image of 100 x 200 (height, width).
FORMS = {
    "xyxy": [10, 20, 50, 80],
    "yxyx": [20, 10, 80, 50],
    "xywh": [10, 20, 40, 60],
    "center_xywh": [30, 50, 40, 60],
    "center_yxhw": [50, 30, 60, 40],
    "rel_xyxy": [0.05, 0.2, 0.25, 0.8],
    "rel_yxyx": [0.2, 0.05, 0.8, 0.25],
    "rel_xywh": [0.05, 0.2, 0.2, 0.6],
    "rel_center_xywh": [0.15, 0.5, 0.2, 0.6],
}


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_every_format_of_every_other(source, target):
    boxes = bounding_boxes.convert_format(np.array([[FORMS[source]]]), source, target, 100, 200)
    np.testing.assert_allclose(boxes.numpy(), [[FORMS[target]]], rtol=1e-6)


def test_overlaps():
    first, second = np.array([[0, 0, 2, 2], [-1, -1, -1, -1]]), np.array([[1, 0, 3, 2], [0, 0, 2, 2], [5, 5, 6, 6]])
    overlaps = bounding_boxes.compute_iou(first, second, "xyxy").numpy()
    np.testing.assert_allclose(overlaps, [[1 / 3, 1, 0], [0, 0, 0]], atol=1e-6)
    masked = bounding_boxes.compute_iou(first, second[None], "xyxy", use_masking=True).numpy()
    np.testing.assert_allclose(masked, [[[1 / 3, 1, 0], [-1, -1, -1]]], atol=1e-6)


def test_boxes_are_cut_to_the_image():
    labelled_boxes = {"boxes": np.array([[-5, 10, 20, 110], [300, 0, 310, 5]]), "labels": np.array([3, 4])}
    clipped = bounding_boxes.clip_to_image_size(labelled_boxes, 100, 200, "xyxy")
    np.testing.assert_allclose(clipped["boxes"].numpy(), [[0, 10, 20, 100], [200, 0, 200, 5]])
    assert clipped["labels"].numpy().tolist() == [3, -1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounding_boxes.convert_format(np.ones((1, 4)), "xyxy", "xyzw"), "bounding box format 'xyzw'"),
        (lambda: bounding_boxes.convert_format(np.ones((1, 3)), "xyxy", "yxyx"), "last dimension 4"),
        (lambda: bounding_boxes.convert_format(np.ones((1, 4)), "xyxy", "rel_yxyx"), "must receive `height`"),
        (lambda: bounding_boxes.compute_iou(np.ones(4), np.ones((1, 4)), "xyxy"), "expects boxes1 to be batched"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_deltas_are_undone():
    anchors, boxes = np.array([[0, 0, 10, 20], [5, 5, 9, 8]]), np.array([[[1, 2, 8, 9], [4, 6, 20, 30]]])
    options = {"anchor_format": "xyxy", "box_format": "xyxy", "variance": [0.1, 0.1, 0.2, 0.2]}
    deltas = bounding_boxes.encode_box_to_deltas(anchors, boxes, **options)
    decoded = bounding_boxes.decode_deltas_to_boxes(anchors, deltas, **options)
    np.testing.assert_allclose(decoded.numpy(), boxes, rtol=1e-5)
    levels = bounding_boxes.decode_deltas_to_boxes({"P3": anchors}, {"P3": deltas}, **options)
    np.testing.assert_array_equal(levels["P3"].numpy(), decoded.numpy())


def test_a_turn_by_a_quarter_about_the_center():
    zero, boxes = np.zeros(1, np.float32), np.array([[[0, 0, 10, 20]]])
    turned = bounding_boxes.affine_transform(boxes, zero + 90, zero, zero, zero + 1, zero, zero, 101, 101)
    np.testing.assert_allclose(turned.numpy(), [[[0, 90, 20, 100]]], atol=1e-4)
    np.testing.assert_array_equal(bounding_boxes.pad(boxes, 1, 2).numpy(), [[[2, 1, 12, 21]]])
    np.testing.assert_array_equal(bounding_boxes.crop(boxes, 5, 2, 10, 4).numpy(), [[[0, 0, 4, 10]]])
    assert bounding_boxes.compute_ciou(boxes, boxes, "xyxy").numpy() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounding_boxes.crop(np.ones((1, 4)), 0, 0, 1, 1, "xywh"), "crop of boxes in format 'xywh'"),
        (lambda: bounding_boxes.compute_ciou(np.ones(4), np.ones(4), "rel_xyxy"), "relative bounding box formats"),
        (
            lambda: bounding_boxes.encode_box_to_deltas(np.ones(4), np.ones(4), "xyxy", "xyxy", "xyxy"),
            "`encoding_format` should be one of",
        ),
        (
            lambda: bounding_boxes.decode_deltas_to_boxes(np.ones(4), np.ones(4), "xyxy", "xyxy", variance=[1, 2]),
            "`variance` must be length 4",
        ),
    ],
)
def test_what_no_box_can_be(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
