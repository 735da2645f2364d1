"""Policies: what layers and models compute in that nobody has told."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, mixed_precision
from dptrain.errors import ConfigError


@pytest.fixture
def float64():
    mixed_precision.set_global_policy("float64")
    yield
    mixed_precision.set_global_policy("float32")


def test_the_policy_is_that_of_what_is_given_none(float64):
    assert mixed_precision.global_policy() == mixed_precision.Policy("float64")
    assert layers.Dense(2).dtype_policy.variable_dtype == layers.Dense(2).compute_dtype == "float64"
    assert layers.Dense(2, dtype="float32").dtype == "float32"
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse", device="cpu", jit_compile=False)
    x = np.random.default_rng(0).random((4, 3))
    kernel, _ = model.get_weights()
    assert kernel.dtype == np.float64
    np.testing.assert_allclose(model.predict(x, verbose=0), x @ kernel, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", np.float64, np.dtype("float64"), mixed_precision.DTypePolicy("float64")])
def test_what_a_layer_takes_for_its_type(dtype):
    assert layers.Dense(2, dtype=dtype).dtype == "float64"


def test_a_described_policy_is_as_in_keras_configurations():
    described = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float64"}}
    assert layers.Dense(2, dtype=described).dtype == "float64"
    assert mixed_precision.Policy.from_config(mixed_precision.Policy("float32").get_config()).name == "float32"


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16", "float16", "int8"])
def test_half_precision_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"not supported: dtype policy '{name}'; expected 'float32' or 'float64'"):
        mixed_precision.set_global_policy(name)
    with pytest.raises(ConfigError, match=f"not supported: dtype = '{name}' of layer Dense"):
        layers.Dense(2, dtype=name)
    assert mixed_precision.dtype_policy().name == "float32"
