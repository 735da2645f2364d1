"""What layers do to pictures at random: the same with what Keras has drawn; and categories that layers adapt to."""

import inspect
import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from tests.unit.layers.cases import ALL_CASES, CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras' tensors
    pytest.mark.filterwarnings("ignore:Tensor.T is deprecated:UserWarning"),
]
# These draw while they transform, or choose among layers on the host: the layers that they are made of are compared.
DRAWN_LATER = ("RandomElasticTransform", "RandomColorJitter", "AugMix")
ALWAYS = ("AutoContrast", "Equalization")
MORE = ("CutMix", "MixUp", "Solarization", *ALWAYS)
RANDOM = [
    (name, number)
    for name, number in ALL_CASES
    if (name.startswith("Random") or name in MORE) and name not in DRAWN_LATER
]
# Keras' AutoContrast takes the first axes for height and width, RandomErasing the last one for channels, and windows
# that are no squares fail on PyTorch. Its RandomSaturation lets colours leave their range.
FIRST = [("AutoContrast", 1), ("RandomErasing", 1), ("RandomGaussianBlur", 1)]


def arrays(keras, transformation):
    """Return a transformation of Keras' as arrays."""
    if isinstance(transformation, dict):
        return {
            key: entry if isinstance(entry, tuple) else arrays(keras, entry) for key, entry in transformation.items()
        }
    if isinstance(transformation, tuple):
        return tuple(entry if isinstance(entry, int) else arrays(keras, entry) for entry in transformation)
    return keras.ops.convert_to_numpy(transformation) if keras.ops.is_tensor(transformation) else transformation


@pytest.mark.parametrize(("name", "number"), [case for case in RANDOM if case not in FIRST])
@pytest.mark.parametrize("single", [False, True])
def test_pictures_are_transformed_as_by_keras(keras, name, number, single):
    case = CASES[name][number]
    ours, (images,) = case.make(), case.inputs()
    if name in ("CutMix", "Solarization") and single:
        pytest.skip("Keras fails, or transforms nothing")
    images = np.clip(images, *getattr(ours, "value_range", (-5, 5)))
    if name == "RandomSaturation":
        images = (images - images.min()) / np.ptp(images)
        ours = layers.RandomSaturation(ours.factor, (0, 1), ours.data_format, 3)
    ours._set_dtype("float64")
    described = json.loads(json.dumps(layers.serialize(ours)))
    if name == "RandomShear":  # Keras writes and does not read ranges that begin below 0
        described["config"] |= {key: abs(described["config"][key]) for key in ("x_factor", "y_factor") if number == 0}
    theirs = keras.saving.deserialize_keras_object(described)
    images = images[0] if single else images
    tensor = keras.ops.convert_to_tensor(images)
    transformation = theirs.get_random_transformation(tensor, training=True)
    as_arrays = arrays(keras, transformation)
    mine = ours.transform_images(images, as_arrays).numpy()
    if single and name not in ("RandomRotation", "RandomCrop", "RandomPerspective", "RandomShear"):
        expected = theirs.transform_single_image(tensor, transformation)
    else:
        expected = theirs.transform_images(tensor, transformation)
    np.testing.assert_allclose(mine, keras.ops.convert_to_numpy(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["CutMix", "MixUp"])
def test_labels_are_mixed_as_by_keras(keras, name):
    ours, (images,) = CASES[name][0].make(), CASES[name][0].inputs()
    theirs, labels = getattr(keras.layers, name)(seed=3), np.eye(len(images), dtype=np.float32)
    transformation = theirs.get_random_transformation(images)
    expected = theirs.transform_labels(keras.ops.convert_to_tensor(labels), transformation)
    labels_out = ours.transform_labels(labels, arrays(keras, transformation))
    np.testing.assert_allclose(labels_out, keras.ops.convert_to_numpy(expected), rtol=1e-6, atol=1e-6)


def test_each_of_eleven_changes_is_that_of_keras(keras):
    """One by one: on PyTorch Keras' brightness changes the array that the others see."""
    images = np.random.default_rng(1).uniform(0, 255, (3, 6, 5, 3))
    ours, theirs = layers.RandAugment(num_ops=1, seed=3), keras.layers.RandAugment(seed=3)
    ours._set_dtype("float64")
    transformation = theirs.get_random_transformation(images)
    as_arrays = arrays(keras, transformation)
    assert list(as_arrays["transforms"]) == list(ours._names)
    for number, name in enumerate(ours._names):
        tensor = keras.ops.convert_to_tensor(images, "float32")
        expected = getattr(theirs, name).transform_images(tensor, transformation["transforms"][name])
        outputs = ours.transform_images(images, as_arrays | {"layer_idxes": np.array([number])})
        # An image is rounded to whole levels, where single precision may fall below.
        differing = np.abs(outputs - keras.ops.convert_to_numpy(expected)) > 0.01
        assert differing.mean() <= (0.02 if name in ("random_posterization", "equalization") else 0), name


def test_chains_are_mixed_as_by_keras(keras):
    images = np.random.default_rng(1).uniform(0, 255, (3, 6, 5, 3))
    ours, theirs = layers.AugMix(seed=3), keras.layers.AugMix(seed=3)
    ours._set_dtype("float64")
    transformation = theirs.get_random_transformation(images)
    names = [*ours._names, *ours._color_names]
    chains = [[transform["layer_name"] for transform in chain] for chain in transformation["chain_transforms"]]
    as_arrays = arrays(keras, {key: transformation[key] for key in ("chain_mixing_weights", "weight_sample")})
    filler = ours.get_random_transformation(images)["chain_transforms"]
    numbers = np.full((3, 3), len(names))
    for chain, transforms in enumerate(transformation["chain_transforms"]):
        for depth, transform in enumerate(transforms):
            numbers[chain, depth] = names.index(transform["layer_name"])
            filler[chain][depth][transform["layer_name"]] = arrays(keras, transform["transformation"])
    outputs = ours.transform_images(images, as_arrays | {"layer_idxes": numbers, "chain_transforms": filler})
    expected = theirs.transform_images(keras.ops.convert_to_tensor(images, "float32"), transformation)
    np.testing.assert_allclose(outputs, keras.ops.convert_to_numpy(expected), rtol=1e-4, atol=0.01, err_msg=str(chains))


def test_every_augmentation_has_the_arguments_of_keras(keras):
    for name in sorted(set(layers.LAYERS) & set(dir(keras.layers))):
        theirs = getattr(keras.layers, name)
        if "image_preprocessing" in theirs.__module__ or name == "Pipeline":
            expected, parameters = (
                inspect.signature(layer.__init__).parameters for layer in (theirs, layers.LAYERS[name])
            )
            expected_defaults = [
                (parameter.name, parameter.default)
                for parameter in expected.values()
                if parameter.kind is not parameter.VAR_KEYWORD
            ]
            defaults = [
                (parameter.name, parameter.default)
                for parameter in parameters.values()
                if parameter.kind is not parameter.VAR_KEYWORD
            ]
            assert defaults == expected_defaults, name


def test_bins(keras):
    x = np.random.default_rng(4).normal(size=(400, 3)).astype(np.float32)
    for data in (x, [x[:100], x[100:350], x[350:]]):
        for bins in (3, 8):
            ours, theirs = layers.Discretization(num_bins=bins), keras.layers.Discretization(num_bins=bins)
            ours.adapt(data)
            for batch in data if isinstance(data, list) else [data]:  # `adapt` needs TensorFlow
                theirs.update_state(batch)
            theirs.finalize_state()
            np.testing.assert_allclose(ours.bin_boundaries, theirs.bin_boundaries, rtol=1e-6)
            np.testing.assert_array_equal(ours(x[:20]), keras.ops.convert_to_numpy(theirs(x[:20])))
    restored = layers.deserialize(json.loads(json.dumps(keras.saving.serialize_keras_object(theirs))))
    assert restored.bin_boundaries == pytest.approx(theirs.bin_boundaries)
    assert restored.num_bins == 8


def test_weights_of_categories(keras):
    x, weights = np.array([[0, 2, 2], [1, 1, 3]]), np.array([[0.5, 1, 2], [1, 1, 0.25]])
    ours, theirs = layers.CategoryEncoding(4, "count"), keras.layers.CategoryEncoding(4, "count")
    encoded = theirs(x, count_weights=weights)
    np.testing.assert_allclose(ours(x, count_weights=weights), keras.ops.convert_to_numpy(encoded))


@pytest.mark.parametrize("size", [(3, 8), (7, 7)])
def test_whole_pixels_stay_whole(keras, size):
    x = np.random.default_rng(4).integers(0, 256, (2, 5, 6, 3)).astype(np.uint8)
    ours = layers.Resizing(*size)(x)
    assert ours.dtype == np.uint8
    theirs = keras.ops.convert_to_numpy(keras.layers.Resizing(*size)(x))
    assert np.abs(ours.numpy().astype(int) - theirs.astype(int)).max() <= 1


@pytest.mark.parametrize("number", [1, 2, 4])
def test_as_many_bounding_boxes_as_by_keras(keras, number):
    rng = np.random.default_rng(3)
    data = {
        "images": rng.normal(size=(3, 4, 5, 1)).astype(np.float32),
        "bounding_boxes": {
            "boxes": rng.normal(size=(3, 2, 4)).astype(np.float32),
            "labels": rng.integers(0, 9, (3, 2)),
        },
        "labels": np.arange(3),
    }
    outputs, expected = (
        library.layers.MaxNumBoundingBoxes(number, 7, bounding_box_format="xyxy")(
            {**data, "images": data["images"].copy()}
        )
        for library in (dp, keras)
    )
    np.testing.assert_array_equal(outputs["images"], data["images"])
    for key in ("boxes", "labels"):
        theirs = keras.ops.convert_to_numpy(expected["bounding_boxes"][key])
        np.testing.assert_allclose(outputs["bounding_boxes"][key], theirs, rtol=1e-6)


def test_levels_around_each_place_are_those_of_keras(keras):
    """Keras on PyTorch cuts off a limit's decimals, and repeats the edge where it should mirror: not compared there."""
    on_jax = keras.backend.backend() == "jax"
    x = np.random.default_rng(5).uniform(0, 255, (2, 21, 18 if on_jax else 20, 3)).astype(np.float32)
    limit = 40.0 if on_jax else 0.0
    for images in (x, x[0], x.astype(np.uint8)):
        outputs, expected = (
            library.layers.ContrastLimitedAdaptiveHistogramEqualization(clip_limit=limit, tile_grid_size=(3, 4))(images)
            for library in (dp, keras)
        )
        # Keras gives whole numbers back for whole numbers, cut off.
        outputs = np.trunc(outputs) if images.dtype == np.uint8 else outputs
        assert (
            np.abs(outputs - keras.ops.convert_to_numpy(expected).astype(float)).max() < (1.01, 0.01)[images.ndim == 3]
        )


def every_augmentation(module):
    """Return layers of each kind, with arguments of their own; Equalization alone cannot be in a model of Keras'."""
    make = module.layers
    return [
        *(make.RandomShear(0.2, seed=1), make.RandomPerspective(0.5, 0.3, seed=1), make.RandomHue(0.2, seed=1)),
        *(make.RandomSaturation((0.4, 0.6), seed=1), make.RandomSharpness(0.4, seed=1), make.RandomGrayscale(seed=1)),
        *(make.RandomColorDegeneration(0.3, seed=1), make.RandomPosterization(5, seed=1), make.RandomInvert(seed=1)),
        *(make.RandomErasing(0.5, fill_value=3.0, seed=1), make.RandomGaussianBlur(sigma=0.5, seed=1)),
        *(make.RandomElasticTransform(0.3, 0.4, seed=1), make.Solarization(0.1, 0.2, seed=1), make.AutoContrast()),
        *(make.RandomColorJitter(brightness_factor=0.1, hue_factor=0.2, seed=1),),
        *(make.RandAugment(factor=0.3, seed=1), make.MixUp(0.3, seed=1)),
        *(make.CutMix(0.5, seed=1), make.Pipeline([make.RandomFlip(seed=1), make.Rescaling(1 / 255)])),
    ]


@pytest.mark.filterwarnings("ignore:`build.*was called on layer 'pipeline':UserWarning")  # by Keras
@pytest.mark.parametrize("theirs_first", [False, True])
def test_models_with_augmentations_go_both_ways_in_files(keras, tmp_path, theirs_first):
    saver, loader = (dp, keras)[theirs_first], (keras, dp)[theirs_first]
    layers_of = [layer for layer in every_augmentation(saver)]
    model = saver.Sequential([saver.Input((6, 5, 3)), *layers_of, saver.layers.Flatten(), saver.layers.Dense(2)])
    path = tmp_path / "m.keras"
    model.save(path)
    reloaded = loader.models.load_model(path)
    x = np.random.default_rng(1).uniform(0, 255, (4, 6, 5, 3)).astype(np.float32)
    np.testing.assert_allclose(reloaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-5)
    names = [type(layer).__name__ for layer in reloaded.layers]
    assert names == [type(layer).__name__ for layer in layers_of] + ["Flatten", "Dense"]
