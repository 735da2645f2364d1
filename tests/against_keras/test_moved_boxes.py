"""Bounding boxes and segmentation masks beside images in layers of images: they move with their pixels."""

import keras
import numpy as np
import pytest

import dptrain as dp

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras' tensors
    pytest.mark.filterwarnings("ignore:Tensor.T is deprecated:UserWarning"),
]

BOXES = {
    "boxes": np.array([[[2, 1, 6, 5], [0, 4, 3, 9]], [[5, 5, 9, 8], [1, 1, 2, 3]]], np.float32),
    "labels": np.array([[1, 2], [3, 4]]),
}
TRANSFORMED = {
    "flip": (
        lambda k, **o: k.layers.RandomFlip("horizontal", **o),
        {"flips": np.array([True, False]).reshape(2, 1, 1, 1)},
    ),
    "vertical flip": (
        lambda k, **o: k.layers.RandomFlip("vertical", **o),
        {"flips": np.array([True, True]).reshape(2, 1, 1, 1)},
    ),
    "translation": (
        lambda k, **o: k.layers.RandomTranslation(0.5, 0.5, **o),
        {"translations": np.array([[2.0, -3.0], [-4.0, 1.0]], np.float32)},
    ),
    "zoom": (
        lambda k, **o: k.layers.RandomZoom(0.5, 0.5, **o),
        {"height_zoom": np.array([[0.9], [0.7]], np.float32), "width_zoom": np.array([[0.8], [0.6]], np.float32)},
    ),
}


@pytest.mark.parametrize("case", TRANSFORMED)
@pytest.mark.parametrize("form", ["xyxy", "rel_xyxy", "xywh", "center_yxhw"])
def test_boxes_move_as_in_keras(case, form):
    build, transformation = TRANSFORMED[case]
    results = []
    for k in (dp, keras):
        layer = build(k, bounding_box_format=form)
        boxes = k.utils.bounding_boxes.convert_format(BOXES["boxes"], "xyxy", form, height=10, width=12)
        tensors = {name: k.ops.convert_to_tensor(value) for name, value in transformation.items()}
        moved = layer.transform_bounding_boxes(
            {"boxes": boxes, "labels": BOXES["labels"]}, {**tensors, "input_shape": (2, 10, 12, 3)}, training=True
        )
        results.append([np.asarray(moved[name]) for name in ("boxes", "labels")])
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-4)
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("options", [{}, {"pad_to_aspect_ratio": True}, {"crop_to_aspect_ratio": True}], ids=str)
@pytest.mark.parametrize("size", [(20, 8), (5, 24), (10, 12)], ids=str)  # of 5:30, JAX makes 1.9999 rows, not 2
def test_boxes_of_resized_and_cropped_images(options, size):
    for build in (
        lambda k: k.layers.Resizing(*size, bounding_box_format="xyxy", **options),
        lambda k: k.layers.CenterCrop(*size, bounding_box_format="xyxy"),
    ):
        images = np.ones((2, 10, 12, 3), np.float32)
        results = []
        for k in (dp, keras):
            copied = {name: values.copy() for name, values in BOXES.items()}
            moved = build(k)({"images": images, "bounding_boxes": copied})["bounding_boxes"]
            results.append([np.asarray(moved[name]) for name in ("boxes", "labels")])
        for ours, theirs in zip(*results, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


MOVING = {
    "flip": lambda **o: dp.layers.RandomFlip(seed=3, **o),
    "translation": lambda **o: dp.layers.RandomTranslation(0.3, 0.3, fill_mode="constant", seed=3, **o),
    "rotation": lambda **o: dp.layers.RandomRotation(0.05, fill_mode="constant", seed=3, **o),
    "zoom": lambda **o: dp.layers.RandomZoom(0.3, 0.3, fill_mode="constant", seed=3, **o),
    "shear": lambda **o: dp.layers.RandomShear(0.3, 0.3, fill_mode="constant", seed=3, **o),
    "perspective": lambda **o: dp.layers.RandomPerspective(scale=0.2, seed=3, **o),
    "crop": lambda **o: dp.layers.RandomCrop(45, 50, seed=3, **o),
    "narrow crop": lambda **o: dp.layers.RandomCrop(70, 50, seed=3, **o),
    "center crop": lambda **o: dp.layers.CenterCrop(40, 44, **o),
    "resizing": lambda **o: dp.layers.Resizing(31, 77, **o),
}


@pytest.mark.parametrize("case", MOVING)
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_boxes_and_masks_stay_around_their_pixels(case, data_format):
    """The box around a rectangle, and its mask, are where the rectangle has moved."""
    rows, height, width = 6, 60, 64
    masks = np.zeros((rows, height, width, 1), np.float32)
    masks[:, 25:36, 20:41] = 1
    boxes = {"boxes": np.tile([[[20.0, 25.0, 41.0, 36.0]]], (rows, 1, 1)), "labels": np.ones((rows, 1), np.int32)}
    if data_format == "channels_first":
        masks = masks.transpose(0, 3, 1, 2)
    layer = MOVING[case](data_format=data_format, bounding_box_format="xyxy")
    inputs = {"images": masks, "bounding_boxes": boxes, "segmentation_masks": masks.astype(np.int32)}
    outputs = layer(inputs, training=True)
    images, moved_masks = (np.asarray(outputs[name]) for name in ("images", "segmentation_masks"))
    assert moved_masks.dtype == np.int32
    assert set(np.unique(moved_masks)) == {0, 1}
    for row in range(rows):
        plane, mask = (
            array[row, 0] if data_format == "channels_first" else array[row, ..., 0] for array in (images, moved_masks)
        )
        down, across = np.nonzero(mask)
        expected = [across.min(), down.min(), across.max() + 1, down.max() + 1]
        np.testing.assert_allclose(np.asarray(outputs["bounding_boxes"]["boxes"])[row, 0], expected, atol=2.0)
        assert np.abs((plane > 0.5) != mask).mean() < 0.03
    np.testing.assert_array_equal(outputs["bounding_boxes"]["labels"], 1)
    single = {
        "images": masks[0],
        "bounding_boxes": {name: values[0] for name, values in boxes.items()},
        "segmentation_masks": masks[0],
    }
    assert np.shape(layer(single, training=True)["bounding_boxes"]["boxes"]) == (1, 4)


@pytest.mark.parametrize(
    "chosen", [["shear"], ["translation"], ["rotation"], ["rotation", "contrast", "shear"]], ids=str
)
def test_boxes_and_masks_follow_what_is_drawn(chosen):
    names = ["random_" + name for name in chosen]
    layer = dp.layers.RandAugment((0, 1), len(names), 0.1, bounding_box_format="xyxy")
    masks = np.zeros((6, 60, 64, 1), np.float32)
    masks[:, 25:36, 20:41] = 1
    boxes = {"boxes": np.tile([[[20.0, 25.0, 41.0, 36.0]]], (6, 1, 1)), "labels": np.ones((6, 1), np.int32)}
    drawn = layer.get_random_transformation(masks)
    drawn["layer_idxes"] = np.array([list(drawn["transforms"]).index(name) for name in names])
    images = np.asarray(layer.transform_images(masks, drawn))
    moved = np.asarray(layer.transform_segmentation_masks(masks.astype(np.int32), drawn))[..., 0]
    moved_boxes = layer.transform_bounding_boxes(boxes, drawn)
    assert moved.dtype == np.int32
    assert (moved != masks[..., 0]).any()
    single = layer.transform_segmentation_masks(masks[0].astype(np.int32), {**drawn, "transforms": first_of(drawn)})
    np.testing.assert_array_equal(np.asarray(single)[..., 0], moved[0])
    for row in range(6):
        down, across = np.nonzero(moved[row])
        expected = [across.min(), down.min(), across.max() + 1, down.max() + 1]
        atol = 1.5 if len(names) == 1 else 6.0  # a box around a moved box is wider than one around its pixels
        np.testing.assert_allclose(np.asarray(moved_boxes["boxes"])[row, 0], expected, atol=atol)
        plane = images[row, ..., 0]
        assert ((plane > (plane.min() + plane.max()) / 2) != moved[row]).mean() < 0.03


def first_of(drawn):
    """Return the transformations of the first image."""
    return {
        name: values and {key: np.asarray(value)[:1] for key, value in values.items()}
        for name, values in drawn["transforms"].items()
    }


def test_boxes_that_leave_the_image_lose_their_labels():
    layer = dp.layers.RandomTranslation(0.0, (0.5, 0.5), bounding_box_format="xywh")
    boxes = {"boxes": [[[0, 0, 2, 2], [6, 0, 3, 3]]], "labels": [[7, 8]]}
    moved = layer({"images": np.ones((1, 10, 10, 3)), "bounding_boxes": boxes}, training=True)["bounding_boxes"]
    np.testing.assert_allclose(moved["boxes"], [[[5, 0, 2, 2], [10, 0, 0, 3]]], atol=1e-5)
    np.testing.assert_array_equal(moved["labels"], [[7, -1]])


@pytest.mark.parametrize("name", ["RandomContrast", "RandomErasing", "AutoContrast", "RandomInvert"])
def test_boxes_stay_where_pixels_stay(name):
    layer = getattr(dp.layers, name)(
        **({"factor": 0.5} if name == "RandomContrast" else {}), bounding_box_format="xyxy"
    )
    masks = np.ones((2, 10, 12, 1), np.int32)
    outputs = layer(
        {"images": np.ones((2, 10, 12, 3)), "bounding_boxes": BOXES, "segmentation_masks": masks}, training=True
    )
    np.testing.assert_array_equal(outputs["bounding_boxes"]["boxes"], BOXES["boxes"])
    np.testing.assert_array_equal(outputs["segmentation_masks"], masks)
    assert type(layer).from_config(layer.get_config()).bounding_box_format == "xyxy"


def test_what_images_come_with_is_checked():
    data = {"images": np.ones((2, 10, 12, 3)), "bounding_boxes": BOXES}
    for k in (dp, keras):
        with pytest.raises(ValueError, match="you didn't specify a bounding box format"):
            k.layers.RandomFlip()(dict(data))
    for layer in (dp.layers.CutMix(), dp.layers.RandomElasticTransform()):
        with pytest.raises(ValueError, match="not supported: bounding_boxes in the inputs"):
            layer(data)
    with pytest.raises(ValueError, match="expected a dictionary with 'boxes' and 'labels'"):
        dp.layers.RandomFlip(bounding_box_format="xyxy")({**data, "bounding_boxes": BOXES["boxes"]})


def test_images_that_are_mixed_have_the_boxes_of_both():
    layer = dp.layers.MixUp(bounding_box_format="xyxy", seed=1)
    images = np.random.default_rng(0).uniform(size=(2, 10, 12, 3)).astype(np.float32)
    order = {"mix_weight": np.array([0.25, 0.5], np.float32), "permutation_order": np.array([1, 0])}
    moved = layer.transform_bounding_boxes(BOXES, {**order, "input_shape": images.shape})
    np.testing.assert_array_equal(moved["boxes"], np.concatenate([BOXES["boxes"], BOXES["boxes"][::-1]], 1))
    np.testing.assert_array_equal(moved["labels"], [[1, 2, 3, 4], [3, 4, 1, 2]])
    masks = (images[..., :1] > 0.5).astype(np.int32)
    weights = order["mix_weight"][:, None, None, None]
    expected = weights * masks + (1 - weights) * masks[::-1]
    np.testing.assert_allclose(layer.transform_segmentation_masks(masks, order), expected, rtol=1e-6)
    data = {"images": images, "labels": np.eye(2), "bounding_boxes": BOXES, "segmentation_masks": masks}
    outputs = layer(data, training=True)
    assert np.shape(outputs["bounding_boxes"]["boxes"]) == (2, 4, 4)
    assert np.shape(outputs["segmentation_masks"]) == masks.shape
    unmixed = layer(data, training=False)
    np.testing.assert_array_equal(unmixed["bounding_boxes"]["boxes"], BOXES["boxes"])
    np.testing.assert_array_equal(unmixed["segmentation_masks"], masks)
    single = {"images": images[0], "bounding_boxes": {name: values[0] for name, values in BOXES.items()}}
    np.testing.assert_array_equal(layer(single, training=True)["bounding_boxes"]["boxes"], BOXES["boxes"][0])


@pytest.mark.parametrize("name", ["CutMix", "RandomElasticTransform"])
def test_masks_follow_where_boxes_cannot(name):
    layer = getattr(dp.layers, name)(seed=2)
    images = np.random.default_rng(0).choice([0.0, 255.0], (4, 20, 24, 1)).astype(np.float32)
    outputs = layer({"images": images, "segmentation_masks": (images > 100).astype(np.int32)}, training=True)
    moved = np.asarray(outputs["segmentation_masks"])
    assert moved.dtype == np.int32
    assert (moved != (images > 100)).any()
    if name == "CutMix":
        np.testing.assert_array_equal(moved, np.asarray(outputs["images"]) > 100)
    assert set(np.unique(moved)) == {0, 1}


def test_boxes_stay_where_an_image_is_mixed_with_its_changes():
    layer = dp.layers.AugMix(bounding_box_format="xyxy", seed=1)
    masks = np.ones((2, 10, 12, 1), np.int32)
    outputs = layer({"images": np.ones((2, 10, 12, 3)), "bounding_boxes": BOXES, "segmentation_masks": masks})
    np.testing.assert_array_equal(outputs["bounding_boxes"]["boxes"], BOXES["boxes"])
    np.testing.assert_array_equal(outputs["segmentation_masks"], masks)
