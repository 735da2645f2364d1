"""Files of functional, nested and subclassed models; those of Sequential ones are in tests/unit/saving."""

import json
import zipfile
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.errors import ConfigError, DataError

h5py = pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

RNG = np.random.default_rng(3)
A, B = RNG.random((14, 6)), RNG.random((14, 4))
CPU = {"device": "cpu", "dtype": "float64"}


def branches() -> dp.Model:
    """Two inputs, a shared layer, a model in it, ops between layers, two outputs."""
    a, b = layers.Input((6,), name="a"), layers.Input((4,), name="b")
    shared = layers.Dense(4, "tanh", name="shared")
    inner_in = layers.Input((4,))
    inner = dp.Model(inner_in, layers.BatchNormalization()(layers.Dense(4)(inner_in)))
    first = inner(shared(layers.Dense(4, "relu")(a)))
    both = layers.Add()([first, inner(shared(b))])
    both = ops.maximum(both * 0.5, 0.01) + first
    merged = layers.Concatenate()([both, layers.Dropout(0.25)(b)])
    stack = dp.Sequential([layers.Dense(3), layers.Activation("softmax")])
    return dp.Model([a, b], {"kind": stack(merged), "size": layers.Dense(1, name="size")(merged)}, seed=4)


def compiled(model: dp.Model) -> dp.Model:
    model.compile(
        dp.optimizers.Adam(0.01),
        {"kind": "sparse_categorical_crossentropy", "size": dp.losses.Huber()},
        loss_weights={"kind": 1.0, "size": 0.5},
        metrics={"kind": ["accuracy"], "size": dp.metrics.MeanAbsoluteError(name="off")},
        **CPU,
    )
    return model


X = [A, B]
Y = {"kind": np.arange(14) % 3, "size": A[:, :1]}


def fit(model: dp.Model) -> list[float]:
    return model.fit(X, Y, batch_size=5, epochs=2, verbose=0).history["loss"]


def assert_same(model: dp.Model, other: dp.Model, x: Any = X) -> None:
    expected, actual = model.predict(x, verbose=0), other.predict(x, verbose=0)
    if isinstance(expected, dict):
        assert list(expected) == list(actual)
        expected, actual = list(expected.values()), list(actual.values())
    np.testing.assert_equal(actual, expected)


def test_a_functional_model_there_and_back(tmp_path):
    model = compiled(branches())
    fit(model)
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", **CPU)
    assert loaded.get_config() == model.get_config()
    assert [weight._path for weight in loaded.weights] == [weight._path for weight in model.weights]
    assert_same(model, loaded)
    assert fit(loaded) == fit(model)
    assert_same(model, loaded)


@pytest.mark.parametrize("ending", [".weights.h5", ".safetensors"])
def test_weights_of_a_functional_model(tmp_path, ending):
    model, other = compiled(branches()), compiled(branches())
    fit(model)
    model.save_weights(tmp_path / f"w{ending}")
    other.load_weights(tmp_path / f"w{ending}")
    assert_same(model, other)


def test_groups_are_keras_own(tmp_path):
    branches().save_weights(tmp_path / "w.weights.h5")
    names: list[str] = []
    with h5py.File(tmp_path / "w.weights.h5") as file:
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    inner = [f"layers/functional/layers/dense/vars/{n}" for n in range(2)]
    inner += [f"layers/functional/layers/batch_normalization/vars/{n}" for n in range(4)]
    dense = [f"layers/{name}/vars/{n}" for name in ("dense", "dense_1", "dense_2") for n in range(2)]
    rest = [f"layers/sequential/layers/dense/vars/{n}" for n in range(2)]
    assert sorted(names) == sorted([*inner, *dense, *rest, "layers/dropout/seed_generator/vars/0"])


def test_the_configuration_of_a_functional_model_is_keras_own():
    x = layers.Input((3,), name="x")
    layer = layers.Dense(3, name="twice")
    model = dp.Model(x, layer(layer(x)), name="mine")
    config = json.loads(json.dumps(model.get_config()))
    assert (config["name"], config["trainable"]) == ("mine", True)
    assert config["input_layers"] == ["x", 0, 0]
    assert config["output_layers"] == ["twice", 1, 0]
    start, dense = config["layers"]
    assert start["config"] == {
        "batch_shape": [None, 3],
        "dtype": "float32",
        "sparse": False,
        "ragged": False,
        "name": "x",
    }
    assert (start["class_name"], start["inbound_nodes"], start["name"]) == ("InputLayer", [], "x")

    def tensor(history: list) -> dict:
        arguments = {"shape": [None, 3], "dtype": "float32", "keras_history": history}
        return {"class_name": "__keras_tensor__", "config": arguments}

    assert dense["inbound_nodes"] == [
        {"args": [tensor(["x", 0, 0])], "kwargs": {}},
        {"args": [tensor(["twice", 0, 0])], "kwargs": {}},
    ]
    assert dense["build_config"] == {"input_shape": [None, 3]}
    document = json.loads(model.to_json())
    assert (document["module"], document["class_name"]) == ("keras.src.models.functional", "Functional")
    assert document["build_config"] == {"input_shape": [None, 3]}
    restored = dp.models.model_from_json(model.to_json())
    assert restored.get_config() == model.get_config()


def test_layers_may_be_listed_in_any_order():
    config = branches().get_config()
    config["layers"].reverse()
    restored = dp.Model.from_config(config)
    assert {layer.name for layer in restored.layers} == {layer.name for layer in branches().layers}
    assert [weight.shape for weight in restored.weights] == [weight.shape for weight in branches().weights]


def test_ops_are_keras_own_where_it_has_them():
    x = layers.Input((3,))
    model = dp.Model(x, ops.relu(x + 1.0) * x)
    ops_of_layers = [(layer["module"], layer["class_name"]) for layer in model.get_config()["layers"][1:]]
    numpy = "keras.src.ops.numpy"
    assert ops_of_layers == [(numpy, "Add"), ("keras.src.ops.nn", "Relu"), (numpy, "Multiply")]
    assert_same(model, dp.Model.from_config(model.get_config()), A[:, :3])
    model = dp.Model(x, ops.sum(x, 1, keepdims=True))
    (described,) = model.get_config()["layers"][1:]
    assert (described["module"], described["class_name"]) == (numpy, "Sum")
    assert_same(model, dp.Model.from_config(model.get_config()), A[:, :3])


def test_parts_of_samples_are_keras_own():
    x = layers.Input((3,))
    model = dp.Model(x, [x[:, 1:], x[:, 0], x[..., ::2]])
    op_layers = model.get_config()["layers"][1:]
    assert [(layer["module"], layer["class_name"]) for layer in op_layers] == [("keras.src.ops.numpy", "GetItem")] * 3
    rows = {"class_name": "__slice__", "config": {"start": None, "stop": None, "step": None}}
    slice_config = {"class_name": "__slice__", "config": {"start": 1, "stop": None, "step": None}}
    assert op_layers[0]["inbound_nodes"][0]["args"][1] == [rows, slice_config]
    assert op_layers[1]["inbound_nodes"][0]["args"][1] == [rows, 0]
    restored = dp.Model.from_config(model.get_config())
    for actual, two in zip(model(A[:, :3]), restored(A[:, :3]), strict=True):
        np.testing.assert_array_equal(actual, two)


def test_parts_of_the_rows_are_read_back():
    x = layers.Input((3,))
    model = dp.Model(x, x[1:])
    restored = dp.Model.from_config(model.get_config())
    assert restored.get_config() == model.get_config()
    np.testing.assert_array_equal(restored(A[:, :3]), model(A[:, :3]))


def test_ops_of_earlier_files_are_read():
    x = layers.Input((3,), name="x")
    config = dp.Model(x, ops.sum(x, 1, keepdims=True)).get_config()
    argument = config["layers"][1]["inbound_nodes"][0]["args"][0]
    config["layers"][1] |= {
        "module": "dptrain.ops",
        "class_name": "reduce_sum",
        "config": {"name": "sum", "axes": [1], "keepdims": True},
        "registered_name": None,
        "inbound_nodes": [{"args": [argument], "kwargs": {}}],
    }
    restored = dp.Model.from_config(config)
    assert dp.Model.from_config(restored.get_config()).get_config() == restored.get_config()
    np.testing.assert_allclose(np.ravel(restored(A[:, :3])), A[:, :3].sum(1), rtol=1e-6)


def changed(**changes: Any) -> dict[str, Any]:
    x = layers.Input((3,), name="x")
    return dp.Model(x, layers.Dense(2, name="d")(x), name="m").get_config() | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_layers": ["d", 1, 0]}, "an output does not come from a layer"),
        ({"output_layers": ["e", 0, 0]}, "an output does not come from a layer"),
        ({"output_layers": 3}, "expected the layers of inputs and outputs"),
        ({"layers": changed()["layers"] * 2}, "unique"),
        ({"layers": changed()["layers"][1:]}, "the inputs of layer 'd' do not come from layers"),
        ({"layers": [{"module": "keras.src.ops.numpy", "class_name": "Fft", "config": {}}]}, "operation 'Fft'"),
    ],
)
def test_configurations_that_make_no_model(changes, message):
    with pytest.raises(ConfigError, match=message):
        dp.Model.from_config(changed(**changes))


def test_configurations_of_keras_2():
    given = {"batch_input_shape": [None, 3], "dtype": "float32", "name": "x"}
    listed = [
        {"class_name": "InputLayer", "name": "x", "config": given, "inbound_nodes": []},
        {"class_name": "Dense", "name": "a", "config": {"units": 4, "name": "a"}, "inbound_nodes": [[["x", 0, 0, {}]]]},
        {"class_name": "Dense", "name": "b", "config": {"units": 2, "name": "b"}, "inbound_nodes": [[["a", 0, 0, {}]]]},
    ]
    config = {"name": "m", "layers": listed, "input_layers": [["x", 0, 0]], "output_layers": [["b", 0, 0]]}
    assert dp.Model.from_config(config).output_shape == (None, 2)
    listed[1]["inbound_nodes"] = [[["b", 0, 0, {}]]]
    with pytest.raises(ConfigError, match="or the layers form a cycle"):
        dp.Model.from_config(config)


def test_a_graph_that_begins_in_the_middle_of_another_is_written(tmp_path):
    x = layers.Input((3,))
    hidden = layers.Dense(4)(x)
    model = dp.Model(hidden, layers.Dense(2)(hidden))
    model.save(tmp_path / "model.keras")
    loaded, rows = dp.models.load_model(tmp_path / "model.keras"), np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(loaded.predict(rows, verbose=0), model.predict(rows, verbose=0))


def test_frozen_layers_stay_frozen(tmp_path):
    x = layers.Input((6,))
    frozen = layers.Dense(4)
    frozen.trainable = False
    model = dp.Model(x, layers.Dense(2)(frozen(x)))
    assert [weight._path for weight in model.trainable_weights] == ["dense_1/kernel", "dense_1/bias"]
    model.compile("adam", "mse", **CPU)
    model.fit(A, B[:, :2], verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", **CPU)
    assert [weight._path for weight in loaded.trainable_weights] == ["dense_1/kernel", "dense_1/bias"]
    assert len(loaded.optimizer.variables) == 6
    assert_same(model, loaded, A)


@pytest.mark.parametrize("optimizer", ["Adam", "Nadam", "RMSprop"])
def test_slots_are_in_order_whatever_was_trained_first(tmp_path, optimizer):
    model = dp.Sequential([layers.Dense(6, input_shape=(6,)), layers.Dense(6), layers.Dense(4)])
    model.layers[0].trainable = False
    model.compile(getattr(dp.optimizers, optimizer)(0.01, use_ema=True), "mse", **CPU)
    model.fit(A, B, verbose=0)
    model.layers[0].trainable = True
    model.fit(A, B, verbose=0)
    model.layers[1].trainable = False
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", **CPU)
    for net in (model, loaded):
        net.fit(A, B, epochs=2, verbose=0)
    assert_same(model, loaded, A)


# Subclasses


class Tower(dp.Model):
    """Layers as attributes, in a list, and random numbers; an optimizer of its own."""

    def __init__(self, units: int = 5, **options: Any) -> None:
        super().__init__(**options)
        self.units = units
        self.b_first = layers.Dense(units, "relu")
        self.a_rest = [layers.Dense(units), layers.Dropout(0.5), layers.Dense(2)]

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = self.b_first(inputs)
        for layer in self.a_rest:
            x = layer(x)
        return x


def test_a_subclassed_model_needs_its_class(tmp_path):
    model = Tower(7, seed=2)
    model.compile("adam", "mse", metrics=["mae"], **CPU)
    model.fit(A, B[:, :2], batch_size=5, verbose=0)
    model.save(tmp_path / "m.keras")
    with pytest.raises(DataError, match=r"custom object 'Tower' of module .*; pass its class in custom_objects"):
        dp.models.load_model(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", {"Tower": Tower}, **CPU)
    assert (type(loaded), loaded.units) == (Tower, 7)
    assert_same(model, loaded, A)
    for net in (model, loaded):
        net.fit(A, B[:, :2], batch_size=5, verbose=0)
    assert_same(model, loaded, A)
    with h5py.File(_weights(model, tmp_path)) as file:
        assert sorted(file) == ["a_rest", "b_first", "optimizer", "vars"]
        assert sorted(file["a_rest"]) == ["dense", "dense_1", "dropout"]


def _weights(model: dp.Model, folder: Any) -> Any:
    model.save_weights(folder / "w.weights.h5")
    return folder / "w.weights.h5"


class Stepping(dp.Model):
    """Made of inputs and outputs, with a step of its own."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def test_a_model_with_a_step_of_its_own_is_functional(tmp_path):
    x = layers.Input((6,))
    model = Stepping(x, layers.Dense(2)(x))
    model.compile("sgd", "mse", **CPU)
    model.fit(A, B[:, :2], verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", {"Stepping": Stepping}, **CPU)
    assert type(loaded) is Stepping
    assert_same(model, loaded, A)


def squared(y_true: Any, y_pred: Any) -> Any:
    return ops.square(y_true - y_pred)


def test_a_loss_of_ones_own_is_found_by_custom_objects(tmp_path):
    model = dp.Sequential([layers.Dense(4, input_shape=(6,))])
    model.compile("sgd", squared, metrics=[squared], **CPU)
    model.fit(A, B, verbose=0)
    model.save(tmp_path / "m.keras")
    with pytest.raises(DataError, match="custom function 'squared'"):
        dp.models.load_model(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", {"squared": squared}, **CPU)
    assert loaded.evaluate(A, B, verbose=0) == model.evaluate(A, B, verbose=0)


class Compiling(Tower):
    """With a `compile` of its own."""

    def compile(self, other: Any, **options: Any) -> None:
        super().compile("sgd", "mse", **options)
        self.other = dp.optimizers.get(other)


def test_a_compile_of_ones_own_is_not_called(tmp_path):
    model = Compiling(3)
    model.compile("adam", **CPU)
    model.fit(A, B[:, :2], verbose=0)
    model.save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match=r"`compile\(\)` was not called as part of model loading"):
        loaded = dp.models.load_model(tmp_path / "m.keras", {"Compiling": Compiling})
    assert not loaded.compiled
    np.testing.assert_equal(loaded.get_weights(), model.get_weights())


def test_a_model_without_shape_has_no_files(tmp_path):
    for call in (lambda model: model.save(tmp_path / "m.h5"), lambda model: model.export(tmp_path / "p")):
        with pytest.raises(ConfigError, match="has no weights yet: call it on data"):
            call(Tower())


def test_a_model_that_was_only_called_goes_into_files(tmp_path):
    model = Tower(3)
    expected = model(A).numpy()
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", {"Tower": Tower})
    np.testing.assert_array_equal(loaded(A).numpy(), expected)
    model.export(tmp_path / "p")
    np.testing.assert_allclose(dp.saving.load_program(tmp_path / "p", device="cpu")(A), expected, rtol=1e-5)


# Names


def test_models_in_a_model_are_numbered():
    x = layers.Input((6,))
    first, second = (dp.Sequential([layers.Dense(6)]) for _ in range(2))
    mine = dp.Sequential([layers.Dense(2)], name="sequential_1")
    model = dp.Model(x, mine(second(first(x))))
    assert [layer.name for layer in model.layers] == ["input_layer", "sequential", "sequential_2", "sequential_1"]
    assert [weight._path for weight in model.weights][::2] == [
        "sequential/dense/kernel",
        "sequential_2/dense/kernel",
        "sequential_1/dense/kernel",
    ]
    assert list(second._named_weights()) == ["dense/kernel", "dense/bias"]
    with pytest.raises(ConfigError, match="unique"):
        dp.Model(x, dp.Sequential([layers.Dense(2)], name="a")(dp.Sequential([layers.Dense(2)], name="a")(x)))


def remembering():
    """Return a compiled model that takes data frames of the columns "a" and "b"."""
    model = dp.Sequential([layers.Input((3,)), layers.Dense(1)])
    model.compile(loss="mse")
    columns = (Column("a", "number"), Column("b", "one-hot", ("x", "y")))
    model.preprocessing = Preprocessing("regression", columns, "t")
    return model


def test_raw_columns_are_remembered_in_files(tmp_path):
    model, frame = remembering(), pd.DataFrame({"b": ["y", "x"], "t": [1, 2], "a": [3, 4]})
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras")
    assert loaded.preprocessing == model.preprocessing
    x = np.array([[3, 0, 1], [4, 1, 0]], np.float32)
    np.testing.assert_array_equal(loaded.predict(frame, verbose=0), model.predict(x, verbose=0))
    assert loaded.evaluate(frame, verbose=0) == model.evaluate(x, np.array([1, 2]), verbose=0)


def test_a_file_with_other_raw_columns_than_it_may_have_is_refused(tmp_path):
    remembering().save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as archive, zipfile.ZipFile(tmp_path / "n.keras", "w") as copy:
        for name in archive.namelist():
            content = archive.read(name)
            copy.writestr(name, content.replace(b"one-hot", b"__import__") if name == "preprocessing.json" else content)
    with pytest.raises(DataError, match=r"preprocessing.json: columns.1.role = '__import__'"):
        dp.models.load_model(tmp_path / "n.keras")
