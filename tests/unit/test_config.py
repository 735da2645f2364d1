"""Keras' global settings."""

import numpy as np
import pytest

import dptrain as keras
from dptrain.errors import ConfigError
from dptrain.runtime import terminal


@pytest.fixture(autouse=True)
def _float32_again():
    yield
    keras.config.set_floatx("float32")


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16", "float32"])
def test_floatx_is_the_type_of_what_is_made_without_one(name):
    keras.config.set_floatx(name)
    assert keras.config.floatx() == keras.backend.floatx() == name
    made = [keras.ops.convert_to_tensor(2.5), keras.ops.convert_to_tensor([1.5]), keras.ops.ones((2,))]
    made += [keras.ops.zeros((2,)), keras.random.normal((2,)), keras.random.uniform((2,)), keras.ops.sqrt(4)]
    made += [keras.ops.full((2,), 3.0), keras.ops.eye(2), keras.Variable([1.0])]
    assert {one.dtype.name for one in made} == {name}
    assert keras.config.dtype_policy().name == name
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    assert {layer.dtype, layer.compute_dtype, layer.kernel.dtype.name} == {name}


def test_a_model_of_another_floatx_is_trained():
    keras.config.set_floatx("float64")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    assert {one.dtype.name for one in model.weights} == {"float64"}
    assert model.predict(np.ones((4, 3)), verbose=0).dtype == np.float64


def test_a_floatx_that_there_is_not():
    with pytest.raises(ConfigError, match=r"Unknown `floatx` value: int8\. Expected one of"):
        keras.config.set_floatx("int8")


def test_interactive_logging_may_be_turned_off():
    assert keras.config.is_interactive_logging_enabled()
    keras.config.disable_interactive_logging()
    try:
        assert [terminal.verbosity(one) for one in (0, 1, 2)] == [0, 2, 2]
        assert not keras.config.is_interactive_logging_enabled()
    finally:
        keras.config.enable_interactive_logging()
    assert terminal.verbosity(1) == 1


def test_tracebacks_are_whole():
    keras.config.disable_traceback_filtering()
    assert not keras.config.is_traceback_filtering_enabled()
    with pytest.raises(ConfigError, match="not supported: traceback filtering"):
        keras.config.enable_traceback_filtering()
