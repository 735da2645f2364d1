"""Images: sizes, borders, colours and places, against sums written out; against Keras in tests/against_keras."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import differentiable
from tests.unit.program.virtual_ranks import run_on_ranks

RNG = np.random.default_rng(1)
IMAGES = RNG.normal(size=(2, 5, 6, 3))
IDENTITY = np.array([1, 0, 0, 0, 1, 0, 0, 0.0])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos3", "lanczos5"])
def test_a_constant_image_stays_one_in_every_size(interpolation):
    for size in ((3, 4), (9, 7)):
        for antialias in (False, True):
            resized = ops.image.resize(np.full((1, 5, 6, 2), 3.0), size, interpolation, antialias)
            np.testing.assert_allclose(resized, np.full((1, *size, 2), 3.0), rtol=1e-12)
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
            actual = ops.image.affine_transform(IMAGES, transform, interpolation, fill_mode)
            np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_each_image_has_its_own_transformation_and_gradient():
    transforms = np.stack([IDENTITY, IDENTITY + np.array([0, 0, 0.25, 0, 0, 0.5, 0, 0])])
    x = differentiable(IMAGES)
    output = ops.image.affine_transform(x, transforms)
    np.testing.assert_array_equal(output.numpy()[0], IMAGES[0])
    a, b = IMAGES[1, 1:3, 2], IMAGES[1, 1:3, 3]
    np.testing.assert_allclose(output.numpy()[1, 1, 2], (a.sum(0) * 0.75 + b.sum(0) * 0.25) / 2, rtol=1e-12)
    (gradient,) = gradients(ops.sum(output), [x])
    np.testing.assert_array_equal(gradient.numpy()[0], np.ones((5, 6, 3)))
    np.testing.assert_allclose(gradient.numpy()[1, 0, 0], np.full(3, 0.375), rtol=1e-12)


POSITIVE = np.abs(IMAGES) + 0.1
CORNERS = np.array([[0, 0], [5, 0], [0, 4], [5, 4.0]])
PLACES = RNG.uniform(-1, 6, (4, 7))
PLACES[0], PLACES[3] = np.clip(PLACES[0], 0, 1), np.clip(PLACES[3], 0, 2)
# What each image becomes on its own, so that rows are divided.
FUNCTIONS = {
    "resize": lambda x: ops.image.resize(x, (3, 8), "bicubic", antialias=True),
    "affine": lambda x: ops.image.affine_transform(x, IDENTITY * 0.9, fill_mode="wrap"),
    "perspective": lambda x: ops.image.perspective_transform(x, CORNERS, CORNERS + PLACES[:, :2] / 9, fill_value=0.5),
    "elastic": lambda x: ops.image.elastic_transform(x, 2.0, 0.8, seed=3),
    "blur": lambda x: ops.image.gaussian_blur(x, (3, 5), (0.8, 1.2)),
    "edges": ops.image.sobel_edges,
    "likeness": lambda x: ops.image.ssim(x, x * x, filter_size=3),
    "patches": lambda x: ops.image.extract_patches(x, (2, 3), (1, 2), padding="same"),
    "moved": lambda x: ops.image.scale_and_translate(x, (x.shape[0], 4, 9, 3), [0.7, 1.4], [0.5, -1], (1, 2), "linear"),
    "colours": ops.image.rgb_to_hsv,
    "and back": lambda x: ops.image.hsv_to_rgb(x * 0.2),
    "gray": ops.image.rgb_to_grayscale,
    "padded": lambda x: ops.image.pad_images(x, 1, 2, 0, target_width=9),
    "cropped": lambda x: ops.image.crop_images(x, 1, None, None, 2, 2, 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_by_differences(name):
    """Along a random direction."""
    x = differentiable(POSITIVE)
    y = FUNCTIONS[name](x)
    pull, step = RNG.normal(size=y.shape), RNG.normal(size=POSITIVE.shape)
    (gradient,) = gradients(y, [x], pull)
    ends = [(FUNCTIONS[name](POSITIVE + h * step).numpy() * pull).sum() for h in (1e-6, -1e-6)]
    np.testing.assert_allclose((gradient.numpy() * step).sum(), (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6)


def test_gradients_in_places_and_deviations():
    """Of perspective, coordinates, sigma, scale and translation, which are tensors too."""
    image = POSITIVE[0]

    def moved_and_scaled(scale, translation):
        return ops.image.scale_and_translate(image, (4, 9, 3), scale, translation, (0, 1), "cubic")

    for function, point in (
        (lambda p: ops.image.perspective_transform(image, CORNERS, p), CORNERS + PLACES[:, :2] / 9),
        (lambda p: ops.image.map_coordinates(image, p, 1), RNG.uniform(0.1, 1.9, (3, 6)) * [[2], [2], [1]]),
        (lambda p: ops.image.gaussian_blur(POSITIVE, (3, 3), p), np.array([0.8, 1.2])),
        (lambda p: ops.image.scale_and_translate(image, (4, 9, 3), p, [0.5, 1], (0, 1), "cubic"), np.array([0.7, 1.4])),
        (
            lambda p: ops.image.scale_and_translate(image, (4, 9, 3), [0.7, 1], p, (0, 1), "cubic"),
            np.array([0.3, -1.2]),
        ),
    ):
        x = differentiable(point)
        y = function(x)
        pull, step = RNG.normal(size=y.shape), RNG.normal(size=point.shape)
        (gradient,) = gradients(y, [x], pull)
        ends = [(function(point + h * step).numpy() * pull).sum() for h in (1e-7, -1e-7)]
        np.testing.assert_allclose((gradient.numpy() * step).sum(), (ends[0] - ends[1]) / 2e-7, rtol=1e-4)


@pytest.mark.parametrize("shards", [[2], [1, 0, 1]], ids=str)
def test_ranks_compute_what_one_computes(shards):
    program = trace(
        lambda x: {name: function(x) for name, function in FUNCTIONS.items()},
        {"x": ((Dim.rows(2), *POSITIVE.shape[1:]), "float64")},
    )
    single_rank, _ = evaluate(program, {"x": POSITIVE})
    for name, function in FUNCTIONS.items():
        if name != "elastic":  # drawn in another type than a trace of float64 rows
            np.testing.assert_allclose(
                single_rank[name], function(POSITIVE).numpy(), rtol=1e-12, atol=1e-12, err_msg=name
            )
    per_rank, _ = run_on_ranks(place(program), {"x": POSITIVE}, shards, {"x": 0})
    for name, expected in single_rank.items():
        np.testing.assert_array_equal(
            np.concatenate([outputs[name] for outputs, _ in per_rank]), expected, err_msg=name
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_precision_stays_near(name, dtype):
    """Weights and places are computed in single precision."""
    x = ops.cast(POSITIVE, dtype)
    output = FUNCTIONS[name](x)
    assert output.dtype == x.dtype
    if name in ("likeness", "elastic"):  # differences of squares, and other draws
        return
    exact = FUNCTIONS[name](ops.cast(x, "float64")).numpy()
    close = 1e-2 if dtype == "float16" else 6e-2
    np.testing.assert_allclose(ops.cast(output, "float64"), exact, rtol=close, atol=close * np.abs(exact).max())


def test_what_is_moved_and_blurred_by_hand():
    square = np.zeros((1, 5, 5, 1))
    square[0, 2, 2] = 1
    bell = np.exp(-0.5 * (np.array([-1, 0, 1]) / 0.7) ** 2)
    bell /= bell.sum()
    blurred = ops.image.gaussian_blur(square, (3, 3), (0.7, 0.7)).numpy()[0, 1:4, 1:4, 0]
    np.testing.assert_allclose(blurred, np.outer(bell, bell), rtol=1e-6)
    moved = CORNERS + 1
    output = ops.image.perspective_transform(IMAGES, CORNERS, moved).numpy()
    np.testing.assert_allclose(output[:, 1:, 1:], IMAGES[:, :-1, :-1], atol=1e-9)
    red, grey = np.array([[[1.0, 0, 0]]]), np.array([[[0.4, 0.4, 0.4]]])
    np.testing.assert_allclose(ops.image.rgb_to_hsv(red)[0, 0], [0, 1, 1])
    np.testing.assert_allclose(ops.image.rgb_to_hsv(grey)[0, 0], [0, 0, 0.4])
    np.testing.assert_allclose(ops.image.hsv_to_rgb(ops.image.rgb_to_hsv(POSITIVE)), POSITIVE, rtol=1e-9)
    assert ops.image.map_coordinates(np.array([1, 3]), np.array([[0.4]]), 1).numpy().tolist() == [2]
    np.testing.assert_allclose(ops.image.ssim(POSITIVE, POSITIVE, filter_size=3), [1, 1])
    waves = ops.image.elastic_transform(np.full((1, 6, 6, 1), 2.0), 9.0, 1.0, seed=1)
    np.testing.assert_allclose(waves, 2, rtol=1e-6)


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
        (lambda: ops.image.resize(IMAGES, (2, 2), data_format="NHWC"), "Received: data_format=NHWC"),
        (lambda: ops.image.affine_transform(IMAGES, IDENTITY, "bicubic"), "Invalid value for argument `interpolation`"),
        (
            lambda: ops.image.affine_transform(IMAGES, IDENTITY, fill_mode="edge"),
            "Invalid value for argument `fill_mode",
        ),
        (lambda: ops.image.affine_transform(IMAGES, IDENTITY[:6]), "Invalid transform rank"),
        (lambda: ops.image.rgb_to_grayscale(IMAGES[..., :2]), "Invalid channel size"),
        (lambda: ops.image.pad_images(IMAGES, 1, 1, 1), "Must specify exactly two of left_padding, right_padding"),
        (lambda: ops.image.pad_images(IMAGES, 1, 1, -1, 0), "bottom_padding must be >= 0. Received: bottom_padding=-1"),
        (lambda: ops.image.perspective_transform(IMAGES, CORNERS[:3], CORNERS), "Invalid start_points shape"),
        (lambda: ops.image.perspective_transform(IMAGES, CORNERS, CORNERS[None]), "must have the same shape"),
        (lambda: ops.image.map_coordinates(IMAGES, PLACES, 2), "Invalid value for argument `order`"),
        (lambda: ops.image.map_coordinates(IMAGES, PLACES[0], 1), "expected at least rank 2"),
        (lambda: ops.image.map_coordinates(IMAGES, PLACES[:2], 1), "First dim of `coordinates`"),
        (lambda: ops.image.gaussian_blur(IMAGES, (3, 0)), "expected two integers of at least 1"),
        (lambda: ops.image.sobel_edges(IMAGES[0]), "expected .rows, height, width, channels."),
        (lambda: ops.image.rgb_to_hsv(IMAGES.astype(int)), "expected float dtype"),
        (lambda: ops.image.hsv_to_rgb(IMAGES[..., :2]), "Invalid channel size: expected 3"),
        (lambda: ops.image.extract_patches(IMAGES, (2,)), "tuple of length 2 or 3"),
        (lambda: ops.image.extract_patches(IMAGES, 7), "windows of 7 pixels do not fit into images of 5"),
        (lambda: ops.image.extract_patches(IMAGES, 2, 0, padding="full"), "padding = 'full'"),
        (lambda: ops.image.extract_patches(IMAGES, 2, (1, 0)), "Invalid `strides` argument"),
        (lambda: ops.image.extract_patches(IMAGES[0, 0], 2), "expected 3 or 4 axes"),
        (
            lambda: ops.image.scale_and_translate(IMAGES, (2, 5, 6, 3), [1], [0], (1,), "area"),
            "Invalid value for argument `method`",
        ),
        (lambda: ops.image.scale_and_translate(IMAGES, (2, 5, 7, 3), [1], [0], (1,), "linear"), "equal lengths except"),
        (lambda: ops.image.crop_images(IMAGES, 3, 0, 3, 0), "target_height must be >= 0. Received: target_height=-1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos5"])
def test_whole_numbers_are_rounded_and_stay_whole(interpolation, dtype):
    images = np.arange(48).reshape(1, 4, 4, 3) * 5
    resized = ops.image.resize(images.astype(dtype), (3, 5), interpolation)
    assert resized.dtype.name == dtype
    exact = ops.image.resize(images.astype(np.float32), (3, 5), interpolation).numpy()
    np.testing.assert_array_equal(resized.numpy(), np.rint(exact).clip(0, 255 if dtype == "uint8" else None))
