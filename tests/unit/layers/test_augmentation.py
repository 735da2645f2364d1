"""What is drawn for pictures, and what layers of pictures and categories refuse."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import ConfigError
from dptrain.layers import Input
from tests.unit.layers.cases import ALL_CASES, CASES

IMAGES = np.random.default_rng(2).uniform(0, 255, (64, 4, 5, 1)).astype(np.float32)


def test_each_image_is_drawn_for_itself_and_in_each_call_anew():
    flip = layers.RandomFlip("horizontal", seed=1)
    first, second = (flip(IMAGES, training=True).numpy() for _ in range(2))
    flipped = [np.array_equal(output, image[:, ::-1]) for output, image in zip(first, IMAGES, strict=True)]
    unchanged = [np.array_equal(output, image) for output, image in zip(first, IMAGES, strict=True)]
    assert [flip != other for flip, other in zip(flipped, unchanged, strict=True)] == [True] * 64
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
    crops = {tuple(crop(IMAGES[:1], training=True).numpy().ravel()) for _ in range(60)}
    parts = {tuple(IMAGES[0, h : h + 2, w : w + 2].ravel()) for h in range(3) for w in range(4)}
    assert crops == parts
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
        layer, outputs = make(), []
        for images in (IMAGES[0], IMAGES[:1], {"images": IMAGES[:1], "labels": np.arange(1)}):
            for count in [variable for variable in layer.variables if variable.name == "seed_generator"]:
                count.assign(0)
            outputs.append(layer(images, training=True))
        np.testing.assert_allclose(outputs[0], outputs[1].numpy()[0], rtol=1e-6)
        np.testing.assert_array_equal(outputs[2]["images"], outputs[1])
        assert outputs[2]["labels"].numpy() == 0


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
    loaded = dp.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(IMAGES, verbose=0), model.predict(IMAGES, verbose=0))


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
        (lambda: layers.RandomFlip()({"images": IMAGES, "keypoints": IMAGES}), "not supported: keypoints"),
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


GRAY = np.full((400, 4, 4, 3), 100.0, np.float32)
NOISE = np.random.default_rng(5).uniform(0, 255, (400, 4, 4, 3)).astype(np.float32)


def changed(layer, images):
    """Return what a layer makes of images in training, and whether it changed each."""
    output = layer(images, training=True).numpy()
    return output, np.abs(output - images).max((1, 2, 3)) > 1e-3


@pytest.mark.parametrize(
    ("make", "chance"),
    [
        (lambda: layers.RandomInvert(1.0, seed=1), 0.5),  # a chance that is drawn from 0 to 1
        (lambda: layers.RandomInvert((1.0, 1.0), seed=1), 1),
        (lambda: layers.RandomInvert((0.0, 0.0), seed=1), 0),
        (lambda: layers.RandomGrayscale(0.25, seed=1), 0.25),
        (lambda: layers.RandomErasing((0.75, 0.75), (0.9, 1), seed=1), 0.75),
        (lambda: layers.RandomGaussianBlur((0.25, 0.25), sigma=(0.9, 1), seed=1), 0.25),
        (lambda: layers.RandomPerspective((0.5, 0.5), seed=1), 0.5),
        (lambda: layers.RandomElasticTransform((0.5, 0.5), seed=1, fill_mode="constant"), 0.5),
    ],
)
def test_chances(make, chance):
    layer = make()
    _, first = changed(layer, NOISE)
    _, second = changed(layer, NOISE)
    assert abs(first.mean() - chance) < 0.13
    assert chance in (0, 1) or (first != second).any()


@pytest.mark.parametrize(
    ("make", "least", "most"),
    [
        (lambda: layers.RandomColorJitter(brightness_factor=(0.1, 0.2), seed=1), 125.5, 151),
        (lambda: layers.Solarization((0.1, 0.2), seed=1), 104, 154.9),
        (lambda: layers.RandomErasing((1.0, 1.0), (1.0, 1.0), 7.0, seed=1), 7, 7),
        (lambda: layers.RandomPosterization((3, 3), seed=1), 96, 96),
        (lambda: layers.RandomPosterization((1, 3), seed=1), 0, 64),
        (lambda: layers.RandomInvert((1.0, 1.0), seed=1), 155, 155),
    ],
)
def test_ranges(make, least, most):
    output, _ = changed(make(), GRAY)
    assert least <= output.min() + 1e-3
    assert output.max() <= most + 1e-3
    assert least == most or np.unique(output).size > 1


def test_colours_stay_in_their_range_and_grey_stays_grey():
    for make in (
        lambda **o: layers.RandomHue(1.0, **o),
        lambda **o: layers.RandomSaturation((0.9, 1.0), **o),
        lambda **o: layers.RandomColorDegeneration((0.0, 1.0), **o),
        lambda **o: layers.RandomSharpness((0.0, 1.0), **o),
        lambda **o: layers.RandAugment(factor=1.0, **o),
        lambda **o: layers.AugMix(chain_depth=1, **o),
    ):
        output, touched = changed(make(seed=1), NOISE)
        assert output.min() >= -1e-3
        assert output.max() <= 255.001
        assert touched.mean() > 0.9
    for make in (layers.RandomHue, layers.RandomColorDegeneration, layers.RandomSaturation):
        np.testing.assert_allclose(make(0.9, seed=1)(GRAY, training=True), GRAY, rtol=2e-4)
    faded = layers.RandomColorDegeneration((1.0, 1.0), seed=1)(NOISE, training=True).numpy()
    np.testing.assert_allclose(faded[..., 0], faded[..., 2], atol=0.05)
    unchanged = layers.RandomSharpness((0.5, 0.5), seed=1)(NOISE, training=True)
    np.testing.assert_allclose(unchanged, NOISE, rtol=1e-4)


def test_shears_are_written_so_that_keras_reads_them():
    """Keras writes 0.3 as the range from -0.3, and reads no range from below 0."""
    written = layers.RandomShear([-0.3, 0.3], [0.1, 0.2])._get_config()
    assert (written["x_factor"], written["y_factor"]) == (0.3, [0.1, 0.2])
    assert layers.RandomShear([-0.3, 0.2])._get_config()["x_factor"] == [-0.3, 0.2]  # no number stands for it


def test_contrast_and_frequencies():
    x = np.array([[[0.0, 50], [50, 50]], [[10, 20], [30, 40]]])[..., None]
    output = layers.AutoContrast()(x).numpy()
    np.testing.assert_allclose(output[..., 0], [[[0, 255], [255, 255]], [[0, 85], [170, 255]]], rtol=1e-5)
    np.testing.assert_array_equal(layers.AutoContrast()(GRAY[:1]), GRAY[:1])
    equal = layers.Equalization(bins=256)
    values = np.arange(4.0).reshape(1, 2, 2, 1) * 3
    np.testing.assert_allclose(equal(values, training=True), np.array([0, 85, 170, 255.0]).reshape(1, 2, 2, 1))
    np.testing.assert_array_equal(equal(values, training=False), values)
    np.testing.assert_array_equal(equal(GRAY[:1], training=True), GRAY[:1])


def test_frequencies_around_each_place():
    equal = layers.ContrastLimitedAdaptiveHistogramEqualization(clip_limit=0, tile_grid_size=(1, 2))
    # In a tile of two values the lower becomes 255 / 2 and the higher 255. The third pixel lies in the middle between
    # the tiles' middles: 200 is above all of the first tile, and the lower in the second.
    output = equal(np.array([10.0, 20, 200, 210]).reshape(1, 1, 4, 1)).numpy().ravel()
    np.testing.assert_allclose(output, [127.5, 255, (255 + 127.5) / 2, 255])
    limited = layers.ContrastLimitedAdaptiveHistogramEqualization(clip_limit=1e-6, tile_grid_size=(2, 2))
    np.testing.assert_allclose(limited(GRAY), np.floor(GRAY), atol=0.01)  # all values count alike


def test_as_many_boxes_of_every_image():
    layer = layers.MaxNumBoundingBoxes(3, bounding_box_format="xyxy")
    boxes = {"boxes": np.arange(16.0).reshape(2, 2, 4), "labels": np.array([[1, 2], [3, 4]])}
    padded_boxes = layer({"images": NOISE[:2], "bounding_boxes": boxes})["bounding_boxes"]
    np.testing.assert_array_equal(padded_boxes["labels"], [[1, 2, -1], [3, 4, -1]])
    np.testing.assert_array_equal(padded_boxes["boxes"][:, :2], boxes["boxes"])
    assert (padded_boxes["boxes"][:, 2].numpy() == -1).all()
    image_boxes = {key: value[0] for key, value in boxes.items()}
    padded_boxes = layers.MaxNumBoundingBoxes(1, bounding_box_format="xyxy")(
        {"images": NOISE[0], "bounding_boxes": image_boxes}
    )
    assert padded_boxes["bounding_boxes"]["boxes"].shape == (1, 4)
    with pytest.raises(ConfigError, match="you didn't specify a bounding box format"):
        layers.MaxNumBoundingBoxes(1)({"images": NOISE[:2], "bounding_boxes": boxes})
    with pytest.raises(ConfigError, match="expected a dictionary with 'boxes' and 'labels'"):
        layer({"images": NOISE[:2], "bounding_boxes": {"boxes": boxes["boxes"]}})


@pytest.mark.parametrize("make", [lambda: layers.MixUp(0.9, seed=1), lambda: layers.CutMix((0.9, 1), seed=1)])
def test_pictures_and_labels_are_mixed_alike(make):
    """Each image shows its own number, so that what it is made of can be read."""
    number = 60
    images = np.zeros((number, 8, 8, 1), np.float32) + np.arange(number)[:, None, None, None]
    labels = np.eye(number)
    layer = make()
    mixed_data = layer({"images": images, "labels": labels}, training=True)
    mixed, parts = mixed_data["images"].numpy(), mixed_data["labels"].numpy()
    np.testing.assert_allclose(parts.sum(1), 1, rtol=1e-5)
    assert (np.count_nonzero(parts > 1e-6, 1) <= 2).all()
    partners = np.where(parts - np.diag(np.diag(parts)) > 1e-6)[1]
    assert len(set(partners)) == len(partners) > number // 2  # a permutation, but for what it keeps in place
    if isinstance(layer, layers.MixUp):
        np.testing.assert_allclose(mixed[:, 0, 0, 0], parts @ np.arange(number), rtol=1e-4)
        np.testing.assert_allclose(np.ptp(mixed, (1, 2, 3)), 0, atol=1e-5)
    else:
        for mixture, part in zip(mixed, parts, strict=True):
            assert set(np.unique(mixture)) <= set(np.flatnonzero(part > 0))
        area = [(one == n).mean() for n, one in enumerate(mixed)]
        assert np.abs(np.array(area) - np.diag(parts)).mean() < 0.1
    unmixed = layer({"images": images, "labels": labels}, training=False)
    np.testing.assert_array_equal(unmixed["images"], images)
    np.testing.assert_array_equal(unmixed["labels"], labels)
    single = layer({"images": images[3], "labels": labels[3]}, training=True)
    np.testing.assert_allclose(single["images"], images[3], rtol=1e-5)
    np.testing.assert_allclose(single["labels"], labels[3], rtol=1e-5)


def test_mixing_in_a_step_of_ones_own():
    class Mixed(dp.Sequential):
        def __init__(self, parts):
            super().__init__(parts)
            self.mix = layers.MixUp(0.9, seed=3)

        def train_step(self, data):
            x, y = data
            mixed = self.mix({"images": x, "labels": y}, training=True)
            return super().train_step((mixed["images"], mixed["labels"]))

    x = np.random.default_rng(1).normal(size=(20, 3, 3, 1)).astype(np.float32)
    y = np.eye(2, dtype=np.float32)[np.arange(20) % 2]
    model = Mixed([Input((3, 3, 1)), layers.Flatten(), layers.Dense(2)])
    model.compile("sgd", "mse")
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]  # the last batch has 4 rows
    assert np.isfinite(losses).all()
    assert int(model.mix.generator.count.numpy()) == 2 * 3 * 2


def test_a_seed_that_is_given_draws_the_same():
    for make in (layers.MixUp, layers.RandomInvert, layers.RandomErasing, layers.RandAugment):
        layer = make(seed=1)
        first, other = (layer.get_random_transformation(NOISE[:4], seed=7) for _ in range(2))
        outputs = [layer.transform_images(NOISE[:4], transformation).numpy() for transformation in (first, other)]
        np.testing.assert_array_equal(*outputs)
        assert layer.get_random_transformation(NOISE[:4], training=False) is None


def test_a_pipeline(tmp_path):
    pipeline = layers.Pipeline([layers.RandomFlip(seed=1), layers.AutoContrast(), layers.Rescaling(1 / 255)])
    assert [type(layer).__name__ for layer in pipeline.layers] == ["RandomFlip", "AutoContrast", "Rescaling"]
    output = pipeline(NOISE[:5], training=False).numpy()
    np.testing.assert_allclose(output, layers.AutoContrast()(NOISE[:5]).numpy() / 255, rtol=1e-6)
    model = dp.Sequential([Input((4, 4, 3)), pipeline, layers.Flatten(), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(NOISE[:8], np.ones(8), verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(NOISE[:8], verbose=0), model.predict(NOISE[:8], verbose=0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layers.RandomShear(1.5), r"in the range \[0, 1.0\]. Received: x_factor=1.5"),
        (lambda: layers.RandomShear(0.1, -0.5), "Received: y_factor=-0.5"),
        (lambda: layers.RandomShear(fill_mode="mirror"), "Unknown `fill_mode` mirror"),
        (lambda: layers.RandomPerspective(scale=2), r"`scale` argument should be a number in the range \[0,1\]"),
        (lambda: layers.RandomPerspective(interpolation="cubic"), "Unknown `interpolation` cubic"),
        (lambda: layers.RandomElasticTransform(scale=2), r"The `scale` argument .* Received: scale=2"),
        (lambda: layers.RandomElasticTransform(fill_mode="edge"), "Unknown `fill_mode` edge"),
        (lambda: layers.RandomErasing(fill_value=(1, 2)), "number .or a list of three numbers."),
        (lambda: layers.RandomGaussianBlur(kernel_size=4), "kernel_size must be an odd number"),
        (lambda: layers.RandomGrayscale(2), "`factor` should be between 0 and 1"),
        (lambda: layers.RandomPosterization(9), r"in the range \[1, 8\]. Received: factor=9"),
        (lambda: layers.RandomHue(-0.1), r"in the range \[0, 1\]. Received: factor=-0.1"),
        (lambda: layers.RandomInvert(value_range=5), "`value_range` argument should be a list of two numbers"),
        (lambda: layers.RandomHue(0.5)(NOISE[..., :2], training=True), "Invalid channel size: expected 3"),
        (lambda: layers.Solarization(2), "Received: addition_factor=2"),
        (lambda: layers.Equalization(bins=1), "bins=1 of Equalization"),
        (lambda: layers.RandAugment(num_ops=0), "num_ops=0 of RandAugment"),
        (lambda: layers.RandAugment(interpolation="cubic"), "Unknown `interpolation` cubic"),
        (lambda: layers.AugMix(num_chains=0), "num_chains=0 of AugMix"),
        (lambda: layers.AugMix(alpha=0), "alpha = 0 of AugMix"),
        (lambda: layers.MixUp(0), "alpha = 0 of MixUp"),
        (lambda: layers.CutMix(2), r"in the range \[0, 1\]. Received: factor=2"),
        (
            lambda: layers.MixUp()({"images": NOISE[:2], "labels": np.array([1, 0])}, training=True),
            "expected vectors, such as `ops.one_hot`",
        ),
        (
            lambda: layers.MixUp()({"images": NOISE[:3], "labels": np.eye(2)}, training=True),
            "cannot be broadcast together",
        ),
        (lambda: layers.MixUp()({"images": NOISE[:2], "masks": NOISE[:2]}, training=True), "not supported: masks"),
        (lambda: layers.Pipeline(["flip"]), "expected a list of layers"),
        (lambda: layers.Pipeline.from_config({"name": "empty"}), "layers = None: expected a list of layers"),
    ],
)
def test_what_the_others_refuse(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


OTHERS = ("AugMix", "AutoContrast", "CutMix", "Equalization", "MixUp", "Solarization")
PICTURES = [(name, number) for name, number in ALL_CASES if name.startswith("Random") or name in OTHERS]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(("name", "number"), PICTURES)
def test_half_precision_stays_near(name, number, policy):
    """What is drawn is drawn in single precision: the same transformation, of rounded pixels."""
    case, outputs = CASES[name][number], []
    for dtype in (policy, "float32"):
        layer = case.make()
        case.call(layer, [Input(shape[1:]) for shape in [case.inputs()[0].shape]])
        layer._adopt(seed=3)
        layer._set_dtype(dtype)
        images = np.clip(case.inputs()[0], -1.9, 2.9).astype(np.float16).astype(np.float32)
        outputs.append(case.call(layer, [images], training=True))
    assert outputs[0].dtype == policy.removeprefix("mixed_")
    half, exact = (ops.cast(output, "float32").numpy() for output in outputs)
    assert np.isfinite(half).all()
    far = np.abs(half - exact) > (0.02 if policy == "mixed_float16" else 0.1) * np.abs(exact).max()
    assert far.mean() < 0.1  # levels and hues may jump
