"""Keras' .weights.h5 and .keras without Keras: to the documented layout, there and back, and hostile."""

import io
import json
import random
import re
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dptrain as dp
from dptrain.errors import ConfigError, DataError
from dptrain.registry.names import snake_case
from dptrain.saving import keras_zip, saveables
from dptrain.saving.reading import parse_json
from tests.sample import examples, sample
from tests.unit.saving.test_saving import CPU, INPUT, RNG, X, Y, data_error, dense, small

h5py = pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

OPTIMIZERS = {
    "adam": dp.optimizers.Adam(0.01),
    "rmsprop": dp.optimizers.RMSprop(0.01),
    "sgd": dp.optimizers.SGD(0.1),
    "momentum": dp.optimizers.SGD(0.1, momentum=0.9),
    "several": dp.optimizers.MultiOptimizer(
        dp.optimizers.OptimizerMap(dp.optimizers.ScheduleFreeAdamW(0.01), {"dense/.*": dp.optimizers.SGD(0.1)})
    ),
}
KERNELS = {"dense": (RNG.random((6, 4)), RNG.random(4)), "dense_1": (RNG.random((4, 2)), RNG.random(2))}


def write_h5(target: Any, kernels: dict[str, tuple] = KERNELS, **changes: Any) -> None:
    """Write Keras' layout by hand. `changes`: a path with "__" for "/", and its array or None to leave it out."""
    content: dict[str, Any] = {"vars": {}, "layers/flatten/vars": {}}
    for layer, arrays in kernels.items():
        content |= {f"layers/{layer}/vars/{number}": array for number, array in enumerate(arrays)}
    content |= {name.replace("__", "/"): change for name, change in changes.items()}
    with h5py.File(target, "w") as file:
        for name, item in content.items():
            if isinstance(item, dict):
                file.create_group(name)
            elif callable(item):
                item(file)
            elif item is not None:
                file[name] = item


def write_zip(path: Any, config: dict[str, Any] | bytes, weights: bytes, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", config if isinstance(config, bytes) else json.dumps(config))
        archive.writestr("metadata.json", '{"keras_version": "3.15.1"}')
        archive.writestr("model.weights.h5", weights)
        for name, content in members.items():
            archive.writestr(name, content)


def h5_bytes(**changes: Any) -> bytes:
    content = io.BytesIO()
    write_h5(content, **changes)
    return content.getvalue()


def model_json(*layers: dict, **changes: Any) -> dict[str, Any]:
    flatten = {"module": "keras.layers", "class_name": "Flatten", "config": {"name": "flat"}}
    start = [INPUT | {"config": {"batch_shape": [None, 2, 3]}}, flatten]
    listed = list(layers) or [dense(units=4, name="one"), dense(units=2, name="two")]
    config = {"name": "mine", "layers": [*start, *listed]}
    return {"module": "keras", "class_name": "Sequential", "config": config} | changes


# The layout


def test_weights_to_the_documented_layout(tmp_path):
    write_h5(tmp_path / "w.weights.h5", layers__dropout__seed_generator__vars__0=np.zeros(2, np.uint32))
    model = small()
    model.load_weights(tmp_path / "w.weights.h5")
    expected = [array for arrays in KERNELS.values() for array in arrays]
    for weight, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight, other)
    model.predict(X)  # now on its device
    write_h5(
        tmp_path / "w.weights.h5", {name: tuple(2 * array for array in arrays) for name, arrays in KERNELS.items()}
    )
    model.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(model.get_weights()[0], 2 * expected[0])


def test_what_is_written_is_the_documented_layout(tmp_path):
    model = small(dtype="float32")
    model.fit(X, Y, batch_size=4, verbose=0)
    model.save_weights(tmp_path / "w.weights.h5")
    with h5py.File(tmp_path / "w.weights.h5") as file:
        assert sorted(file) == ["layers", "optimizer", "vars"]
        assert file["vars"].attrs["name"] == "sequential"
        assert list(file["vars"]) == []
        assert sorted(file["layers"]) == ["dense", "dense_1", "flatten"]
        assert file["layers/dense_1/vars"].attrs["name"] == "dense_1"
        kernel = file["layers/dense_1/vars/0"]
        assert (kernel.shape, kernel.dtype, kernel.fletcher32) == ((4, 2), np.float32, True)
        np.testing.assert_array_equal(kernel, model._named_weights()["dense_1/kernel"])
        state = file["optimizer/vars"]
        assert state.attrs["name"] == "adam"
        assert [state[str(n)].shape for n in range(len(state))] == [
            (),
            (),
            *[s for s in ((6, 4), (4,), (4, 2), (2,)) for _ in "mv"],
        ]
        assert (state["0"].dtype, state["0"][()], state["1"].dtype) == (np.int32, 3, np.float32)


def test_layers_are_numbered_by_class_whatever_their_names(tmp_path):
    stack = [
        dp.layers.Dense(2, name="dense_7", input_shape=(3,)),
        dp.layers.Activation("relu"),
        dp.layers.Dense(2, name="x"),
    ]
    assert saveables.group_names(stack) == ["dense", "activation", "dense_1"]
    names = ("BatchNormalization", "ReLU", "LeakyReLU", "Dense", "RMSprop", "AdamW", "InputLayer")
    expected = ["batch_normalization", "re_lu", "leaky_re_lu", "dense", "rm_sprop", "adam_w", "input_layer"]
    assert [snake_case(name) for name in names] == expected


def test_every_difference_is_listed(tmp_path):
    path = tmp_path / "w.weights.h5"
    other = {"dense": (np.zeros((6, 5)), np.zeros(5)), "dense_1": (np.zeros((4, 2)),), "dense_2": (np.zeros(3),)}
    write_h5(path, other)
    with pytest.raises(DataError) as caught:
        small().load_weights(path)
    assert str(caught.value) == (
        f"{path}: the weights do not fit the model: dense/kernel: model (6, 4), file (6, 5); "
        "dense/bias: model (4,), file (5,); dense_1/bias: not in the file; layers/dense_2/vars/0: not in the model"
    )
    model = small()
    before = model._named_weights()
    with pytest.warns(UserWarning, match="skipped what does not fit"):
        model.load_weights(path, skip_mismatch=True)
    for name, weight in model._named_weights().items():
        np.testing.assert_array_equal(weight, before[name])


def test_a_model_file_to_the_documented_layout(tmp_path):
    state = {"optimizer__vars__0": np.int64(5), "optimizer__vars__1": np.float32(0.25)}
    config = model_json(
        compile_config={"optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.5}}, "loss": "mse"}
    )
    write_zip(tmp_path / "m.keras", config, h5_bytes(**state))
    model = dp.models.load_model(tmp_path / "m.keras", **CPU)
    kernel, bias = KERNELS["dense"]
    hidden = X.reshape(12, 6) @ kernel + bias
    expected = hidden @ KERNELS["dense_1"][0] + KERNELS["dense_1"][1]
    np.testing.assert_allclose(model.predict(X), expected, rtol=1e-5)
    assert model.name == "mine"
    assert [layer.name for layer in model.layers] == ["flat", "one", "two"]
    copy_path = tmp_path / "again.keras"
    model.save(copy_path)
    with h5py.File(keras_zip.open_weights(copy_path)) as file:
        assert [file[f"optimizer/vars/{n}"][()] for n in range(2)] == [5, 0.25]
    assert not dp.models.load_model(tmp_path / "m.keras", compile=False).to_json().count("SGD")


# Exactly on from where it stopped


@pytest.mark.parametrize("dtype", sample(["float32", "float64"], 2))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_steps_and_ten_more_are_twenty(tmp_path, optimizer, dtype):
    def build() -> dp.Sequential:
        stack = [dp.layers.Flatten(input_shape=(2, 3)), dp.layers.Dense(5, "tanh"), dp.layers.Dropout(0.3)]
        model = dp.Sequential([*stack, dp.layers.Dense(2, "softmax")], seed=9)
        chosen = dp.optimizers.deserialize(dp.optimizers.serialize(OPTIMIZERS[optimizer]))
        model.compile(chosen, "sparse_categorical_crossentropy", metrics=["accuracy"], dtype=dtype, **CPU)
        return model

    def ten(model: dp.Sequential) -> list[float]:
        return model.fit(X, Y, batch_size=6, epochs=5, verbose=0, shuffle=False).history["loss"]

    straight, path = build(), tmp_path / "m.keras"
    ten(straight)
    straight.save(path)
    loaded = dp.models.load_model(path, **CPU)
    loaded.save(path)  # before it is on a device
    reloaded = dp.models.load_model(path, **CPU)
    expected = ten(straight)
    assert ten(loaded) == expected
    assert ten(reloaded) == expected
    for weight, other in zip(reloaded.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)
        assert weight.dtype == dtype
    assert reloaded.seed == 9


def test_load_weights_takes_the_optimizer_where_it_is_in_use(tmp_path):
    path, model = tmp_path / "w.weights.h5", small()
    model.fit(X, Y, batch_size=4, verbose=0)
    model.save_weights(path)
    unused, used = small(seed=2), small(seed=3)
    unused.load_weights(path)
    assert int(unused.optimizer.iterations) == 0
    used.fit(X, Y, batch_size=6, verbose=0)
    used.load_weights(path)
    assert int(used.optimizer.iterations) == 3
    for ours, theirs in zip(used.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    used.save(tmp_path / "m.keras")
    unused.load_weights(tmp_path / "m.keras")
    np.testing.assert_array_equal(unused.predict(X), model.predict(X))
    used.compile("sgd", "sparse_categorical_crossentropy", dtype="float64", **CPU)
    used.fit(X, Y, verbose=0)
    with pytest.warns(UserWarning, match="'sgd', because it has 2 variables whereas the saved optimizer has 10"):
        used.load_weights(path)
    np.testing.assert_array_equal(used.predict(X), model.predict(X))


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_a_learning_rate_of_zero(tmp_path, dtype):
    model = small(dtype=dtype)
    model.optimizer.learning_rate = 0.0
    model.save(tmp_path / "m.keras")
    assert float(dp.models.load_model(tmp_path / "m.keras", **CPU).optimizer.learning_rate) == 0.0
    model.optimizer.learning_rate = 0.5
    model.load_weights(tmp_path / "m.keras")
    assert float(model.optimizer.learning_rate) == 0.5  # not in use: its state is not taken


def test_the_functions_of_saving(tmp_path):
    model = small()
    dp.saving.save_model(model, tmp_path / "m.keras")
    loaded = dp.saving.load_model(str(tmp_path / "m.keras"), compile=False)
    for weight, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)
    with pytest.raises(ConfigError, match="must call `compile"):
        loaded.evaluate(X, Y)


def test_compiling_again_forgets_the_file(tmp_path):
    model = small()
    model.fit(X, Y, batch_size=4, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", **CPU)
    loaded.compile("adam", "sparse_categorical_crossentropy", dtype="float64", **CPU)
    loaded.predict(X)
    assert int(loaded.optimizer.iterations) == 0
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


# Hostile files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers__dense__vars__0": lambda f: f.__setitem__("layers/dense/vars/0", h5py.SoftLink("/vars"))}, "link"),
        (
            {
                "layers__dense__vars__0": lambda f: f.__setitem__(
                    "layers/dense/vars/0", h5py.ExternalLink("/etc/x", "/")
                )
            },
            "link",
        ),
        ({"layers__dense": lambda f: f.__setitem__("layers/dense", h5py.ExternalLink("/etc/x", "/"))}, "link"),
        (
            {
                "layers__dense__vars__0": lambda f: f.create_dataset(
                    "layers/dense/vars/0", (6, 4), "f8", compression="gzip"
                )
            },
            "192 bytes declared, 0 stored",
        ),
        (
            {
                "layers__dense__vars__0": lambda f: f.create_dataset(
                    "layers/dense/vars/0", (1 << 40, 4), "f8", chunks=(1, 4)
                )
            },
            "35184372088832 bytes declared",
        ),
        (
            {
                "layers__dense__vars__0": lambda f: f.create_dataset(
                    "layers/dense/vars/0", (6, 4), "f8", external="/etc/passwd"
                )
            },
            "another file",
        ),
        ({"layers__dense__vars__0": np.zeros((6, 4), "S3")}, r"dtype \|S3"),
        ({"layers__dense__vars__0": np.zeros((6, 4), complex)}, "dtype complex128"),
        ({"layers__dense__vars__0": np.zeros((6, 4), int)}, "dtype int64"),
        ({"layers__dense__vars__0": {}}, "is not an array"),
        ({"layers__dense__vars__7": np.zeros(3)}, "expected arrays 0 to 2"),
        ({"layers__dense__layers__inner__vars__0": np.zeros(3)}, "layers/dense/layers/inner/vars/0: not in the model"),
        (
            {"layers__dense__again": lambda f: f.__setitem__("layers/dense/again", f["layers"])},
            "groups nested more than 64 deep",
        ),
        ({"layers__flatten": np.zeros(3), "layers__flatten__vars": None}, "flatten is not a group"),
    ],
)
def test_hostile_hdf5(tmp_path, change, message):
    path, content = tmp_path / "w.weights.h5", {"layers__flatten__vars": {}} | change
    kernels = dict(KERNELS)
    if "layers__dense" in content:
        kernels.pop("dense")
    write_h5(path, kernels, **content)
    error = data_error(lambda: small().load_weights(path))
    assert re.search(message, error), error
    assert "\n" not in error


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04\x95abc", b"<html>", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n" + bytes(99)]
)
@pytest.mark.parametrize("name", ["w.weights.h5", "m.keras"])
def test_other_files(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    error = data_error(lambda: small().load_weights(tmp_path / name))
    assert str(tmp_path / name) in error
    assert ("pickle" in error) == content.startswith(b"\x80")
    if name.endswith(".keras"):
        assert data_error(lambda: dp.models.load_model(tmp_path / name))
    missing = tmp_path / f"none-{name}"
    assert data_error(lambda: small().load_weights(missing)) == f"{missing}: not found"


def test_keras_2_is_told_apart(tmp_path):
    with h5py.File(tmp_path / "w.weights.h5", "w") as file:
        file.attrs["layer_names"] = ["dense"]
    assert "Keras 2" in data_error(lambda: small().load_weights(tmp_path / "w.weights.h5"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"[1]", "expected a JSON object, found list"),
        (b"{", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"\xff", "damaged"),
        (b" " * (17 << 20), "at most 16777216 are read"),
        (model_json(class_name="Functional"), "Unrecognized keyword arguments passed to Model"),
        (model_json(class_name="Dense", config={"units": 3}), "'Dense' is not a model"),
        (model_json(config=3), "Sequential' has no config"),
        (model_json(dense(units=10**9)), r"the model has \d{10} weights or more, which the file cannot hold"),
        (model_json(dense(units=10**30)), "damaged|weights or more, which the file"),
        (model_json(dense(units=2**62), dense(name="e", units=4)), "damaged|weights or more, which the file"),
        (model_json(dense(name="a", units=4), dense(name="a", units=2)), "unique"),
        (model_json(dense(class_name="FlaxLayer")), "FlaxLayer"),
        (model_json(compile_config={"optimizer": "mine", "loss": "mse"}), "unknown optimizer 'mine'"),
        (model_json(compile_config=7), "compile_config: expected a JSON object"),
    ],
)
def test_hostile_configurations(tmp_path, config, message):
    write_zip(tmp_path / "m.keras", config, h5_bytes())
    error = data_error(lambda: dp.models.load_model(tmp_path / "m.keras"))
    assert re.search(message, error), error
    assert error.startswith(str(tmp_path / "m.keras"))
    assert "\n" not in error


@pytest.mark.parametrize(
    ("levels", "message"), [(95, "Sequential"), (500, "a configuration nested more than 100 levels deep")]
)
def test_how_deep_a_configuration_may_be_nested(tmp_path, levels, message):
    """Of a class name that is no text, which takes Python's recursion no further than it goes."""
    nested: Any = 0
    for _ in range(levels):
        nested = [nested]
    write_zip(tmp_path / "m.keras", {"class_name": "Sequential", "config": nested}, h5_bytes())
    assert message in data_error(lambda: dp.models.load_model(tmp_path / "m.keras"))


@pytest.mark.parametrize("levels", [100, 101])
def test_json_is_nested_no_deeper_than_its_readers_go(levels):
    content = (b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1), b"[" * levels + b"]" * levels)
    if levels == 100:
        assert isinstance(parse_json("x.json", content[0]), dict)
    else:
        assert "x.json: a configuration nested more than 100 levels deep" in data_error(
            lambda: parse_json("x.json", content[0])
        )
    with pytest.raises(DataError, match=r"expected a JSON object"):
        parse_json("x.json", content[1])


def test_hostile_archives(tmp_path, monkeypatch):
    path = tmp_path / "m.keras"

    def refusal() -> str:
        return data_error(lambda: dp.models.load_model(path))

    write_zip(path, model_json(), b"\x80\x04not weights")
    assert "pickles can run code" in refusal()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    assert "no metadata.json in the archive; found config.json" in refusal()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", json.dumps(model_json()))
        archive.writestr("metadata.json", "{}")
        archive.writestr("model.weights.h5", bytes(70 << 20))
    assert "73400320 bytes declared, at most 67108864 are read" in refusal()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("config.json", "{}")
    assert "compressed in a way that is not supported" in refusal()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("config.json", "{}")
    assert "2 members with 1 names" in refusal()
    for metadata, message in (
        ({"format": 2, "seed": 1}, "this build reads <= 1"),
        ({"format": 1, "seed": -1}, "seed = -1"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", json.dumps(model_json()))
            archive.writestr("metadata.json", json.dumps({"dptrain": metadata}))
        assert message in refusal()


def test_a_declared_size_that_the_archive_does_not_have(tmp_path):
    path = tmp_path / "m.keras"
    write_zip(path, model_json(), h5_bytes())
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("model.weights.h5").file_size.to_bytes(4, "little")
    assert content.count(size * 2) == 2  # compressed and not, in the member's header and in the directory
    path.write_bytes(content.replace(size * 2, (1 << 31).to_bytes(4, "little") * 2))
    error = data_error(lambda: dp.models.load_model(path))
    assert "2147483648 bytes declared" in error


def test_a_packed_archive_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", json.dumps(model_json()))
        archive.writestr("metadata.json", "{}")
        archive.writestr("model.weights.h5", h5_bytes())
        archive.writestr("assets/notes.txt", "passed over")
    model = dp.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(model.get_weights()[0], KERNELS["dense"][0].astype(np.float32))


SLOW = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CHANGES = st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 255)), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[bytes, bytes]:
    folder, model = tmp_path_factory.mktemp("written"), small()
    model.fit(X, Y, verbose=0)
    model.save(folder / "m.keras")
    model.save_weights(folder / "w.weights.h5")
    return (folder / "w.weights.h5").read_bytes(), (folder / "m.keras").read_bytes()


def changed(content: bytes, changes: list[tuple[int, int]], cut: bool) -> bytes:
    result = bytearray(content)
    for place, value in changes:
        result[place % len(result)] = value
    return bytes(result[: changes[0][0] % len(result)] if cut else result)


@SLOW
@given(changes=CHANGES, cut=st.booleans(), weights_only=st.booleans())
def test_changed_bytes(written, tmp_path, changes, cut, weights_only):
    path = tmp_path / ("w.weights.h5" if weights_only else "m.keras")
    path.write_bytes(changed(written[0 if weights_only else 1], changes, cut))
    if weights_only:
        assert "\n" not in data_error(lambda: small().load_weights(path))
    else:
        assert "\n" not in data_error(lambda: dp.models.load_model(path, **CPU))


@pytest.mark.parametrize("file_name", ["w.weights.h5", "m.keras", "w.safetensors"])
def test_no_flipped_bit_changes_what_is_loaded(written, tmp_path, file_name):
    """Some bits of an HDF5 file are of no use; wherever the others flip, the file is refused."""
    model = small()
    model.fit(X, Y, verbose=0)
    if file_name == "w.safetensors":
        model.save_weights(tmp_path / file_name)
        content = (tmp_path / file_name).read_bytes()
    else:
        content = written[file_name == "m.keras"]
    path, draw, refused = tmp_path / file_name, random.Random(3), 0
    for _ in range(60):
        bit, damaged = draw.randrange(8 * len(content)), bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        loaded = small(seed=5)
        try:
            if file_name == "m.keras":
                loaded = dp.models.load_model(path, **CPU)
            else:
                loaded.load_weights(path)
        except DataError:
            refused += 1
            continue
        pairs = zip(loaded.get_weights(), model.get_weights(), strict=True)
        assert all(weight.tobytes() == other.tobytes() for weight, other in pairs), f"bit {bit}"
    assert refused >= (60 if file_name == "w.safetensors" else 20)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["class_name", "config", "name", "module"]), inner)
    ),
    max_leaves=6,
)


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each place below `value`."""
    keys = list(range(len(value))) if isinstance(value, list) else list(value) if isinstance(value, dict) else []
    return [path for key in keys for path in [(*above, key), *places(value[key], (*above, key))]]


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@SLOW
@given(where=st.integers(0, 10_000), value=JSON)
def test_changed_configurations(written, tmp_path, where, value):
    """Any place of the configuration gets any value."""
    with zipfile.ZipFile(io.BytesIO(written[1])) as archive:
        config, weights = json.loads(archive.read("config.json")), archive.read("model.weights.h5")
    *above, key = (paths := places(config))[where % len(paths)]
    place: Any = config
    for outer_key in above:
        place = place[outer_key]
    place[key] = value
    write_zip(tmp_path / "m.keras", config, weights)
    assert "\n" not in data_error(lambda: dp.models.load_model(tmp_path / "m.keras", **CPU))
