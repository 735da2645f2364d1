"""Functions of `ops.image` give Keras' numbers."""

import numpy as np
import pytest

from dptrain import ops

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' tensors
RNG = np.random.default_rng(1)
IMAGES = RNG.normal(size=(2, 5, 7, 3))


def same(keras, ours, theirs, on_jax=1e-6):
    close = 1e-9 if keras.backend.backend() == "torch" else on_jax  # JAX weighs in float32
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
    identity = np.array([1, 0, 0, 0, 1, 0, 0, 0.0])
    transforms = identity + np.concatenate([RNG.normal(size=(2, 6)), np.zeros((2, 2))], 1)
    for transform in (transforms, transforms[0]):
        arguments = (interpolation, fill_mode, 0.25)
        images = IMAGES if transform.ndim == 2 else IMAGES[0]
        theirs = keras.ops.image.affine_transform(images, keras.ops.convert_to_tensor(transform), *arguments)
        same(keras, ops.image.affine_transform(images, transform, *arguments), theirs)


def test_borders_and_colours(keras):
    for name, arguments in (("pad_images", (1, 2, 0, None, None, 11)), ("crop_images", (1, None, None, 2, 3, 4))):
        same(keras, getattr(ops.image, name)(IMAGES, *arguments), getattr(keras.ops.image, name)(IMAGES, *arguments))
    same(keras, ops.image.rgb_to_grayscale(IMAGES), keras.ops.image.rgb_to_grayscale(IMAGES))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_perspective_transform(keras, interpolation):
    starts = np.array([[0, 0], [6, 0], [0, 4], [6, 4.0]])
    ends = starts + RNG.uniform(-0.9, 0.9, (2, 4, 2))
    for images, expected_ends in ((IMAGES, ends), (IMAGES[0], ends[0])):
        points = np.broadcast_to(starts, expected_ends.shape).copy(), expected_ends
        theirs = keras.ops.image.perspective_transform(images, *points, interpolation, 0.25)
        ours = ops.image.perspective_transform(images, *points, interpolation, 0.25)
        same(keras, ours, theirs, 1e-5)  # Keras on JAX makes points float32, and solves with them


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("fill_mode", ["constant", "nearest", "wrap", "mirror", "reflect"])
def test_map_coordinates(keras, order, fill_mode):
    places = RNG.uniform(-4, 9, (3, 4, 5))
    for values in (IMAGES[0], (IMAGES[0] * 50).astype(np.int32)):
        theirs = keras.ops.image.map_coordinates(values, keras.ops.convert_to_tensor(places), order, fill_mode, 2)
        ours = ops.image.map_coordinates(values, places, order, fill_mode, 2)
        assert ours.dtype == values.dtype
        same(keras, ours, theirs)


def test_colour_spaces(keras):
    images = RNG.uniform(0, 1, (2, 5, 7, 3))
    images[0, 0] = images[0, 0, :, :1]  # grey
    images[0, 1] = 0
    for data_format in ("channels_last", "channels_first"):
        inputs = np.moveaxis(images, -1, 1) if data_format == "channels_first" else images
        for name in ("rgb_to_hsv", "hsv_to_rgb"):
            theirs = getattr(keras.ops.image, name)(inputs, data_format)
            same(keras, getattr(ops.image, name)(inputs, data_format), theirs)


def test_filters(keras):
    for size, sigma in ((3, (1.0, 0.5)), (5, (0.7, 2.0))):
        # Keras takes sizes and deviations as tensors of one type.
        theirs = keras.ops.image.gaussian_blur(IMAGES, (size, size), np.array(sigma), data_format="channels_last")
        same(keras, ops.image.gaussian_blur(IMAGES, (size, size), sigma), theirs)
    for images, data_format in ((IMAGES, "channels_last"), (np.moveaxis(IMAGES, -1, 1), "channels_first")):
        same(keras, ops.image.sobel_edges(images, data_format), keras.ops.image.sobel_edges(images, data_format))
    noisy = IMAGES + RNG.normal(size=IMAGES.shape) * 0.1
    arguments = (1.0, 4, 0.9)
    same(keras, ops.image.ssim(IMAGES, noisy, *arguments), keras.ops.image.ssim(IMAGES, noisy, *arguments))
    same(keras, ops.image.ssim(IMAGES[0], noisy[0], *arguments), keras.ops.image.ssim(IMAGES[0], noisy[0], *arguments))


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize(
    ("size", "strides", "dilation"), [(2, None, 1), ((3, 2), (1, 2), 1), (2, 1, 2), ((2, 3, 2), None, 1)]
)
def test_patches(keras, padding, size, strides, dilation):
    images = RNG.normal(size=(2, 4, 5, 7, 3)) if size == (2, 3, 2) else IMAGES
    for data_format in ("channels_last", "channels_first"):
        inputs = np.moveaxis(images, -1, 1) if data_format == "channels_first" else images
        for batch in (inputs, inputs[0]):
            arguments = (batch, size, strides, dilation, padding, data_format)
            same(keras, ops.image.extract_patches(*arguments), keras.ops.image.extract_patches(*arguments))
    if size == (2, 3, 2):
        same(keras, ops.image.extract_patches_3d(images, 2), keras.ops.image.extract_patches_3d(images, 2))


@pytest.mark.parametrize("method", ["linear", "cubic", "lanczos3", "lanczos5"])
@pytest.mark.parametrize("antialias", [True, False])
def test_scale_and_translate(keras, method, antialias):
    for shape, scale, moves, axes in (
        ((2, 8, 4, 3), [1.7, 0.4], [-1.5, 0.75], (1, 2)),
        ((2, 5, 9, 3), [1.3], [0.0], (-2,)),
    ):
        arguments = (shape, np.array(scale), np.array(moves), axes, method, antialias)
        theirs = keras.ops.image.scale_and_translate(IMAGES, *arguments)
        same(keras, ops.image.scale_and_translate(IMAGES, *arguments), theirs)


def test_blocks_columns_and_pools(keras):
    images = RNG.normal(size=(2, 4, 6, 8))
    for data_format in ("channels_last", "channels_first"):
        for name in ("depth_to_space", "space_to_depth"):
            theirs = getattr(keras.ops, name)(images, 2, data_format)
            same(keras, getattr(ops, name)(images, 2, data_format), theirs)
        for inputs, size in ((images, (3, 4)), (images, 5), (images[0], 2), (images[:, None], (1, 3, 2))):
            for name in ("adaptive_average_pool", "adaptive_max_pool"):
                theirs = getattr(keras.ops, name)(inputs, size, data_format)
                same(keras, getattr(ops, name)(inputs, size, data_format), theirs)
    for arguments in (((3, 2),), (2, 1, 1, 2), ((2, 3), (2, 1), (1, 0), (1, 2))):
        columns = ops.unfold(images, *arguments)
        same(keras, columns, keras.ops.unfold(keras.ops.convert_to_tensor(images), *arguments))
        theirs = keras.ops.fold(keras.ops.convert_to_tensor(columns.numpy()), (6, 8), *arguments)
        folded = ops.fold(columns, (6, 8), *arguments)
        if keras.backend.backend() == "jax":  # which leaves out the last columns of an image that no window reaches
            assert not folded[..., theirs.shape[2] :, :].numpy().any()
            folded = folded[..., : theirs.shape[2], : theirs.shape[3]]
        same(keras, folded, theirs)
    same(keras, ops.psnr(images, images + 0.1, 2.0), keras.ops.psnr(images, images + 0.1, 2.0))
