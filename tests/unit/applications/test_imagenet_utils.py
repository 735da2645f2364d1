"""Images and outputs of ImageNet's networks."""

import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.applications import efficientnet, imagenet_utils, mobilenet_v2, resnet, resnet50, vgg16, vgg19
from dptrain.errors import ConfigError, DataError

RNG = np.random.default_rng(4)


@pytest.mark.parametrize("mode", ["caffe", "tf", "torch"])
@pytest.mark.parametrize("data_format", [None, "channels_last", "channels_first"])
@pytest.mark.parametrize("rank", [3, 4])
def test_arrays_and_tensors_are_the_same(mode, data_format, rank):
    images = RNG.uniform(0, 255, (2, 4, 5, 3)[-rank:]).astype(np.float32)
    if data_format == "channels_first":
        images = np.moveaxis(images, -1, -3)
    before = images.copy()
    preprocessed = imagenet_utils.preprocess_input(images, data_format, mode)
    assert isinstance(preprocessed, np.ndarray)
    assert preprocessed.dtype == np.float32
    np.testing.assert_array_equal(images, before)
    as_tensor = imagenet_utils.preprocess_input(ops.convert_to_tensor(images), data_format, mode)
    np.testing.assert_array_equal(as_tensor.numpy(), preprocessed)
    whole = imagenet_utils.preprocess_input(images.astype(np.uint8), data_format, mode)
    assert whole.dtype == np.float32
    of_integers = imagenet_utils.preprocess_input(ops.convert_to_tensor(images.astype(np.uint8)), data_format, mode)
    assert of_integers.dtype == np.float32


def test_values():
    image = np.array([[[0.0, 127.5, 255.0]]])
    np.testing.assert_allclose(mobilenet_v2.preprocess_input(image), [[[-1, 0, 1]]])
    for module in (resnet, resnet50, vgg16, vgg19):
        np.testing.assert_allclose(module.preprocess_input(image), [[[255 - 103.939, 127.5 - 116.779, -123.68]]])
    assert efficientnet.preprocess_input(image) is image


def test_in_a_model():
    inputs = dp.Input((4, 4, 3), dtype="uint8")
    model = dp.Model(inputs, vgg16.preprocess_input(ops.cast(inputs, "float32")))
    images = RNG.integers(0, 256, (3, 4, 4, 3)).astype(np.uint8)
    np.testing.assert_allclose(model.predict(images, verbose=0), vgg16.preprocess_input(images), rtol=1e-6)


def test_words_come_from_a_local_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "cache"))
    outputs = np.zeros((2, 1000), np.float32)
    outputs[0, [7, 3]], outputs[1, 999] = (0.7, 0.3), 1
    path = tmp_path / "models" / "imagenet_class_index.json"
    with pytest.raises(ConfigError, match=f"no file {path} or .*cache.models.imagenet_class_index.json; put Keras'"):
        imagenet_utils.decode_predictions(outputs)
    path.parent.mkdir()
    path.write_text(json.dumps({str(n): [f"n{n}", f"word {n}"] for n in range(1000)}))
    decoded = resnet.decode_predictions(outputs, top=2)
    assert [prediction[:2] for prediction in decoded[0]] == [("n7", "word 7"), ("n3", "word 3")]
    assert decoded[1][0] == ("n999", "word 999", 1)
    assert len(imagenet_utils.decode_predictions(ops.convert_to_tensor(outputs))[0]) == 5
    with pytest.raises(ConfigError, match=r"2D array of shape \(samples, 1000\)"):
        imagenet_utils.decode_predictions(outputs[:, :10])
    path.write_text("{}")
    with pytest.raises(DataError, match="class 0: expected"):
        imagenet_utils.decode_predictions(outputs)
    path.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(DataError, match="more than 1048576 bytes"):
        imagenet_utils.decode_predictions(outputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "jax"}, "Expected mode to be one of"),
        ({"data_format": "first"}, "Expected data_format to be one of"),
        ({"data_format": "channels_first"}, "three channels"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        imagenet_utils.preprocess_input(np.zeros((2, 4, 5, 3)), **arguments)


def test_networks_that_are_not_there_say_so():
    with pytest.raises(AttributeError, match=r"not supported: applications\.NASNetLarge: Keras has it"):
        _ = dp.applications.NASNetLarge
