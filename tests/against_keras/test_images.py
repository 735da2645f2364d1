"""Functions of `ops.image` give Keras' numbers."""

import numpy as np
import pytest

from dptrain import ops

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' tensors
RNG = np.random.default_rng(1)
IMAGES = RNG.normal(size=(2, 5, 7, 3))


def same(keras, ours, theirs):
    close = 1e-9 if keras.backend.backend() == "torch" else 1e-6  # JAX weighs in float32
    np.testing.assert_allclose(ours.numpy(), keras.ops.convert_to_numpy(theirs), rtol=close, atol=close)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos3", "lanczos5"])
@pytest.mark.parametrize("options", [{}, {"antialias": True}, {"crop_to_aspect_ratio": True}, {"data_format": "first"}])
def test_resize(keras, interpolation, options):
    on_torch = keras.backend.backend() == "torch"
    if on_torch and interpolation not in ("nearest", "bilinear"):
        pytest.skip("Keras on PyTorch has no Lanczos, and another cubic kernel")
    images, options = IMAGES, dict(options)
    if "data_format" in options:
        images, options["data_format"] = np.moveaxis(IMAGES, -1, 1), "channels_first"
    for size in ((3, 4), (8, 11), (5, 14)):
        ours = ops.image.resize(images, size, interpolation, **options)
        same(keras, ours, keras.ops.image.resize(images, size, interpolation, **options))


def test_resize_with_padding(keras):
    for images, size in ((IMAGES, (8, 8)), (np.moveaxis(IMAGES, 1, 2), (4, 6))):
        options = {"pad_to_aspect_ratio": True, "fill_value": 0.5}
        ours = ops.image.resize(images, size, **options)
        same(keras, ours, keras.ops.image.resize(images, size, **options))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("fill_mode", ["constant", "nearest", "wrap", "mirror", "reflect"])
def test_affine_transform(keras, interpolation, fill_mode):
    one = np.array([1, 0, 0, 0, 1, 0, 0, 0.0])
    transforms = one + np.concatenate([RNG.normal(size=(2, 6)), np.zeros((2, 2))], 1)
    for transform in (transforms, transforms[0]):
        arguments = (interpolation, fill_mode, 0.25)
        images = IMAGES if transform.ndim == 2 else IMAGES[0]
        theirs = keras.ops.image.affine_transform(images, keras.ops.convert_to_tensor(transform), *arguments)
        same(keras, ops.image.affine_transform(images, transform, *arguments), theirs)


def test_borders_and_colours(keras):
    for name, given in (("pad_images", (1, 2, 0, None, None, 11)), ("crop_images", (1, None, None, 2, 3, 4))):
        same(keras, getattr(ops.image, name)(IMAGES, *given), getattr(keras.ops.image, name)(IMAGES, *given))
    same(keras, ops.image.rgb_to_grayscale(IMAGES), keras.ops.image.rgb_to_grayscale(IMAGES))
