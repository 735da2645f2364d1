"""Layers take the arguments of Keras' layers, in their order and with their defaults, and describe themselves alike."""

import inspect
import json

import pytest

from dptrain.layers import LAYERS
from tests.unit.layers.cases import CASES

# What dptrain does without: Keras requires it.
EARLIER = {"AveragePooling2D": "pool_size"}
# Keras takes them as keywords of every layer, and writes them or not.
COMMON = ("name", "dtype", "trainable", "autocast", "activity_regularizer", "input_shape")


def arguments(cls):
    found = inspect.signature(cls.__init__).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    common = ("self", *COMMON, *(() if cls.__name__ == "Embedding" else ("input_dim",)))
    return [(one.name, one.default) for one in found if one.kind in kinds and one.name not in common]


@pytest.mark.parametrize("name", LAYERS)
def test_arguments(keras, name):
    expected = arguments(getattr(keras.layers, name))
    found = [
        (one, inspect.Parameter.empty if EARLIER.get(name) == one else default)
        for one, default in arguments(LAYERS[name])
    ]
    assert found[: len(expected)] == expected


@pytest.mark.parametrize("name", LAYERS)
def test_configurations(keras, name):
    for case in CASES[name]:
        config = case.make().get_config()
        own = {key: one for key, one in config.items() if key not in COMMON}
        theirs = getattr(keras.layers, name).from_config(own).get_config()
        for key in {*theirs, *own} - set(COMMON):
            assert json.dumps(own[key]) == json.dumps(theirs[key]), key
