"""Images: sizes, borders, colours and places, against sums written out; against Keras in tests/against_keras."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.gradient import gradients
from dptrain.program.tensor import differentiable

RNG = np.random.default_rng(1)
IMAGES = RNG.normal(size=(2, 5, 6, 3))
IDENTITY = np.array([1, 0, 0, 0, 1, 0, 0, 0.0])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos3", "lanczos5"])
def test_a_constant_image_stays_one_in_every_size(interpolation):
    for size in ((3, 4), (9, 7)):
        for antialias in (False, True):
            found = ops.image.resize(np.full((1, 5, 6, 2), 3.0), size, interpolation, antialias)
            np.testing.assert_allclose(found, np.full((1, *size, 2), 3.0), rtol=1e-12)
    np.testing.assert_array_equal(ops.image.resize(IMAGES, (5, 6), interpolation), IMAGES)


def test_formats_and_single_images():
    for function in (
        lambda x, **o: ops.image.resize(x, (7, 3), **o),
        lambda x, **o: ops.image.affine_transform(x, IDENTITY * 0.9, fill_mode="reflect", **o),
        lambda x, **o: ops.image.pad_images(x, 1, 2, 0, target_width=9, **o),
        lambda x, **o: ops.image.crop_images(x, 1, None, None, 2, 2, 3, **o),
        lambda x, **o: ops.image.rgb_to_grayscale(x, **o),
    ):
        expected = function(IMAGES).numpy()
        first = function(np.moveaxis(IMAGES, -1, 1), data_format="channels_first").numpy()
        np.testing.assert_allclose(np.moveaxis(first, 1, -1), expected, rtol=1e-12)
        np.testing.assert_allclose(function(IMAGES[0]), expected[0], rtol=1e-12)


def test_pads_and_crops():
    padded = ops.image.pad_images(IMAGES, 1, 2, 0, target_width=9).numpy()
    np.testing.assert_array_equal(padded, np.pad(IMAGES, ((0, 0), (1, 0), (2, 1), (0, 0))))
    cropped = ops.image.crop_images(IMAGES, 1, None, None, 2, 2, 3).numpy()
    np.testing.assert_array_equal(cropped, IMAGES[:, 1:3, 1:4])


@pytest.mark.parametrize("fill_mode", ["constant", "nearest", "wrap", "mirror", "reflect"])
def test_whole_pixels_are_moved(fill_mode):
    """Against NumPy's padding of the same name, but for constants and the last pixel."""
    names = {"nearest": "edge", "mirror": "reflect", "reflect": "symmetric"}
    around = np.pad(IMAGES, ((0, 0), (4, 4), (5, 5), (0, 0)), names.get(fill_mode, fill_mode))
    for right, down in ((0, 0), (2, -1), (-5, 4)):
        transform = IDENTITY + np.array([0, 0, right, 0, 0, down, 0, 0])
        expected = around[:, 4 + down : 9 + down, 5 + right : 11 + right]
        for interpolation in ("nearest", "bilinear"):
            found = ops.image.affine_transform(IMAGES, transform, interpolation, fill_mode)
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_each_image_has_its_own_transformation_and_gradient():
    transforms = np.stack([IDENTITY, IDENTITY + np.array([0, 0, 0.25, 0, 0, 0.5, 0, 0])])
    x = differentiable(IMAGES)
    found = ops.image.affine_transform(x, transforms)
    np.testing.assert_array_equal(found.numpy()[0], IMAGES[0])
    a, b = IMAGES[1, 1:3, 2], IMAGES[1, 1:3, 3]
    np.testing.assert_allclose(found.numpy()[1, 1, 2], (a.sum(0) * 0.75 + b.sum(0) * 0.25) / 2, rtol=1e-12)
    (gradient,) = gradients(ops.sum(found), [x])
    np.testing.assert_array_equal(gradient.numpy()[0], np.ones((5, 6, 3)))
    np.testing.assert_allclose(gradient.numpy()[1, 0, 0], np.full(3, 0.375), rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.image.resize(IMAGES, (2,)), "`size` to be a tuple of 2 integers"),
        (lambda: ops.image.resize(IMAGES, (2, 0)), "must have positive height and width"),
        (lambda: ops.image.resize(IMAGES, (2, 2), "area"), "Invalid value for argument `interpolation`"),
        (lambda: ops.image.resize(IMAGES, (2, 2), fill_mode="wrap"), "Only `'constant'` is supported"),
        (lambda: ops.image.resize(IMAGES[0, 0], (2, 2)), "Invalid images rank"),
        (
            lambda: ops.image.resize(IMAGES, (2, 2), crop_to_aspect_ratio=True, pad_to_aspect_ratio=True),
            "Only one of `pad_to_aspect_ratio`",
        ),
        (lambda: ops.image.resize(IMAGES, (2, 2), data_format="NHWC"), "data_format='NHWC': expected"),
        (lambda: ops.image.affine_transform(IMAGES, IDENTITY, "bicubic"), "Invalid value for argument `interpolation`"),
        (
            lambda: ops.image.affine_transform(IMAGES, IDENTITY, fill_mode="edge"),
            "Invalid value for argument `fill_mode",
        ),
        (lambda: ops.image.affine_transform(IMAGES, IDENTITY[:6]), "Invalid transform rank"),
        (lambda: ops.image.rgb_to_grayscale(IMAGES[..., :2]), "Invalid channel size"),
        (lambda: ops.image.pad_images(IMAGES, 1, 1, 1), "Must specify exactly two of left_padding, right_padding"),
        (lambda: ops.image.pad_images(IMAGES, 1, 1, -1, 0), "bottom_padding must be >= 0. Received: bottom_padding=-1"),
        (lambda: ops.image.crop_images(IMAGES, 3, 0, 3, 0), "target_height must be >= 0. Received: target_height=-1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
