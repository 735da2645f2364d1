"""Keras' global settings."""

import numpy as np
import pytest

import dptrain as keras
from dptrain.errors import ConfigError
from dptrain.runtime.output import terminal


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16", "float32"])
def test_floatx_is_the_type_of_what_is_made_without_one(name):
    keras.config.set_floatx(name)
    assert keras.config.floatx() == keras.backend.floatx() == name
    tensors = [keras.ops.convert_to_tensor(2.5), keras.ops.convert_to_tensor([1.5]), keras.ops.ones((2,))]
    tensors += [keras.ops.zeros((2,)), keras.random.normal((2,)), keras.random.uniform((2,)), keras.ops.sqrt(4)]
    tensors += [keras.ops.full((2,), 3.0), keras.ops.eye(2), keras.Variable([1.0])]
    assert {tensor.dtype.name for tensor in tensors} == {name}
    assert keras.config.dtype_policy().name == name
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    assert {layer.dtype, layer.compute_dtype, layer.kernel.dtype.name} == {name}


def test_a_cleared_session_has_the_policy_of_floatx_again():
    keras.config.set_dtype_policy("mixed_float16")
    keras.config.set_floatx("float64")
    assert keras.config.dtype_policy().name == "mixed_float16"
    keras.utils.clear_session()
    assert keras.config.dtype_policy().name == "float64"


def test_a_model_of_another_floatx_is_trained():
    keras.config.set_floatx("float64")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    assert {weight.dtype.name for weight in model.weights} == {"float64"}
    assert model.predict(np.ones((4, 3)), verbose=0).dtype == np.float64


def test_a_floatx_that_there_is_not():
    with pytest.raises(ConfigError, match=r"Unknown `floatx` value: int8\. Expected one of"):
        keras.config.set_floatx("int8")


def test_interactive_logging_may_be_turned_off():
    assert keras.config.is_interactive_logging_enabled()
    keras.config.disable_interactive_logging()
    try:
        assert [terminal.verbosity(setting) for setting in (0, 1, 2)] == [0, 2, 2]
        assert not keras.config.is_interactive_logging_enabled()
    finally:
        keras.config.enable_interactive_logging()
    assert terminal.verbosity(1) == 1


def test_tracebacks_are_whole():
    keras.config.disable_traceback_filtering()
    assert not keras.config.is_traceback_filtering_enabled()
    with pytest.raises(ConfigError, match="not supported: traceback filtering"):
        keras.config.enable_traceback_filtering()


@pytest.fixture
def _no_limits():
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


def batches_of(call, *arguments, **options):
    """Return how many batches an evaluation or prediction makes, and what it returns."""
    batches = []

    class Counter(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            batches.append(batch)

        on_predict_batch_end = on_test_batch_end

    return call(*arguments, verbose=0, callbacks=[Counter()], **options), len(batches)


@pytest.mark.usefixtures("_no_limits")
def test_trainings_end_at_the_limits():
    x, y = np.ones((20, 3)), np.ones((20, 1))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    assert (keras.config.max_epochs(), keras.config.max_steps_per_epoch()) == (2, 3)
    assert len(model.fit(x, y, batch_size=3, epochs=9, verbose=0).epoch) == 2
    assert int(model.optimizer.iterations) == 6
    assert batches_of(model.evaluate, x, y, batch_size=4)[1] == 3
    predicted, batches = batches_of(model.predict, x, batch_size=4)
    assert (predicted.shape, batches) == ((12, 1), 3)
    assert batches_of(model.predict, ((x[n : n + 2],) for n in range(0, 20, 2)))[0].shape == (6, 1)
    model.fit(((x[:2], y[:2]) for _ in range(99)), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 9
    keras.config.set_max_steps_per_epoch(50)  # of more than there are
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    assert int(model.optimizer.iterations) == 14
    assert model.predict(x, verbose=0).shape == (20, 1)


@pytest.mark.usefixtures("_no_limits")
def test_limits_are_positive_integers(monkeypatch):
    for value in (0, -1, 1.5, "3", True):
        with pytest.raises(ConfigError, match="expected a positive integer, or None"):
            keras.config.set_max_epochs(value)
    monkeypatch.setattr("dptrain.runtime.limits._limits", {})
    monkeypatch.setenv("KERAS_MAX_EPOCHS", "4")
    monkeypatch.setenv("KERAS_MAX_STEPS_PER_EPOCH", "many")
    assert keras.config.max_epochs() == 4
    with pytest.raises(ConfigError, match="KERAS_MAX_STEPS_PER_EPOCH = 'many': expected a positive integer"):
        keras.config.max_steps_per_epoch()


def test_what_dptrain_does_in_one_way_only():
    keras.config.set_backend("dptrain")
    assert not keras.config.is_nnx_enabled()
    with pytest.raises(ConfigError, match="not supported: backend = 'jax'; expected 'dptrain'"):
        keras.config.set_backend("jax")
    with pytest.raises(ConfigError, match="dptrain runs no code from files"):
        keras.config.enable_unsafe_deserialization()


def test_utils_has_the_switches_of_logging():
    try:
        keras.utils.disable_interactive_logging()
        assert not keras.config.is_interactive_logging_enabled()
        assert not keras.utils.is_interactive_logging_enabled()
    finally:
        keras.utils.enable_interactive_logging()
    assert keras.config.is_interactive_logging_enabled()


# Makers of what maps images to images or features; they are given no format.
OF_IMAGES = {
    "Rescaling": lambda: keras.layers.Rescaling([0.5, 2, -1], [0.1]),
    "Conv2D": lambda: keras.layers.Conv2D(3, 2, padding="same", kernel_initializer="ones"),
    "Conv2DTranspose": lambda: keras.layers.Conv2DTranspose(3, 2, strides=2, kernel_initializer="ones"),
    "DepthwiseConv2D": lambda: keras.layers.DepthwiseConv2D(2, depthwise_initializer="ones"),
    "SeparableConv2D": lambda: keras.layers.SeparableConv2D(
        3, 2, depthwise_initializer="ones", pointwise_initializer="ones"
    ),
    "MaxPooling2D": keras.layers.MaxPooling2D,
    "AveragePooling2D": keras.layers.AveragePooling2D,
    "GlobalAveragePooling2D": lambda: keras.layers.GlobalAveragePooling2D(keepdims=True),
    "UpSampling2D": lambda: keras.layers.UpSampling2D(interpolation="bilinear"),
    "ZeroPadding2D": keras.layers.ZeroPadding2D,
    "Cropping2D": keras.layers.Cropping2D,
    "Resizing": lambda: keras.layers.Resizing(4, 5),
    "CenterCrop": lambda: keras.layers.CenterCrop(4, 5),
    "RandomGrayscale": lambda: keras.layers.RandomGrayscale(1.0),
    "conv": lambda: lambda x: keras.ops.conv(x, np.ones((2, 2, 3, 3), np.float32)),
    "max_pool": lambda: lambda x: keras.ops.max_pool(x, 2),
    "adaptive_max_pool": lambda: lambda x: keras.ops.adaptive_max_pool(x, 3),
    "resize": lambda: lambda x: keras.ops.image.resize(x, (4, 5)),
    "gaussian_blur": lambda: keras.ops.image.gaussian_blur,
    "extract_patches": lambda: lambda x: keras.ops.image.extract_patches(x, (2, 2)),
    "affine_transform": lambda: (
        lambda x: keras.ops.image.affine_transform(x, np.array([[1, 0.2, 1, 0.1, 1, 0, 0, 0]] * 2, np.float32))
    ),
    "rgb_to_hsv": lambda: keras.ops.image.rgb_to_hsv,
}


@pytest.mark.parametrize("name", OF_IMAGES)
def test_images_are_in_the_default_format(name):
    x = np.random.default_rng(0).random((2, 6, 8, 3)).astype(np.float32)
    expected = np.asarray(OF_IMAGES[name]()(x))
    keras.config.set_image_data_format("channels_first")
    assert keras.config.image_data_format() == keras.backend.image_data_format() == "channels_first"
    actual = np.asarray(OF_IMAGES[name]()(x.transpose(0, 3, 1, 2)))
    np.testing.assert_allclose(actual.transpose(0, 2, 3, 1), expected, rtol=1e-5, atol=1e-6)


def test_pictures_are_in_the_default_format(tmp_path):
    pytest.importorskip("PIL")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3)).astype(np.float32)
    keras.utils.save_img(tmp_path / "a.png", pixels, scale=False)
    keras.config.set_image_data_format("channels_first")
    array = keras.utils.img_to_array(keras.utils.load_img(tmp_path / "a.png"))
    np.testing.assert_array_equal(array, pixels.transpose(2, 0, 1))
    keras.utils.save_img(tmp_path / "b.png", array, scale=False)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    dataset = keras.utils.image_dataset_from_directory(tmp_path, labels=None, image_size=(4, 5), shuffle=False)
    np.testing.assert_array_equal(np.asarray(next(iter(dataset)))[0], array)
    means = keras.applications.imagenet_utils.preprocess_input(np.zeros((3, 4, 5), np.float32))[:, 0, 0]
    np.testing.assert_allclose(means, [-103.939, -116.779, -123.68])


def test_a_layer_keeps_the_format_that_it_was_made_with():
    first = keras.layers.Conv2D(3, 2)
    keras.config.set_image_data_format("channels_first")
    assert [first.data_format, keras.layers.Conv2D(3, 2).data_format] == ["channels_last", "channels_first"]
    with pytest.raises(ConfigError, match="applications with image_data_format='channels_first'"):
        keras.applications.MobileNet(weights=None)
    with pytest.raises(ConfigError, match=r"must be one of \{'channels_first', 'channels_last'\}"):
        keras.config.set_image_data_format("channels_middle")
