"""Files of models with Keras' operations: each call of one is an operation under Keras' name, and is read back."""

import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.models.operations import described_operations
from dptrain.program import tree
from tests.unit.models.operation_cases import CASES, built

# Of no symbolic tensor, or with results that symbolic tensors lack.
NOT_SYMBOLIC = {
    *("arange", "convert_to_tensor", "copy", "array", "empty", "empty_like", "eye", "full", "geomspace", "identity"),
    *("linspace", "logspace", "ndim", "nonzero", "ones", "size", "tri", "zeros"),
    *("bartlett", "blackman", "hamming", "hanning", "kaiser"),
    "elastic_transform",  # draws random numbers
}


def operations(model):
    """Return the operations of a model as its file lists them, with their calls and without their names."""
    written = json.loads(model.to_json())["config"]["layers"]
    return [layer for layer in written if ".ops" in layer["module"]]


def test_there_is_a_case_of_every_operation():
    names = {
        function.__name__ if hasattr(function, "__name__") else function.name for function in described_operations()
    }
    cases = {name.rstrip("0123456789") for name in CASES} | set(CASES)
    aliases = {"conj": "conjugate"}
    assert {name for name in names if aliases.get(name, name) not in cases} - NOT_SYMBOLIC == set()


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_operations_of_keras_and_is_read_back(name, tmp_path):
    model, samples = built(dp, CASES[name])
    assert all(layer["module"].startswith("keras.src.ops") for layer in operations(model))
    model.save(tmp_path / "model.keras")
    loaded = dp.models.load_model(tmp_path / "model.keras")
    assert operations(loaded) == operations(model)
    for result, expected in zip(tree.leaves(loaded(samples)), tree.leaves(model(samples)), strict=True):
        np.testing.assert_array_equal(result, expected)


def tensor(name, shape, dtype="float32"):
    config = {"shape": [None, *shape], "dtype": dtype, "keras_history": [name, 0, 0]}
    return {"class_name": "__keras_tensor__", "config": config}


X, Y = tensor("x", (4, 6)), tensor("y", (4, 6))
ALL = {"class_name": "__slice__", "config": {"start": None, "stop": None, "step": None}}
FROM_1 = {"class_name": "__slice__", "config": {"start": 1, "stop": None, "step": None}}
NUMBERS = {"class_name": "__numpy__", "config": {"value": [0, 2], "dtype": "int32"}}
# What Keras 3.15 writes: module, class, config and the arguments of the call.
WRITTEN = {
    "mean2": ("numpy", "Mean", {"axis": [1, 2], "keepdims": True}, [X]),
    "concatenate": ("numpy", "Concatenate", {"axis": 1}, [[X, Y]]),
    "einsum": ("numpy", "Einsum", {"subscripts": "bij,bkj->bik"}, [X, Y]),
    "softmax": ("nn", "Softmax", {"axis": -1}, [X]),
    "elu": ("nn", "Elu", {"alpha": 1.0}, [X]),
    "cast": ("core", "Cast", {"dtype": "int32"}, [X]),
    "take": ("numpy", "Take", {"axis": 1}, [X, NUMBERS]),
    "get_item": ("numpy", "GetItem", {}, [X, [ALL, FROM_1]]),
    "reshape": ("numpy", "Reshape", {"newshape": [-1, 24]}, [X]),
    "clip": ("numpy", "Clip", {"x_min": -0.5, "x_max": 0.5}, [X]),
    "subtract2": ("numpy", "Subtract", {}, [2.0, X]),
    "full_like": ("numpy", "FullLike", {"dtype": None}, [X, 3]),
    "fft": ("math", "FFT", {}, [[X, Y]]),
    "remainder of x % y": ("numpy", "Mod", {}, [X, 2]),
    "in_top_k": ("math", "InTopK", {"k": 2}, [tensor("squeeze", (), "int32"), tensor("probabilities", (4,))]),
    "resize": (
        "image",
        "Resize",
        {"size": [4, 5], "interpolation": "bilinear", "antialias": False, "crop_to_aspect_ratio": False}
        | {"pad_to_aspect_ratio": False, "fill_mode": "constant", "fill_value": 0.0, "data_format": None},
        [tensor("image", (8, 8, 3))],
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_operations_are_written_as_keras_writes_them(name):
    module, class_name, config, arguments = WRITTEN[name]
    description = operations(built(dp, CASES[name])[0])[-1]
    assert (description["module"], description["class_name"]) == (f"keras.src.ops.{module}", class_name)
    assert description["registered_name"] == class_name
    assert description["config"] == {"name": description["name"]} | config
    assert description["inbound_nodes"] == [{"args": arguments, "kwargs": {}}]


def test_arguments_of_a_call_are_kept_as_they_were():
    x = layers.Input((4, 6), name="x")
    parts = [x, x]
    y = ops.concatenate(parts, axis=1)
    parts.append(x)
    assert operations(dp.Model(x, y))[0]["inbound_nodes"][0]["args"][0] == [X, X]
    assert dp.Model(x, ops.stack(part for part in (x, x))).output_shape == (2, None, 4, 6)  # a generator is read once


def test_a_length_of_the_batch_is_inferred_by_keras():
    x = layers.Input((4, 6), name="x")
    (written,) = operations(dp.Model(x, ops.reshape(x, (x.shape[0], 24))))
    assert written["config"]["newshape"] == [-1, 24]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_numbers_within_operations_have_the_type_of_the_model(dtype, tmp_path):
    x = layers.Input((4, 6))
    model = dp.Model(x, ops.layer_normalization(layers.Identity()(x), epsilon=0.1))
    model.compile("sgd", "mse", dtype=dtype, jit_compile=False)
    a = np.random.default_rng(0).normal(size=(3, 4, 6))
    expected = (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 0.1)
    result = model.predict(a, verbose=0)
    np.testing.assert_allclose(result, expected, atol=1e-13 if dtype == "float64" else 1e-5)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(dp.models.load_model(tmp_path / "model.keras").predict(a, verbose=0), result)


@pytest.mark.parametrize(("step", "sum_of_steps"), [(lambda x: ops.roll(x, 4, axis=1), 0), (lambda x: x + 1, 1500)])
def test_a_chain_of_operations_may_be_long(step, sum_of_steps):
    x = y = layers.Input((4,))
    for _ in range(1500):
        y = step(y)
    a = np.arange(4, dtype=np.float32)[None]
    np.testing.assert_array_equal(dp.Model(x, y)(a), a + sum_of_steps)
