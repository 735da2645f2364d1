"""Weights in safetensors files, writing, configurations: what needs neither Keras nor h5py."""

import errno
import json
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dptrain as dp
from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.runtime.storage import files
from dptrain.saving import keras_config, optimizer_variables
from dptrain.saving.reading import Stored
from tests.sample import examples

RNG = np.random.default_rng(2)
X, Y = RNG.random((12, 2, 3)), np.arange(12) % 2
CPU = {"device": "cpu"}


def small(hidden: int = 4, *, seed: int = 1, dtype: str = "float64", compiled: bool = True) -> dp.Sequential:
    stack = [dp.layers.Flatten(input_shape=(2, 3)), dp.layers.Dense(hidden, "tanh"), dp.layers.Dense(2, "softmax")]
    model = dp.Sequential(stack, seed=seed)
    if compiled:
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], dtype=dtype, **CPU)
    return model


def data_error(call: Callable[[], object]) -> str:
    """Return the message of the DataError that a call ends in, if it does; anything else is raised."""
    try:
        call()
    except DataError as error:
        return str(error)
    return ""


def test_safetensors_there_and_back(tmp_path):
    path = tmp_path / "w.safetensors"
    first, other = small(), small(seed=2)
    first.fit(X, Y, batch_size=4, verbose=0)
    first.save_weights(path)
    other.load_weights(path)
    np.testing.assert_array_equal(other.predict(X), first.predict(X))
    assert sorted(safetensors.numpy.load_file(path)) == ["dense/bias", "dense/kernel", "dense_1/bias", "dense_1/kernel"]
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["format_version"]) == ("dptrain", "2")
    assert [layer["class"] for layer in json.loads(metadata["architecture"])] == ["Flatten", "Dense", "Dense"]


def test_a_file_of_other_origin_needs_only_the_names(tmp_path):
    path, model = tmp_path / "w.safetensors", small(compiled=False)
    weights = {name: RNG.random(weight.shape).astype(np.float16) for name, weight in model._named_weights().items()}
    weights["dense/bias"][1] = np.nan  # loaded as it is: a diverged model can be looked into
    safetensors.numpy.save_file(weights, path)
    model.load_weights(str(path))
    for name, weight in model._named_weights().items():
        np.testing.assert_array_equal(weight, weights[name].astype(np.float64))


def test_a_model_on_its_device_gets_the_weights(tmp_path):
    model = small()
    before = model.predict(X)
    model.save_weights(tmp_path / "w.safetensors")
    model.fit(X, Y, verbose=0)
    assert not np.array_equal(model.predict(X), before)
    model.load_weights(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(model.predict(X), before)


def test_every_difference_is_listed(tmp_path):
    path = tmp_path / "w.safetensors"
    small(7).save_weights(path)
    weights = safetensors.numpy.load_file(path)
    weights["more/kernel"] = np.zeros(3, np.float32)
    weights["dense_1/bias"] = np.zeros(2, np.int64)
    safetensors.numpy.save_file(weights, path)
    model = small(4)
    before = model.get_weights()
    with pytest.raises(DataError) as caught:
        model.load_weights(path)
    assert str(caught.value) == (
        f"{path}: the weights do not fit the model: dense/kernel: model (6, 4), file (6, 7); "
        "dense/bias: model (4,), file (7,); dense_1/kernel: model (4, 2), file (7, 2); "
        "dense_1/bias: dtype int64, expected float16, float32, float64; more/kernel: not in the model"
    )
    assert caught.value.exit_code == 65
    for weight, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_skip_mismatch_leaves_whole_layers_and_warns(tmp_path):
    path, model = tmp_path / "w.safetensors", small(4)
    weights = {"dense/kernel": np.ones((6, 4)), "dense/bias": np.ones(5), "dense_1/kernel": np.full((4, 2), 3.0)}
    safetensors.numpy.save_file(weights | {"dense_1/bias": np.full(2, 4.0)}, path)
    before = model._named_weights()
    with pytest.warns(UserWarning, match=r"dense/bias: model \(4,\), file \(5,\)"):
        model.load_weights(path, skip_mismatch=True)
    after = model._named_weights()
    np.testing.assert_array_equal(after["dense/kernel"], before["dense/kernel"])
    np.testing.assert_array_equal(after["dense_1/kernel"], weights["dense_1/kernel"])


def damaged() -> dict[str, tuple[bytes, str]]:
    good = safetensors.numpy.save({"dense/kernel": np.zeros((6, 4))}, {"format": "dptrain", "format_version": "1"})
    newer = safetensors.numpy.save({"a": np.zeros(1)}, {"format": "dptrain", "format_version": "3"})
    earlier = {"format": "dptrain", "format_version": "1", "architecture": "[]", "architecture_digest": "00"}
    other = safetensors.numpy.save({}, earlier)
    renamed = safetensors.numpy.save({}, {"format": "eptrain", "format_version": "2", "sha256": "00"})
    unsealed = safetensors.numpy.save({"a": np.zeros(1)}, {"format": "dptrain", "format_version": "2"})
    huge = json.dumps({"dense/kernel": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    return {
        "empty": (b"", "not a safetensors file, or cut off: first bytes none"),
        "pickle": (pickle.dumps([1, 2, 3], protocol=4), r"a pickle\? pickles can run code and are never loaded"),
        "zip": (b"PK\x03\x04" + bytes(30), "a zip archive"),
        "HTML": (b"<html><body>404</body></html>", "HTML"),
        "cut header": (good[:50], "cut off"),
        "cut data": (good[:-1], "damaged"),
        "trailing bytes": (good + b"\0", "damaged"),
        "newer": (newer, "format_version '3', this build reads 1 to 2"),
        "no version": (safetensors.numpy.save({}, {"format": "dptrain"}), "format_version '', this build reads"),
        "no hash": (unsealed, "the content does not match its SHA-256"),
        "another format": (renamed, "damaged: the metadata are dptrain's, the format is 'eptrain'"),
        "digest": (other, "does not match its SHA-256"),
        "declared size": (struct.pack("<Q", len(huge)) + huge, "damaged"),
        "header of 2 GB": (struct.pack("<Q", 1 << 31) + b"{}", "cut off"),
    }


@pytest.mark.parametrize("case", damaged())
def test_damaged_and_foreign_files(tmp_path, case):
    content, message = damaged()[case]
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        small(compiled=False).load_weights(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_that_is_too_long_is_not_parsed(tmp_path):
    path = tmp_path / "w.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 17 << 20) + b"{")
        file.truncate(18 << 20)
    with pytest.raises(DataError, match="at most 16777216 are read"):
        small(compiled=False).load_weights(path)


def test_missing_and_unreadable(tmp_path):
    with pytest.raises(DataError, match="not found"):
        small(compiled=False).load_weights(tmp_path / "none.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        small(compiled=False).load_weights(tmp_path / "folder.safetensors")


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4), cut=st.booleans())
def test_changed_bytes_are_a_clear_error_or_other_numbers(tmp_path, places, cut):
    path, model = tmp_path / "w.safetensors", small(compiled=False)
    model.save_weights(path)
    content = bytearray(path.read_bytes())
    for place, value in places:
        content[place % len(content)] = value
    path.write_bytes(content[: places[0][0] % len(content)] if cut else content)
    assert "\n" not in data_error(lambda: model.load_weights(path))


# Writing


def test_overwrite_false_keeps_the_file(tmp_path):
    path, model = tmp_path / "w.safetensors", small(compiled=False)
    path.write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists; pass overwrite=True"):
        model.save_weights(path, overwrite=False)
    assert path.read_bytes() == b"mine"
    model.save_weights(path)
    model.load_weights(path)


@pytest.mark.parametrize("name", ["net.keras", "net.weights.h5", "net.safetensors", "checkpoint.keras", "net.png"])
def test_what_is_saved_over_a_link_is_where_the_link_leads(tmp_path, name):
    target = tmp_path / "store" / name
    target.parent.mkdir()
    target.write_bytes(b"stale")
    (tmp_path / name).symlink_to(target)
    model = dp.Sequential([dp.layers.Input((2,)), dp.layers.Dense(1)])
    model.compile("sgd", "mse")
    if name == "net.keras":
        model.save(tmp_path / name)
    elif name == "checkpoint.keras":
        keeper = dp.callbacks.ModelCheckpoint(tmp_path / name)
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[keeper])
    elif name == "net.png":
        dp.utils.save_img(tmp_path / name, np.ones((2, 2, 3)))
    else:
        model.save_weights(tmp_path / name)
    assert (tmp_path / name).is_symlink()
    assert target.stat().st_size > 60
    if name.endswith(".keras"):
        np.testing.assert_array_equal(dp.models.load_model(target).get_weights()[0], model.get_weights()[0])


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path, model = tmp_path / "w.safetensors", small(compiled=False)
    path.write_bytes(b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(
        OutputError, match=r"w\.safetensors: No space left on device \(needs \d+ bytes, \d+ free\)"
    ) as e:
        model.save_weights(path)
    assert e.value.errno == errno.ENOSPC
    assert e.value.exit_code == 74
    assert "--out" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
    assert path.read_bytes() == b"old"


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    model = small(compiled=False)
    (tmp_path / "file").write_text("")
    for path, code in (
        (tmp_path / "no" / "w.safetensors", errno.ENOENT),
        (tmp_path / "file" / "w.safetensors", errno.ENOTDIR),
        (tmp_path / ("w" * 250 + ".safetensors"), errno.ENAMETOOLONG),
    ):
        with pytest.raises(OutputError) as caught:
            model.save_weights(path)
        assert caught.value.errno == code, path

    def denied(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files.os, "rename", denied)
    with pytest.raises(OutputError, match="Permission denied"):
        model.save_weights(tmp_path / "w.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_endings():
    model = small(compiled=False)
    for call, name in ((model.save_weights, "w.h5"), (model.load_weights, "w.txt")):
        with pytest.raises(ConfigError, match=r"must end in `\.weights\.h5`"):
            call(name)
    with pytest.raises(ConfigError, match=r"must end in `\.keras`"):
        model.save("model.h4")
    with pytest.raises(ConfigError, match=r"expected a `\.keras` extension"):
        dp.models.load_model("model.h4")
    with pytest.raises(ConfigError, match="safe_mode"):
        dp.models.load_model("model.keras", safe_mode=False)
    with pytest.raises(ConfigError, match="needs input_shape"):
        dp.Sequential([dp.layers.Dense(2)]).save_weights("w.safetensors")


def test_without_h5py_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    model = small()
    (tmp_path / "w.weights.h5").write_bytes(b"")
    (tmp_path / "m.keras").write_bytes(b"")
    for call in (
        lambda: model.save(tmp_path / "new.keras"),
        lambda: model.save_weights(tmp_path / "new.weights.h5"),
        lambda: model.load_weights(tmp_path / "w.weights.h5"),
        lambda: dp.models.load_model(tmp_path / "m.keras"),
    ):
        with pytest.raises(ConfigError, match=r"need h5py: pip install h5py") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.keras", "w.weights.h5"]


# Configurations


def test_config_there_and_back():
    layers = [
        dp.layers.Rescaling(1 / 255, 0.5, input_shape=(4, 5)),
        dp.layers.Flatten(name="flat"),
        dp.layers.Dense(3, "relu", use_bias=False, kernel_initializer="zeros"),
        dp.layers.Dropout(0.25),
        dp.layers.Activation("tanh"),
        dp.layers.Dense(2),
    ]
    model = dp.Sequential(layers, name="mine")
    config = model.get_config()
    assert json.loads(json.dumps(config)) == config
    assert config["layers"][0]["config"]["batch_shape"] == [None, 4, 5]
    assert config["build_input_shape"] == [None, 4, 5]
    assert [layer["class_name"] for layer in config["layers"][1:]] == [type(layer).__name__ for layer in layers]
    restored = dp.Sequential.from_config(config)
    assert restored.get_config() == config
    assert restored.name == "mine"
    assert [layer._get_config() for layer in restored.layers] == [layer._get_config() for layer in layers]
    assert restored.input_shape == (None, 4, 5)
    unbuilt = dp.Sequential([dp.layers.Dense(2)]).get_config()
    assert "build_input_shape" not in unbuilt
    assert dp.Sequential.from_config(unbuilt)._awaits_shape


def test_to_json_has_keras_structure():
    text = json.loads(small().to_json(indent=1))
    assert (text["module"], text["class_name"], text["registered_name"]) == ("keras", "Sequential", None)
    compiled = text["compile_config"]
    assert compiled["optimizer"]["class_name"] == "Adam"
    assert compiled["optimizer"]["config"]["learning_rate"] == 0.001
    assert compiled["loss"] == "sparse_categorical_crossentropy"
    assert compiled["metrics"] == ["accuracy"]
    arguments = keras_config.compile_arguments(compiled)
    assert type(arguments["optimizer"]) is dp.optimizers.Adam
    assert type(arguments["loss"]) is dp.losses.SparseCategoricalCrossentropy
    assert arguments["metrics"] == ["accuracy"]
    assert json.loads(small(compiled=False).to_json())["compile_config"] == {}


def dense(module: str = "keras.layers", class_name: str = "Dense", registered: str | None = None, **config) -> dict:
    full_config = {"name": "d", "units": 2} | config
    return {"module": module, "class_name": class_name, "config": full_config, "registered_name": registered}


INPUT = {"module": "keras.layers", "class_name": "InputLayer", "config": {"batch_shape": [None, 3]}}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([dense(class_name="Dens")], "did you mean 'Dense'"),
        ([dense(class_name="FlaxLayer", registered=None)], r"not supported: layer 'd' \(FlaxLayer\)"),
        ([dense(module="my.module")], "custom object 'Dense' of module 'my.module'"),
        ([dense(registered="mine>Dense")], "custom object 'mine>Dense'"),
        ([dense(kernel_constraint={"class_name": "NonNeg", "config": {}})], "kernel_constraint"),
        ([dense(units=-1)], "positive integer"),
        ([dense(units=None), dense(class_name="FlaxLayer")], "positive integer.*FlaxLayer"),
        ([dense(activation="my_own")], "unknown activation"),
        ([dense(activation=["relu"])], "Could not interpret activation"),
        ([dense(activation={"class_name": "function", "config": "f", "module": "mine"})], "custom function 'f'"),
        ([dense(name="a/b")], "without '/'"),
        ([dense(dtype="float8")], "float8"),
        ([INPUT | {"config": {"batch_shape": [None, 0]}}, dense()], "not supported: input of shape"),
        ([INPUT | {"config": {"batch_shape": [None, 3], "sparse": True}}, dense()], "sparse"),
        ([dense(), INPUT], "InputLayer must come before the first layer"),
        ([INPUT], "at least one layer"),
        ([3], "class_name and config"),
        ([{"class_name": "Dense"}], "has no config"),
        (None, "'name' and 'layers'"),
    ],
)
def test_what_is_not_supported_is_named(layers, message):
    with pytest.raises(ConfigError, match=message) as caught:
        dp.Sequential.from_config({"name": "m", "layers": layers})
    assert "\n" not in str(caught.value)


def test_initializers_are_read_by_name_and_as_objects():
    zeros = {"module": "keras.initializers", "class_name": "Zeros", "config": {}, "registered_name": None}
    glorot = zeros | {"class_name": "GlorotUniform", "config": {"seed": 5, "input_axes": None}}
    config = {"name": "m", "layers": [INPUT, dense(kernel_initializer=zeros, bias_initializer="zeros")]}
    first = dp.Sequential.from_config(config).layers[0]
    assert [type(first.kernel_initializer).__name__, type(first.bias_initializer).__name__] == ["Zeros", "Zeros"]
    config["layers"][1] = dense(kernel_initializer=glorot)
    assert type(dp.Sequential.from_config(config).layers[0].kernel_initializer).__name__ == "GlorotUniform"


class Scaled(dp.layers.Layer):
    """A layer of the user's own."""

    def __init__(self, factor: float = 1.0, **options) -> None:
        super().__init__(**options)
        self.factor = factor

    def call(self, inputs):
        return inputs * self.factor


def test_a_layer_of_ones_own_is_found_by_custom_objects():
    model = dp.Sequential([Scaled(2.5, input_shape=(4,))])
    config = model.get_config()
    layer_config = config["layers"][1]
    assert (layer_config["module"], layer_config["class_name"], layer_config["registered_name"]) == (
        __name__,
        "Scaled",
        "Scaled",
    )
    with pytest.raises(ConfigError, match=r"custom object 'Scaled' of module .*; pass its class in custom_objects"):
        dp.Sequential.from_config(config)
    restored = dp.Sequential.from_config(config, custom_objects={"Scaled": Scaled}).layers[0]
    assert (type(restored), restored.factor, restored.name) == (Scaled, 2.5, "scaled")
    with dp.saving.custom_object_scope({"Scaled": Scaled}):
        assert type(dp.Sequential.from_config(config).layers[0]) is Scaled


def test_a_registered_class_needs_no_custom_objects():
    @dp.saving.register_keras_serializable("mine")
    class Doubled(Scaled):
        pass

    config = dp.Sequential([Doubled(2.0, input_shape=(4,))]).get_config()
    assert config["layers"][1]["registered_name"] == "mine>Doubled"
    assert type(dp.Sequential.from_config(config).layers[0]) is Doubled


def test_a_new_layer_comes_in_by_the_registry(monkeypatch):
    monkeypatch.setitem(dp.layers.LAYERS, "Scaled", Scaled)
    config = dp.Sequential([Scaled(2.5, input_shape=(4,))]).get_config()
    assert config["layers"][1]["module"] == "keras.layers"
    assert dp.Sequential.from_config(config).layers[0].factor == 2.5


def compile_config(**changes) -> dict:
    return {
        "optimizer": {"module": "keras.optimizers", "class_name": "SGD", "config": {"learning_rate": 0.5}},
        "loss": "mse",
        "metrics": ["mae"],
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "mine"}, "unknown loss 'mine'.*compile=False"),
        ({"metrics": [["mine"]]}, "unknown metric 'mine'"),
        ({"metrics": [7]}, "class_name and config"),
        ({"optimizer": "sgdd"}, "did you mean 'sgd'"),
        ({"optimizer": {"class_name": "SGD", "config": {"clipnorm_": 1.0}}}, "clipnorm_ = 1.0"),
        ({"optimizer": {"class_name": "SGD", "config": {"learning_rate": "fast"}}}, "compile|float|fast"),
        ({"optimizer": {"class_name": "SGD", "config": {"learning_rate": -1.0}}}, "learning_rate"),
        ({"loss": {"class_name": "function", "config": "f", "module": "mine"}}, "custom function 'f'"),
    ],
)
def test_compile_configs_that_are_not_supported(changes, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        keras_config.compile_arguments(compile_config(**changes))


def test_compile_config_is_read():
    arguments = keras_config.compile_arguments(compile_config(weighted_metrics=["mse"], loss_weights=[2.0]))
    assert (arguments["optimizer"].learning_rate, type(arguments["loss"])) == (0.5, dp.losses.MeanSquaredError)
    assert (arguments["metrics"], arguments["weighted_metrics"], arguments["loss_weights"]) == (["mae"], ["mse"], [2.0])
    assert keras_config.compile_arguments(compile_config(loss=None))["loss"] is None
    assert keras_config.compile_arguments({}) is None
    assert keras_config.compile_arguments(None) is None


# Keras' order of the optimizer's variables


def stored(arrays: list[np.ndarray]) -> list[Stored]:
    return [Stored(array.shape, array.dtype.name, lambda value=array: value, "file") for array in arrays]


def test_variables_alternate_by_parameter():
    model, optimizer = small(compiled=False), dp.optimizers.Adam(0.25)
    optimizer.build(model.trainable_weights)
    optimizer.variables[0].assign(7)
    for number, weight in enumerate(model.weights):
        optimizer._slots_of(weight)["momentum"].assign(np.full(weight.shape, number))
        optimizer._slots_of(weight)["velocity"].assign(np.full(weight.shape, 10 + number))
    arrays = optimizer_variables.arrays(optimizer, optimizer.variables, "float32")
    assert [array.flat[0] for array in arrays] == [7, 0.25, 0, 10, 1, 11, 2, 12, 3, 13]
    assert {array.dtype.name for array in arrays[1:]} == {"float32"}
    other = dp.optimizers.Adam(0.25)
    other.build(model.trainable_weights)
    values, reason = optimizer_variables.read("file", other, other.variables, stored(arrays))
    assert reason == ""
    assert [variable._path for variable in values] == [variable._path for variable in other.variables]
    for value, variable in zip(values.values(), optimizer.variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())
    with pytest.raises(DataError, match="iterations are -1"):
        optimizer_variables.read("file", other, other.variables, stored([np.array(-1), *arrays[1:]]))
    for wrong in (np.nan, -1.0):
        with pytest.raises(DataError, match=f"learning rate is {wrong:g}, expected a finite number >= 0"):
            optimizer_variables.read("file", other, other.variables, stored([arrays[0], np.array(wrong), *arrays[2:]]))


def test_a_learning_rate_survives_rounding_unless_it_was_changed():
    optimizer = dp.optimizers.SGD(0.1)
    for number, expected in ((np.float32(0.1), 0.1), (np.float32(0.25), 0.25), (np.float32(0), 0)):
        values, _ = optimizer_variables.read(
            "file", optimizer, optimizer.variables, stored([np.array(3), np.array(number)])
        )
        assert values[optimizer.variables[1]] == expected


# from_keras, with something that quacks


class Quack:
    """What dptrain calls of a Keras model."""

    def __init__(self, layers: list, weights: list, compiled: dict | None = None) -> None:
        self.name, self.layers, self._weights, self._compiled = "quack", layers, weights, compiled

    def get_config(self) -> dict:
        return {"name": self.name, "layers": self.layers}

    def get_weights(self) -> list:
        return self._weights

    def get_compile_config(self) -> dict:
        return self._compiled or {}


def test_from_keras_by_its_methods_alone():
    weights = [RNG.random((3, 2)), RNG.random(2)]
    model = dp.from_keras(Quack([INPUT, dense()], weights, compile_config()), **CPU)
    for weight, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(weight, other.astype(np.float32))
    history = model.fit(RNG.random((8, 3)), RNG.random((8, 2)), verbose=0)
    assert list(history.history) == ["loss", "mae"]
    assert model.name == "quack"


def test_from_keras_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match="expected a Keras model, found int"):
        dp.from_keras(3)
    with pytest.raises(DataError, match="1 weights, its layers have 2"):
        dp.from_keras(Quack([INPUT, dense()], [np.zeros((3, 2))]))
    with pytest.raises(DataError, match=r"d/kernel: model \(3, 2\), file \(2, 3\)"):
        dp.from_keras(Quack([INPUT, dense()], [np.zeros((2, 3)), np.zeros(2)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dp.from_keras(Quack([dense()], []))  # not built: no weights yet
