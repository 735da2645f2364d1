"""Whole models of Keras 2: `.h5`, JSON and the `.keras` of 2.15, by hand as it wrote them, and `.h5` there and back."""

import io
import json
import zipfile
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError, DataError
from dptrain.saving import keras_2_config, keras_2_h5

h5py = pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

RNG = np.random.default_rng(4)
X, Y = RNG.random((8, 3)), RNG.random((8, 2))
CPU = {"device": "cpu", "run_eagerly": True}
KERNEL, BIAS, OUTER = RNG.random((3, 2)), RNG.random(2), RNG.random((4, 2))


def described(class_name: str, *, of_2_15: bool, **config: Any) -> dict[str, Any]:
    """Return a layer as Keras 2 describes it; its `.keras` names modules, its `.h5` does not."""
    module = {"module": "keras.layers", "registered_name": None} if of_2_15 else {}
    if class_name == "Functional":
        module = {"module": "keras.src.engine.functional", "registered_name": "Functional"} if of_2_15 else {}
    if class_name == "Sequential":
        module = {"module": "keras", "registered_name": None} if of_2_15 else {}
    return {**module, "class_name": class_name, "config": config}


def dense(name: str, *, of_2_15: bool, units: int = 2) -> dict[str, Any]:
    module = {"module": "keras.initializers", "registered_name": None} if of_2_15 else {}
    glorot = {**module, "class_name": "GlorotUniform", "config": {"seed": None}}
    zeros = {**module, "class_name": "Zeros", "config": {}}
    config = {"name": name, "trainable": True, "dtype": "float32", "units": units, "activation": "linear"}
    config |= {"use_bias": True, "kernel_initializer": glorot, "bias_initializer": zeros, "kernel_regularizer": None}
    config |= {
        "bias_regularizer": None,
        "activity_regularizer": None,
        "kernel_constraint": None,
        "bias_constraint": None,
    }
    return described("Dense", of_2_15=of_2_15, **config)


def start(name: str, *, of_2_15: bool) -> dict[str, Any]:
    config = {"batch_input_shape": [None, 3], "dtype": "float32", "sparse": False, "ragged": False, "name": name}
    return described("InputLayer", of_2_15=of_2_15, **config)


def functional(*, of_2_15: bool) -> dict[str, Any]:
    """Return a model that calls a Sequential twice: y = [inner(x), dense(concatenate([inner(x), inner(x)]))]."""
    inner = described(
        "Sequential",
        of_2_15=of_2_15,
        name="inner",
        layers=[start("inner_input", of_2_15=of_2_15), dense("hidden", of_2_15=of_2_15)],
    )
    listed = [
        start("input_1", of_2_15=of_2_15) | {"inbound_nodes": []},
        inner | {"inbound_nodes": [[["input_1", 0, 0, {}]], [["input_1", 0, 0, {}]]]},
        described("Concatenate", of_2_15=of_2_15, name="both", trainable=True, dtype="float32", axis=-1)
        | {"inbound_nodes": [[["inner", 1, 0, {}], ["inner", 2, 0, {}]]]},
        dense("outer", of_2_15=of_2_15) | {"inbound_nodes": [[["both", 0, 0, {}]]]},
    ]
    listed = [layer_config | {"name": layer_config["config"]["name"]} for layer_config in listed]
    ends = {"input_layers": [["input_1", 0, 0]], "output_layers": [["inner", 2, 0], ["outer", 0, 0]]}
    return described("Functional", of_2_15=of_2_15, name="model", trainable=True, layers=listed, **ends)


def optimizer(*, of_2_15: bool) -> dict[str, Any]:
    config = {"name": "Adam", "learning_rate": 0.5, "decay": 0.0, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-07}
    config |= {"amsgrad": False, "weight_decay": None, "clipnorm": None, "global_clipnorm": None, "clipvalue": None}
    config |= {"use_ema": False, "ema_momentum": 0.99, "ema_overwrite_frequency": None, "jit_compile": False}
    config |= {"is_legacy_optimizer": False}
    if not of_2_15:
        return {"class_name": "Custom>Adam", "config": config}
    config.pop("decay")
    return {"module": "keras.optimizers", "class_name": "Adam", "config": config, "registered_name": "Adam"}


TRAINING = {"loss": "mse", "metrics": None, "weighted_metrics": None, "loss_weights": None}


def write_h5(path: Any, config: dict[str, Any], **attributes: Any) -> None:
    arrays = {"inner": {"hidden/kernel:0": KERNEL, "hidden/bias:0": BIAS}}
    arrays["outer"] = {"outer/kernel:0": OUTER, "outer/bias:0": BIAS}
    with h5py.File(path, "w") as file:
        file.attrs["model_config"], file.attrs["keras_version"] = json.dumps(config), "2.15.0"
        for name, value in attributes.items():
            file.attrs[name] = json.dumps(value)
        root = file.create_group("model_weights")
        root.attrs["layer_names"] = [b"input_1", b"inner", b"both", b"outer"]
        for name in ("input_1", "inner", "both", "outer"):
            group = root.create_group(name)
            group.attrs["weight_names"] = [name.encode() for name in arrays.get(name, {})]
            for key, array in arrays.get(name, {}).items():
                group[key] = array.astype(np.float32)


def write_keras(path: Any, folder: str) -> None:
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        for place, kernel in ((f"{folder}/sequential/{folder}/dense", KERNEL), (f"{folder}/dense", OUTER)):
            file[f"{place}/vars/0"], file[f"{place}/vars/1"] = kernel.astype(np.float32), BIAS.astype(np.float32)
        file.create_group("metrics/mean/vars")
    config = functional(of_2_15=True) | {"build_config": {"input_shape": [None, 3]}}
    config["compile_config"] = {**TRAINING, "optimizer": optimizer(of_2_15=True), "run_eagerly": None}
    config["compile_config"] |= {"steps_per_execution": None, "jit_compile": None}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("metadata.json", '{"keras_version": "2.15.0", "date_saved": "2024-01-01@00:00:00"}')
        archive.writestr("model.weights.h5", content.getvalue())


def assert_is_the_model(model: dp.Model) -> None:
    inner = X @ KERNEL + BIAS
    first, second = model.predict(X.astype(np.float32), verbose=0)
    np.testing.assert_allclose(first, inner, rtol=1e-5)
    np.testing.assert_allclose(second, np.concatenate([inner, inner], 1) @ OUTER + BIAS, rtol=1e-5)


def test_an_h5_of_keras_2(tmp_path):
    write_h5(
        tmp_path / "m.h5",
        functional(of_2_15=False),
        training_config={**TRAINING, "optimizer_config": optimizer(of_2_15=False)},
    )
    model = dp.models.load_model(tmp_path / "m.h5", **CPU)
    assert_is_the_model(model)
    assert (float(model.optimizer.learning_rate), model.compiled) == (0.5, True)
    assert not dp.models.load_model(tmp_path / "m.h5", compile=False).compiled
    model = dp.models.model_from_json(json.dumps(functional(of_2_15=False)))
    model.load_weights(tmp_path / "m.h5")
    assert_is_the_model(model)


@pytest.mark.parametrize("folder", ["layers", "_layer_checkpoint_dependencies"])
def test_a_keras_file_of_2_15(tmp_path, folder):
    write_keras(tmp_path / "m.keras", folder)
    model = dp.models.load_model(tmp_path / "m.keras", **CPU)
    assert_is_the_model(model)
    assert float(model.optimizer.learning_rate) == 0.5


def test_an_h5_there_and_back(tmp_path):
    inputs = layers.Input((3,))
    inner = dp.Sequential([layers.Input((3,)), layers.Dense(4, "tanh"), layers.BatchNormalization()], name="inner")
    outputs = layers.Dense(2)(layers.Add()([inner(inputs), inner(inputs)]))
    model = dp.Model(inputs, outputs, seed=7)
    model.compile(dp.optimizers.Adam(0.01), dp.losses.Huber(0.5), metrics=["mae"], **CPU)
    model.fit(X, Y, verbose=0, batch_size=4)
    model.save(tmp_path / "m.h5")
    with h5py.File(tmp_path / "m.h5") as file:
        names: list[str] = []
        file["model_weights"].visititems(
            lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None
        )
        assert len(names) == len(model.weights) == 8
        assert len(file["optimizer_weights/optimizer"]) == 2 + 2 * 6
    with pytest.raises(dp.errors.OutputError, match="exists"):
        model.save(tmp_path / "m.h5", overwrite=False)
    loaded = dp.models.load_model(tmp_path / "m.h5", **CPU)
    np.testing.assert_equal(loaded.get_weights(), model.get_weights())
    assert (loaded.seed, int(loaded.optimizer.iterations)) == (7, 2)
    losses = [net.fit(X, Y, epochs=2, verbose=0, batch_size=4).history["loss"] for net in (model, loaded)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    dp.Sequential([layers.Input((3,)), layers.Dense(2)]).save(tmp_path / "m.hdf5")
    assert not dp.models.load_model(tmp_path / "m.hdf5").compiled


def test_long_lists_of_names_are_several_attributes(tmp_path, monkeypatch):
    monkeypatch.setattr(keras_2_h5, "_LARGEST_ATTRIBUTE", 20)
    model = dp.Sequential([layers.Input((3,)), *(layers.Dense(1) for _ in range(5))])
    model.save(tmp_path / "m.h5")
    with h5py.File(tmp_path / "m.h5") as file:
        assert "layer_names1" in file["model_weights"].attrs
    np.testing.assert_equal(dp.models.load_model(tmp_path / "m.h5").get_weights(), model.get_weights())


def test_by_name(tmp_path):
    def build(*names):
        return dp.Sequential([layers.Input((3,)), *(layers.Dense(3, name=name) for name in names)])

    model, other = build("one", "two", "three"), build("three", "one", "four")
    model.save(tmp_path / "m.h5")
    before = other.get_weights()
    other.load_weights(tmp_path / "m.h5", by_name=True)
    for number, expected in enumerate([*model.get_weights()[4:], *model.get_weights()[:2], *before[4:]]):
        np.testing.assert_array_equal(other.get_weights()[number], expected)
    dp.saving.load_weights(other, tmp_path / "m.h5", by_name=False)
    np.testing.assert_equal(other.get_weights(), model.get_weights())
    wrong = dp.Sequential(
        [layers.Input((3,)), layers.Dense(2, name="two"), layers.Dense(3, use_bias=False, name="one")]
    )
    with pytest.raises(DataError, match=r"two/kernel: model \(3, 2\), file \(3, 3\)"):
        wrong.load_weights(tmp_path / "m.h5", by_name=True)
    with pytest.warns(UserWarning, match="skipped what does not fit"):
        wrong.load_weights(tmp_path / "m.h5", skip_mismatch=True, by_name=True)
    for name in ("m.keras", "m.weights.h5", "m.safetensors"):
        with pytest.raises(ConfigError, match="`by_name` only supports loading legacy"):
            other.load_weights(tmp_path / name, by_name=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_config": "[]"}, "expected a JSON object"),
        ({"model_config": "{"}, "damaged"),
        ({"training_config": '{"optimizer_config": {"class_name": "Evil", "config": {}}}'}, "Evil"),
    ],
)
def test_damaged_h5(tmp_path, change, message):
    write_h5(tmp_path / "m.h5", functional(of_2_15=False))
    with h5py.File(tmp_path / "m.h5", "a") as file:
        for name, value in change.items():
            file.attrs[name] = value
    with pytest.raises(DataError, match=message):
        dp.models.load_model(tmp_path / "m.h5")


def test_weights_alone_are_no_model(tmp_path):
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.attrs["layer_names"] = [b"a"]
    with pytest.raises(DataError, match="No model config found in the file"):
        dp.models.load_model(tmp_path / "m.h5")
    (tmp_path / "m.h5").write_bytes(b"PK")
    with pytest.raises(DataError, match="not a model of Keras' \\(HDF5\\)"):
        dp.models.load_model(tmp_path / "m.h5")


def test_arguments_of_keras_2():
    def upgraded(class_name, **config):
        return keras_2_config.upgraded({"class_name": class_name, "config": config})

    assert upgraded("LeakyReLU", alpha=0.25)["config"] == {"negative_slope": 0.25}
    assert upgraded("BatchNormalization", axis=[3])["config"] == {"axis": 3}
    policy = {"class_name": "Policy", "config": {"name": "mixed_float16"}}
    assert (
        dp.saving.deserialize_keras_object(upgraded("Dense", units=2, dtype=policy)).dtype_policy.name
        == "mixed_float16"
    )
    serialized = dp.saving.serialize_keras_object(dp.Sequential([layers.Input((3,)), layers.Dense(2)]))
    assert keras_2_config.upgraded(serialized) == serialized
    custom = {"class_name": "Mine", "module": "mine", "config": {"decay": 0.0, "alpha": 1}, "registered_name": "Mine"}
    assert keras_2_config.upgraded(custom) == custom
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ConfigError, match="more than 100 levels"):
        keras_2_config.upgraded(deep)


@pytest.mark.parametrize(
    "node", [[["nowhere", 0, 0, {}]], [[1, 2]], [[]], "text", [["input_1", 0, 0, {"y": ["input_1", 7, 0]}]]]
)
def test_calls_that_are_none(node):
    config = functional(of_2_15=False)
    config["config"]["layers"][3]["inbound_nodes"] = [node]
    with pytest.raises(ConfigError):
        dp.models.model_from_json(json.dumps(config))


def graph(shape, *calls, dtype="float32"):
    """A functional model of Keras 2.15: an input, then layers (class, arguments, call)."""
    input_config = {
        "batch_input_shape": [None, *shape],
        "dtype": dtype,
        "sparse": False,
        "ragged": False,
        "name": "input",
    }
    listed = [{"class_name": "InputLayer", "config": input_config, "name": "input", "inbound_nodes": []}]
    for number, (class_name, config, call) in enumerate(calls):
        common = {"name": f"layer_{number}", "trainable": True, "dtype": "float32", "batch_input_shape": [None, None]}
        node = call or [[f"layer_{number - 1}" if number else "input", 0, 0, {}]]
        listed.append(
            {"class_name": class_name, "config": common | config, "name": common["name"], "inbound_nodes": [node]}
        )
    ends = {"input_layers": [["input", 0, 0]], "output_layers": [[f"layer_{len(calls) - 1}", 0, 0]]}
    config = {"name": "model", "trainable": True, "layers": listed, **ends}
    return dp.models.model_from_json(json.dumps({"class_name": "Functional", "config": config}))


def test_arguments_of_2_15_that_keras_3_has_not():
    images = {"kernel_size": 3, "groups": 1, "kernel_initializer": "zeros", "kernel_regularizer": None}
    model = graph(
        (8, 8, 2),
        ("DepthwiseConv2D", images, None),
        ("SeparableConv2D", images | {"filters": 3}, None),
        ("Conv2DTranspose", {"kernel_size": 3, "filters": 3, "groups": 1}, None),
    )
    assert model.output_shape == (None, 6, 6, 3)
    recurrent = {"units": 3, "implementation": 2, "time_major": False, "return_sequences": True}
    model = graph(
        (6,),
        ("Embedding", {"input_dim": 9, "output_dim": 4, "input_length": 6}, None),
        ("LSTM", recurrent, None),
        ("GRU", recurrent, None),
        ("SimpleRNN", recurrent, None),
        ("MultiHeadAttention", {"num_heads": 2, "key_dim": 3, "query_shape": [None, 6, 3]}, [
            ["layer_3", 0, 0, {"value": ["layer_1", 0, 0]}]
        ]),
        dtype="int32",
    )  # fmt: skip
    assert model.output_shape == (None, 6, 3)
    for layer in (("Conv2DTranspose", {"kernel_size": 3, "filters": 4, "groups": 2}, None),):
        with pytest.raises(ConfigError, match="groups = 2"):
            graph((8, 8, 2), layer)


def test_functions_of_tensorflow():
    """(2 x + x) relu'd, as Keras 2.15 writes it."""

    def function(name, call):
        return "TFOpLambda", {"function": name}, call

    model = graph(
        (3,),
        function("math.multiply", [["_CONSTANT_VALUE", -1, 2.0, {"y": ["input", 0, 0], "name": None}]]),
        function("__operators__.add", [["layer_0", 0, 0, {"y": ["input", 0, 0], "name": None}]]),
        function("math.subtract", [["layer_1", 0, 0, {"y": 1.0, "name": None}]]),
        function("nn.relu", [["layer_2", 0, 0, {"name": None}]]),
    )
    np.testing.assert_allclose(model.predict(X, verbose=0), np.maximum(3 * X - 1, 0), rtol=1e-6)
    with pytest.raises(ConfigError, match=r"not supported: TensorFlow's function 'image\.rot90' as a layer"):
        graph((3,), function("image.rot90", None))
    with pytest.raises(ConfigError, match=r"not supported: TensorFlow's math\.exp with base"):
        graph((3,), function("math.exp", [["input", 0, 0, {"base": 2}]]))


def test_metrics_of_compile_by_name():
    """Keras 2 keeps what `metrics=["accuracy"]` stands for as a wrapper of a function."""
    wrapped = {"class_name": "MeanMetricWrapper", "config": {"name": "accuracy", "fn": "sparse_categorical_accuracy"}}
    metric = dp.saving.deserialize_keras_object(keras_2_config.upgraded(wrapped))
    assert (type(metric), metric.name) == (dp.metrics.SparseCategoricalAccuracy, "accuracy")


def test_the_hard_sigmoid_of_keras_2_is_refused(tmp_path):
    """0.2 x + 0.5 there, x / 6 + 0.5 here: a file of the same words would predict otherwise."""
    config = functional(of_2_15=False)
    config["config"]["layers"][-1]["config"]["activation"] = "hard_sigmoid"
    write_h5(tmp_path / "m.h5", config)
    with pytest.raises(DataError, match="not supported: hard_sigmoid of Keras 2"):
        dp.models.load_model(tmp_path / "m.h5")
    ours = dp.Sequential([layers.Input((3,)), layers.Dense(2, "hard_sigmoid")])
    for name in ("ours.h5", "ours.keras"):
        ours.save(tmp_path / name)
        assert dp.models.load_model(tmp_path / name).layers[-1].activation is dp.activations.hard_sigmoid


def test_projections_of_attention_have_other_names_in_2_15(tmp_path):
    """There its attributes begin with an underscore, and so do the groups of a file."""
    x = layers.Input((6, 4))
    model = dp.Model(x, layers.MultiHeadAttention(2, 3, name="attention")(x, x))
    model.save_weights(tmp_path / "m.weights.h5")
    with h5py.File(tmp_path / "m.weights.h5", "a") as file:
        for part in ("query", "key", "value", "output"):
            file.move(f"layers/multi_head_attention/{part}_dense", f"layers/multi_head_attention/_{part}_dense")
    clone = dp.models.clone_model(model)
    clone.load_weights(tmp_path / "m.weights.h5")
    for mine, theirs in zip(clone.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
