"""`Lambda`: what its function gets, what is checked, and that no file runs code."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import ConfigError, DataError
from dptrain.program.shapes import without_rows

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def doubled(x):
    return 2 * x


def model_of(function):
    return dp.Sequential([layers.Input((3,)), layers.Lambda(function), layers.Dense(1)])


def test_the_function_gets_what_it_names():
    def function(x, training, mask, by):
        assert mask is None
        return x + by if training else x

    layer = layers.Lambda(function, arguments={"by": 10})
    np.testing.assert_array_equal(layer(X), X)
    np.testing.assert_array_equal(layer(X, training=True), X + 10)
    np.testing.assert_array_equal(layers.Lambda(ops.square)(X), X * X)


def test_several_inputs_and_outputs():
    a, b = layers.Input((3,)), layers.Input((3,))
    total, rest = layers.Lambda(lambda tensors: (tensors[0] + tensors[1], tensors[0] - tensors[1]))([a, b])
    predictions = dp.Model([a, b], [total, rest]).predict([X, X], verbose=0)
    np.testing.assert_array_equal(predictions, [2 * X, 0 * X])


def test_a_model_with_one_is_trained():
    model = model_of(lambda x: ops.log(1 + x))
    model.compile("sgd", "mse")
    first, *_, last = model.fit(X, X[:, :1], epochs=5, verbose=0).history["loss"]
    assert last < first


@pytest.mark.parametrize("shape", [(3,), (None,), lambda shape: (shape[0], 3)])
def test_the_shape_of_the_output_may_be_told(shape):
    assert without_rows(layers.Lambda(doubled, shape)(layers.Input((3,))).shape) == (None, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": 3}, "function = 3: expected a function of tensors"),
        ({"function": doubled, "output_shape": 3}, "output_shape = 3: expected a shape"),
        ({"function": doubled, "output_shape": (4,)}, r"returns shape \(None, 3\), output_shape says \(None, 4\)"),
        ({"function": doubled, "output_shape": (3, 1)}, r"output_shape says \(None, 3, 1\)"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        layers.Lambda(**arguments)(layers.Input((3,)))


# Files


def test_a_file_holds_the_name_of_the_function(tmp_path):
    model = model_of(doubled)
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", {"doubled": doubled})
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    with pytest.raises(DataError, match=r"custom function 'doubled' .* pass it in custom_objects"):
        dp.models.load_model(tmp_path / "m.keras")


def test_a_python_lambda_is_not_written(tmp_path):
    with pytest.raises(ConfigError, match=r"not supported: writing the lambda .*; define it by `def`"):
        model_of(lambda x: x).save(tmp_path / "m.keras")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["function", "output_shape"])
def test_code_from_a_file_is_not_run(key):
    code = {"class_name": "__lambda__", "config": {"code": "4wEAAAAAAAAA", "defaults": None, "closure": None}}
    config = {"function": "relu", key: code}
    described = {"module": "keras.layers", "class_name": "Lambda", "config": config, "registered_name": None}
    with pytest.raises(ConfigError, match="not supported: a Python lambda from a file"):
        layers.deserialize(described)
    with pytest.raises(ConfigError, match="not supported: a Python lambda from a file"):
        dp.saving.deserialize_keras_object(described)
    with pytest.raises(ConfigError, match="not supported: safe_mode=False"):
        dp.saving.deserialize_keras_object(described, safe_mode=False)
