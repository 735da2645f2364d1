"""Every network: its layers, weights, outputs, files; its `preprocess_input` and `decode_predictions`."""

import importlib
import json
import re
import warnings

import numpy as np
import pytest

import dptrain as dp
from dptrain import applications

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' tensors

MODULES = [name for name in applications.__all__ if name.islower() and name != "imagenet_utils"]
SMALL = {"input_shape": (64, 64, 3), "classes": 7, "classifier_activation": None}
LOGITS = {"class_name": "SparseCategoricalCrossentropy", "config": {"from_logits": True}}
BARE = {"input_shape": (33, 64, 3), "include_top": False}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_images(keras, name, data_format):
    images = np.random.default_rng(2).uniform(0, 255, (2, 3, 4, 3)).astype(np.float32)
    images = images if data_format == "channels_last" else np.moveaxis(images, -1, 1)
    theirs = importlib.import_module(f"keras.applications.{name}").preprocess_input
    ours = getattr(applications, name).preprocess_input
    expected = theirs(images.copy(), data_format=data_format)
    np.testing.assert_array_equal(ours(images, data_format=data_format), expected)
    if data_format == "channels_last":
        np.testing.assert_array_equal(ours(images[0]), theirs(images[0].copy()))


def test_words(keras, tmp_path, monkeypatch):
    index = {str(n): [f"n{n}", f"word {n}"] for n in range(1000)}
    module = importlib.import_module("keras.src.applications.imagenet_utils")
    monkeypatch.setattr(module, "CLASS_INDEX", index)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "imagenet_class_index.json").write_text(json.dumps(index))
    outputs = np.random.default_rng(2).random((3, 1000))
    ours, theirs = applications.vgg16.decode_predictions, keras.applications.vgg16.decode_predictions
    assert ours(outputs, top=4) == theirs(outputs, top=4)


@pytest.fixture
def float32(keras):
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float64")


def both(keras, name, **options):
    """Return ours and Keras' of a name, with Keras' random weights, biases and moments drawn at random too."""
    theirs = getattr(keras.applications, name)(weights=None, **options)
    rng = np.random.default_rng(3)
    arrays = map(keras.ops.convert_to_numpy, theirs.weights)
    perturbed = [
        weight + 0.1 * rng.random(weight.shape).astype(weight.dtype) if weight.ndim == 1 else weight
        for weight in arrays
    ]
    theirs.set_weights(perturbed)
    ours = getattr(applications, name)(weights=None, **options)
    ours.set_weights(perturbed)
    return ours, theirs


# A policy that is left out, an axis -1 for [-1] or 3, and what older versions of Keras do not know.
IN_OTHER_WORDS = {"axis", "dtype", "optional"}


def as_written(config):
    """Return a configuration without what both write in other words, and what Keras counts over all models."""
    if isinstance(config, dict):
        return {key: as_written(value) for key, value in config.items() if key not in IN_OTHER_WORDS}
    if isinstance(config, list):
        return [as_written(value) for value in config]
    return re.sub(r"^input_layer_\d+$", "input_layer", config) if isinstance(config, str) else config


def described(model):
    # Keras counts weights without a name up over all models.
    weights = [(re.sub(r"^variable_\d+$", "variable", weight.name), tuple(weight.shape)) for weight in model.weights]
    return [type(layer).__name__ for layer in model.layers], [layer.name for layer in model.layers], weights


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("VGG16", SMALL),
        ("VGG19", {**BARE, "pooling": "avg"}),
        ("ResNet50", SMALL),
        ("ResNet101", BARE),
        ("ResNet152", {**BARE, "pooling": "max"}),
        ("ResNet50V2", {**BARE, "pooling": "avg"}),
        ("ResNet101V2", SMALL),
        ("MobileNet", {"depth_multiplier": 2, "alpha": 0.5, **SMALL}),
        ("MobileNetV2", {"alpha": 1.4}),
        ("MobileNetV2", {**BARE, "input_shape": (None, None, 3), "pooling": "max"}),
        ("EfficientNetB0", {**BARE, "input_shape": None}),
        ("EfficientNetB3", SMALL),
        ("InceptionV3", {**SMALL, "input_shape": (75, 80, 3)}),
        ("Xception", {**BARE, "input_shape": (71, 71, 3), "pooling": "max"}),
        ("DenseNet121", SMALL),
        ("DenseNet169", {**BARE, "pooling": "avg"}),
        ("MobileNetV3Small", {"minimalistic": True, "alpha": 1.4}),
        ("MobileNetV3Large", {**BARE, "pooling": "max", "include_preprocessing": False}),
        ("EfficientNetV2B1", SMALL),
        ("EfficientNetV2S", {**BARE, "pooling": "avg", "include_preprocessing": False}),
        ("ConvNeXtTiny", SMALL),
        ("ConvNeXtTiny", {**BARE, "pooling": "avg", "include_preprocessing": False}),
    ],
)
def test_layers_and_weights(keras, float32, name, options):
    ours, theirs = (getattr(module, name)(weights=None, **options) for module in (applications, keras.applications))
    assert described(ours) == described(theirs)
    assert (ours.name, ours.count_params()) == (theirs.name, theirs.count_params())
    assert (ours.input_shape, ours.output_shape) == (theirs.input_shape, theirs.output_shape)
    for mine, their_layer in zip(ours.layers, theirs.layers, strict=True):
        config, expected = (as_written(json.loads(json.dumps(layer.get_config()))) for layer in (mine, their_layer))
        assert expected == {key: config[key] for key in expected}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("VGG16", {**BARE, "pooling": "max"}),
        ("ResNet50", {**BARE, "pooling": "avg"}),
        ("ResNet50V2", BARE),
        ("MobileNet", {"alpha": 0.25, **SMALL}),
        ("MobileNetV2", {"alpha": 0.35, **SMALL}),
        ("EfficientNetB0", SMALL),
        ("InceptionV3", {**SMALL, "input_shape": (75, 80, 3)}),
        ("Xception", {**SMALL, "input_shape": (71, 71, 3)}),
        ("DenseNet121", SMALL),
        ("MobileNetV3Small", SMALL),
        ("MobileNetV3Large", {**BARE, "pooling": "avg"}),
        ("EfficientNetV2B0", SMALL),
        ("ConvNeXtTiny", {**BARE, "pooling": "max"}),
    ],
)
def test_outputs(keras, float32, name, options):
    ours, theirs = both(keras, name, **options)
    ours.compile(jit_compile=name == "MobileNet")  # compiling takes longer than all the rest
    x = np.random.default_rng(5).uniform(-1, 1, (2, *options["input_shape"])).astype(np.float32)
    expected = keras.ops.convert_to_numpy(theirs(x))
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(ours.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_files_of_keras(keras, float32, tmp_path):
    options = {"alpha": 0.25, **SMALL}
    _, theirs = both(keras, "MobileNet", **options)
    theirs.save_weights(tmp_path / "w.weights.h5")
    theirs.save(tmp_path / "m.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the format is old
        theirs.save(tmp_path / "m.h5")
    for name in ("w.weights.h5", "m.keras", "m.h5"):
        ours = applications.MobileNet(weights=tmp_path / name, **options)
        for mine, expected in zip(ours.weights, theirs.weights, strict=True):
            np.testing.assert_array_equal(mine.numpy(), keras.ops.convert_to_numpy(expected))
    assert described(dp.models.load_model(tmp_path / "m.keras")) == described(theirs)
    ours.save(tmp_path / "ours.keras")
    assert described(keras.models.load_model(tmp_path / "ours.keras")) == described(theirs)


@pytest.mark.parametrize("name", ["MobileNetV3Small", "ConvNeXtTiny"])
def test_files_of_networks_with_ops_and_layers_of_their_own(keras, float32, tmp_path, name):
    options = {"input_shape": (32, 32, 3), "classes": 3}
    ours, theirs = both(keras, name, **options)
    ours.save(tmp_path / "ours.keras")
    theirs.save(tmp_path / "theirs.keras")
    reloaded = keras.models.load_model(tmp_path / "ours.keras")
    for mine, expected in (*zip(ours.weights, reloaded.weights, strict=True),):
        np.testing.assert_array_equal(mine.numpy(), keras.ops.convert_to_numpy(expected))
    x = np.random.default_rng(5).uniform(0, 255, (1, 32, 32, 3)).astype(np.float32)
    for file in ("ours.keras", "theirs.keras"):
        loaded = dp.models.load_model(tmp_path / file)
        np.testing.assert_allclose(loaded(x).numpy(), ours(x).numpy(), rtol=1e-5, atol=1e-6)


def test_weights_in_the_layout_of_keras_2(keras, float32, tmp_path):
    """As those that Keras fetches for its networks; of an EfficientNet they have a count in 64 bits."""
    import h5py
    from keras.src.legacy.saving import legacy_h5_format

    options = {**BARE, "pooling": "avg"}
    ours, theirs = both(keras, "EfficientNetB0", **options)
    with h5py.File(tmp_path / "w.h5", "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, theirs)
    loaded = applications.EfficientNetB0(weights=tmp_path / "w.h5", **options)
    for mine, expected in zip(loaded.weights, ours.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), expected.numpy())


def test_a_step_of_training(keras):
    """In float64, of a network without a random layer: loss and every weight, moving statistics among them."""
    keras.utils.clear_session()
    options = {**SMALL, "alpha": 0.35, "input_shape": (32, 32, 3)}
    ours, theirs = (module.MobileNetV2(weights=None, **options) for module in (applications, keras.applications))
    ours.compile(dp.optimizers.SGD(0.01), dp.losses.get(LOGITS), dtype="float64", jit_compile=False)
    theirs.compile(keras.optimizers.SGD(0.01), keras.losses.get(LOGITS))
    ours.set_weights([keras.ops.convert_to_numpy(weight) for weight in theirs.weights])
    rng = np.random.default_rng(7)
    x, y = rng.uniform(-1, 1, (6, 32, 32, 3)), rng.integers(0, 7, 6)
    losses = [[float(model.train_on_batch(x, y)) for _ in range(2)] for model in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=1e-9)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        expected = keras.ops.convert_to_numpy(other)
        np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-7, atol=1e-10)
