"""What is drawn for pictures, and what layers of pictures and categories refuse."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError
from dptrain.layers import Input

IMAGES = np.random.default_rng(2).uniform(0, 255, (64, 4, 5, 1)).astype(np.float32)


def test_each_image_is_drawn_for_itself_and_in_each_call_anew():
    flip = layers.RandomFlip("horizontal", seed=1)
    first, second = (flip(IMAGES, training=True).numpy() for _ in range(2))
    flipped = [np.array_equal(one, image[:, ::-1]) for one, image in zip(first, IMAGES, strict=True)]
    kept = [np.array_equal(one, image) for one, image in zip(first, IMAGES, strict=True)]
    assert [one != other for one, other in zip(flipped, kept, strict=True)] == [True] * 64
    assert 16 < sum(flipped) < 48
    assert not np.array_equal(first, second)
    flip.generator.count.assign(0)
    np.testing.assert_array_equal(flip(IMAGES, training=True), first)
    np.testing.assert_array_equal(flip(IMAGES, training=False), IMAGES)


@pytest.mark.parametrize(
    ("make", "least", "most"),
    [
        (lambda: layers.RandomBrightness((0.1, 0.2), seed=1), 0.1 * 255, 0.2 * 255),
        (lambda: layers.RandomBrightness(0.1, seed=1), -25.5, 25.5),
    ],
)
def test_factors_are_ranges(make, least, most):
    gray = np.full((200, 1, 1, 1), 127.0, np.float32)
    moved = (make()(gray, training=True).numpy() - gray).ravel()
    assert least <= moved.min() < least + 3
    assert most - 3 < moved.max() <= most


def test_crops():
    crop = layers.RandomCrop(2, 2, seed=1)
    found = {tuple(crop(IMAGES[:1], training=True).numpy().ravel()) for _ in range(60)}
    parts = {tuple(IMAGES[0, h : h + 2, w : w + 2].ravel()) for h in range(3) for w in range(4)}
    assert found == parts
    assert crop(IMAGES, training=False).shape == (64, 2, 2, 1)


def test_single_images_and_dictionaries():
    for make in (
        lambda: layers.RandomTranslation(0.2, 0.2, seed=1),
        lambda: layers.RandomRotation(0.2, seed=1),
        lambda: layers.RandomZoom(0.2, seed=1),
        lambda: layers.RandomContrast(0.2, seed=1),
        lambda: layers.RandomCrop(2, 2, seed=1),
        lambda: layers.Resizing(2, 3),
    ):
        layer, found = make(), []
        for given in (IMAGES[0], IMAGES[:1], {"images": IMAGES[:1], "labels": np.arange(1)}):
            for count in [one for one in layer.variables if one.name == "seed_generator"]:
                count.assign(0)
            found.append(layer(given, training=True))
        np.testing.assert_allclose(found[0], found[1].numpy()[0], rtol=1e-6)
        np.testing.assert_array_equal(found[2]["images"], found[1])
        assert found[2]["labels"].numpy() == 0


def test_in_a_model_that_trains_and_is_saved(tmp_path):
    model = dp.Sequential(
        [
            Input((4, 5, 1)),
            *(layers.RandomFlip(), layers.RandomTranslation(0.2, 0.2), layers.RandomRotation(0.1)),
            *(layers.RandomZoom(0.2), layers.RandomContrast(0.2), layers.RandomBrightness(0.1)),
            *(layers.RandomCrop(3, 4), layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(1)),
        ]
    )
    model.compile("adam", "mse")
    model.fit(IMAGES, IMAGES.mean((1, 2, 3)) / 255, epochs=2, verbose=0)
    model.save(tmp_path / "m.keras")
    again = dp.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(again.predict(IMAGES, verbose=0), model.predict(IMAGES, verbose=0))


def test_bins_of_numbers():
    layer = layers.Discretization([0.0, 1.0])
    assert layer(np.array([[-1.0, 0.0, 0.5, 1.0]])).numpy().tolist() == [[0, 1, 1, 2]]
    assert layer(np.array([[-1.0]])).dtype == np.int32
    adapted = layers.Discretization(num_bins=4)
    adapted.adapt([np.arange(50.0), np.arange(50.0, 100.0)], steps=2)
    np.testing.assert_allclose(adapted.bin_boundaries, [24.5, 49.5, 74.5], atol=1.5)
    adapted.adapt([np.zeros(3), np.ones(3)], steps=1)
    assert set(adapted.bin_boundaries) == {0}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layers.RandomFlip("diagonal"), "mode='diagonal'; expected"),
        (lambda: layers.RandomTranslation(1.5, 0), r"in the range \[-1.0, 1.0\]. Received: height_factor=1.5"),
        (lambda: layers.RandomTranslation(0, (0, 1, 2)), "Received: width_factor"),
        (lambda: layers.RandomZoom(-1), r"range \(-1.0, 1.0\]. Received: height_factor=-1"),
        (lambda: layers.RandomRotation(2), r"in the range \[-1, 1\]. Received: factor=2"),
        (lambda: layers.RandomRotation((1.5, 2)), r"in the range \[-1, 1\]. Received: factor=\(1.5, 2\)"),
        (lambda: layers.RandomContrast(-0.5), r"in the range \[0, 1\]. Received: factor=-0.5"),
        (lambda: layers.RandomRotation(0.1, "mirror"), "Unknown `fill_mode` mirror"),
        (lambda: layers.RandomRotation(0.1, interpolation="bicubic"), "Unknown `interpolation` bicubic"),
        (lambda: layers.RandomBrightness(0.1, 255), "`value_range` argument should be a list of two numbers"),
        (lambda: layers.RandomCrop(0, 2), "invalid value for `height`"),
        (lambda: layers.Resizing(2, 2, "area"), "Invalid value for argument `interpolation`"),
        (lambda: layers.CenterCrop(2, 2)(np.zeros((3, 3))), "rank 3 .single image. or 4"),
        (lambda: layers.RandomFlip()({"images": IMAGES, "bounding_boxes": IMAGES}), "not supported: bounding_boxes"),
        (lambda: layers.CategoryEncoding(), "num_tokens must be set"),
        (lambda: layers.CategoryEncoding(0), "`num_tokens` must be >= 1"),
        (lambda: layers.CategoryEncoding(3, "int"), "Unknown arg for output_mode: int"),
        (lambda: layers.CategoryEncoding(3, sparse=True), "not supported: sparse"),
        (
            lambda: layers.CategoryEncoding(3)(np.zeros((2, 1), int), count_weights=np.ones((2, 1))),
            "`count_weights` is",
        ),
        (lambda: layers.Discretization(), "either `num_bins` or `bin_boundaries`"),
        (lambda: layers.Discretization([1.0], 2), "Both `num_bins` and `bin_boundaries`"),
        (lambda: layers.Discretization(num_bins=-1), "greater than or equal to 0"),
        (lambda: layers.Discretization([1.0], output_mode="bits"), "Unknown value for `output_mode`"),
        (lambda: layers.Discretization([1.0]).adapt(np.ones(2)), "Cannot adapt a Discretization layer"),
        (lambda: layers.Discretization(num_bins=2).adapt([]), "no numbers"),
        (lambda: layers.Discretization(num_bins=2)(np.ones(2)), "You need to either pass"),
    ],
)
def test_refusals(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
