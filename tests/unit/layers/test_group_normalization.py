"""Normalization within a sample: what is too large for half precision, and inputs of another rank."""

import numpy as np
import pytest

from dptrain import layers as L  # noqa: N812

LARGE = np.array([[1.0, 2.0, 70000.0, 4.0]], np.float32).reshape(1, 1, 1, 4)


@pytest.mark.parametrize("make", [lambda **o: L.GroupNormalization(2, **o), L.LayerNormalization])
def test_inputs_are_not_rounded_to_half_precision_first(make):
    output = make(dtype="mixed_float16")(LARGE)
    assert output.dtype.name == "float16"
    np.testing.assert_allclose(output.numpy().astype(float), make()(LARGE).numpy(), atol=2e-3)


@pytest.mark.parametrize("make", [lambda **o: L.GroupNormalization(2, **o), L.LayerNormalization])
def test_float64_is_computed_in_float64(make):
    x = np.random.default_rng(1).normal(size=(3, 2, 4))
    assert (make(dtype="float64")(x).numpy() != make(dtype="float64")(x.astype(np.float32)).numpy()).any()
    assert make(dtype="float64")(x).dtype.name == "float64"


@pytest.mark.parametrize("make", [L.RMSNormalization, L.LayerNormalization, L.UnitNormalization])
def test_the_last_axis_is_the_last_of_inputs_of_any_rank(make):
    layer = make()
    layer(np.ones((2, 3, 4), np.float32))
    x = np.random.default_rng(1).normal(size=(2, 3, 5, 4)).astype(np.float32)
    rows = layer(x.reshape(2, 15, 4)).numpy().reshape(x.shape)
    np.testing.assert_allclose(layer(x).numpy(), rows, rtol=1e-6)
