"""Boxes beside Keras'."""

import numpy as np
import pytest

from dptrain.utils import bounding_boxes

RNG = np.random.default_rng(0)
CORNERS = np.sort(RNG.uniform(0, 90, (2, 5, 2, 2)), axis=-2).reshape(2, 5, 4).astype(np.float32)
OTHERS = np.sort(RNG.uniform(0, 90, (2, 5, 2, 2)), axis=-2).reshape(2, 5, 4).astype(np.float32)
OF_IMAGES = {
    "angle": np.float32([20, -70]),
    "translate_x": np.float32([0.1, -0.2]),
    "translate_y": np.float32([0.3, 0]),
    "scale": np.float32([1.5, 0.8]),
    "shear_x": np.float32([10, 0]),
    "shear_y": np.float32([0, -15]),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("crop", {"boxes": CORNERS, "top": 10, "left": 20, "height": 40, "width": 30}),
        ("pad", {"boxes": CORNERS, "top": 10, "left": 20}),
        ("affine_transform", {"boxes": CORNERS, **OF_IMAGES, "height": 90, "width": 120}),
        (
            "affine_transform",
            {"boxes": CORNERS, **OF_IMAGES, "height": 90, "width": 120, "center_x": 0.0, "center_y": 1.0},
        ),
        ("compute_ciou", {"boxes1": CORNERS, "boxes2": OTHERS, "bounding_box_format": "xyxy"}),
        ("compute_ciou", {"boxes1": CORNERS, "boxes2": CORNERS, "bounding_box_format": "center_xywh"}),
        (
            "encode_box_to_deltas",
            {"anchors": CORNERS[0], "boxes": OTHERS, "anchor_format": "xyxy", "box_format": "xyxy"},
        ),
        (
            "decode_deltas_to_boxes",
            {"anchors": CORNERS[0], "boxes_delta": OTHERS / 90, "anchor_format": "xyxy", "box_format": "yxyx"},
        ),
        (
            "encode_box_to_deltas",
            {
                "anchors": CORNERS[0] / 90,
                "boxes": OTHERS,
                "anchor_format": "rel_yxyx",
                "box_format": "xywh",
                "encoding_format": "center_xywh",
                "variance": [0.1, 0.1, 0.2, 0.2],
                "image_shape": (90, 120, 3),
            },
        ),
        (
            "decode_deltas_to_boxes",
            {
                "anchors": CORNERS[0],
                "boxes_delta": OTHERS / 90,
                "anchor_format": "xyxy",
                "box_format": "rel_xyxy",
                "encoded_format": "center_xywh",
                "variance": [0.1, 0.1, 0.2, 0.2],
                "image_shape": (90, 120, 3),
            },
        ),
    ],
)
def test_functions(keras, name, options):
    expected = keras.ops.convert_to_numpy(getattr(keras.utils.bounding_boxes, name)(**options))
    outputs = getattr(bounding_boxes, name)(**options)
    np.testing.assert_allclose(outputs, expected, rtol=2e-5, atol=2e-5)
