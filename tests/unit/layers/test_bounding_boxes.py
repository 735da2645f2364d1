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
    found = bounding_boxes.convert_format(np.array([[FORMS[source]]]), source, target, 100, 200)
    np.testing.assert_allclose(found.numpy(), [[FORMS[target]]], rtol=1e-6)


def test_overlaps():
    first, second = np.array([[0, 0, 2, 2], [-1, -1, -1, -1]]), np.array([[1, 0, 3, 2], [0, 0, 2, 2], [5, 5, 6, 6]])
    found = bounding_boxes.compute_iou(first, second, "xyxy").numpy()
    np.testing.assert_allclose(found, [[1 / 3, 1, 0], [0, 0, 0]], atol=1e-6)
    masked = bounding_boxes.compute_iou(first, second[None], "xyxy", use_masking=True).numpy()
    np.testing.assert_allclose(masked, [[[1 / 3, 1, 0], [-1, -1, -1]]], atol=1e-6)


def test_boxes_are_cut_to_the_image():
    given = {"boxes": np.array([[-5, 10, 20, 110], [300, 0, 310, 5]]), "labels": np.array([3, 4])}
    found = bounding_boxes.clip_to_image_size(given, 100, 200, "xyxy")
    np.testing.assert_allclose(found["boxes"].numpy(), [[0, 10, 20, 100], [0, 0, 0, 0]])
    assert found["labels"].numpy().tolist() == [3, -1]


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
