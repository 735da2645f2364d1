"""Tensors of float8, against Keras: roundings and overflows on JAX, arithmetic, and files that Keras reads."""

import ml_dtypes
import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.errors import ConfigError

TYPES = ["float8_e4m3fn", "float8_e5m2"]
X = np.float32([1, 2.5, -3, 1.0625, 448, 464, 465, 480, 57344, 61439, 61440, 1e9, 0.0009765625, 1e-9, -0.0, 0.3])
X = np.concatenate([X, np.float32([np.inf, -np.inf, np.nan])])


@pytest.fixture
def jax(keras):
    if keras.backend.backend() != "jax":
        pytest.skip("PyTorch clamps some of these numbers")
    return keras


def as_wide(tensor):
    array = tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(tensor)
    return array.astype(np.float32) if array.dtype.name in TYPES else array


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "function",
    [
        lambda o, x, dtype: o.cast(x, dtype),
        lambda o, x, dtype: o.cast(o.cast(o.cast(x, "bfloat16"), dtype), "float64"),
        lambda o, x, dtype: o.cast(o.cast(x, "float8_e5m2"), dtype),
        lambda o, x, dtype: o.cast(np.arange(-128, 128, dtype=np.int8), dtype),
        lambda o, x, dtype: o.cast(o.cast(x, dtype), "bool"),
        lambda o, x, dtype: o.saturate_cast(x, dtype),
        lambda o, x, dtype: o.cast(x, dtype) * o.cast(x, dtype),
        lambda o, x, dtype: o.cast(x, dtype) + 1.5,
        lambda o, x, dtype: o.cast(x[:4], dtype) * np.int32([1, 2, 3, 4]),
        lambda o, x, dtype: o.relu(o.cast(x, dtype)),
        lambda o, x, dtype: o.isfinite(o.cast(x, dtype)),
        lambda o, x, dtype: o.concatenate([o.cast(x, dtype)[2:5], o.ones((2,), dtype)]),
    ],
)
def test_results(jax, function, dtype):
    expected, actual = function(jax.ops, X, dtype), function(ops, X, dtype)
    assert ops.dtype(actual) == jax.backend.standardize_dtype(expected.dtype)
    np.testing.assert_array_equal(as_wide(actual), as_wide(expected))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("other", ["float32", "bfloat16", *TYPES])
def test_another_floating_point_type_beside_it_is_refused(jax, dtype, other):
    if other == dtype:
        return
    x, y = (jax.ops.ones((2,), name) for name in (dtype, other))
    with pytest.raises(Exception, match="8-bit floats do not support implicit promotion"):
        x + y
    with pytest.raises(ConfigError, match="There is no implicit conversions from float8 dtypes to others"):
        ops.ones((2,), dtype) + ops.ones((2,), other)


@pytest.mark.parametrize("dtype", TYPES)
def test_keras_reads_weights(keras, tmp_path, dtype):
    values = np.array([0.3, 448, -7.7])

    def build(library):
        class Scale(library.layers.Layer):
            def build(self, shape):
                self.scale = self.add_weight(shape=(3,), initializer="ones", dtype=dtype, name="scale")

            def call(self, x):
                return x

        model = library.Sequential([library.Input((3,)), Scale(name="scale")])
        model.build((None, 3))
        return model

    ours, theirs = build(dp), build(keras)
    ours.weights[0].assign(values)
    ours.save_weights(tmp_path / "model.weights.h5")
    theirs.load_weights(tmp_path / "model.weights.h5")
    assert keras.backend.standardize_dtype(theirs.weights[0].dtype) == dtype
    loaded = keras.ops.convert_to_numpy(keras.ops.cast(theirs.weights[0], "float32"))
    np.testing.assert_array_equal(loaded, values.astype(getattr(ml_dtypes, dtype)).astype(np.float32))
