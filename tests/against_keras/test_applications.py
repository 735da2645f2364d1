"""Every network's `preprocess_input` and `decode_predictions`."""

import importlib
import json

import numpy as np
import pytest

from dptrain import applications

MODULES = [name for name in applications.__all__ if name != "imagenet_utils"]


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
