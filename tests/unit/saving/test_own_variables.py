"""Layers that say what is in files: `save_own_variables`, `load_own_variables`, `save_assets`, `load_assets`."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.errors import ConfigError, DataError
from dptrain.saving import keras_h5, reading, saveables

h5py = pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


class Rounded(layers.Dense):
    """A Dense that keeps whole percents, and a number beside its weights."""

    steps = 0

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["percents"] = np.round(100 * self.kernel.numpy()).astype(np.int8)
        del store["0"]
        store["steps"] = self.steps

    def load_own_variables(self, store):
        self.kernel.assign(store["percents"] / 100)
        self.bias.assign(store["1"])
        self.steps = int(store["steps"])


class Words(layers.Layer):
    """A vocabulary in a file of its own."""

    def __init__(self, words=(), **options):
        super().__init__(**options)
        self.inner, self.vocabulary = Rounded(2), tuple(words)

    def call(self, inputs):
        return self.inner(inputs)

    def get_config(self):
        return {"name": self.name}

    def save_assets(self, inner_path):
        if self.vocabulary:
            Path(inner_path, "more").mkdir()
            Path(inner_path, "more", "words.txt").write_text("\n".join(self.vocabulary))

    def load_assets(self, inner_path):
        self.vocabulary = () if inner_path is None else tuple(Path(inner_path, "more/words.txt").read_text().split())


OBJECTS = {"Rounded": Rounded, "Words": Words}


def model(words: Any = ("one", "two")) -> dp.Model:
    net = dp.Sequential([layers.Input((3,)), Words(words), layers.Dense(1), Words(())])
    net.set_weights([np.full(weight.shape, number / 7) for number, weight in enumerate(net.weights, 1)])
    net.layers[0].inner.steps = 5
    return net


def assert_loaded(loaded: dp.Model, percents: Any = np.round) -> None:
    expected = [
        np.round(weight, 2) if weight.ndim == 2 and weight.shape[1] == 2 else weight for weight in model().get_weights()
    ]
    for weight, other in zip(loaded.get_weights(), expected, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-6)
    assert loaded.layers[0].inner.steps == 5


def test_a_whole_model(tmp_path):
    model().save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        assert archive.read("assets/layers/words/more/words.txt") == b"one\ntwo"
        assert [name for name in archive.namelist() if "assets" in name] == ["assets/layers/words/more/words.txt"]
        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
            group = file["layers/words/inner/vars"]
            assert {name: (value.dtype.name, value.shape) for name, value in group.items()} == {
                "1": ("float32", (2,)),
                "percents": ("int8", (3, 2)),
                "steps": ("int64", ()),
            }
    loaded = dp.models.load_model(tmp_path / "m.keras", OBJECTS)
    assert_loaded(loaded)
    assert [layer.vocabulary for layer in loaded.layers if isinstance(layer, Words)] == [("one", "two"), ()]


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_weights_alone(tmp_path, name):
    (model().save if name == "m.keras" else model().save_weights)(tmp_path / name)
    other = dp.Sequential([layers.Input((3,)), Words(), layers.Dense(1), Words()])
    other.load_weights(tmp_path / name)
    assert_loaded(other)


def test_weights_that_are_not_loaded_are_drawn(tmp_path):
    class Half(layers.Dense):
        def load_own_variables(self, store):
            self.bias.assign(store["1"])

    dp.Sequential([layers.Input((3,)), Half(2)]).save(tmp_path / "m.keras")
    loaded = dp.models.load_model(tmp_path / "m.keras", {"Half": Half})
    assert np.ptp(loaded.get_weights()[0]) > 0


def test_what_does_not_fit(tmp_path):
    class Strict(layers.Dense):
        def load_own_variables(self, store):
            store = {name: array for name, array in store.items() if name != "extra"}
            super().load_own_variables(store)

    def model_of(kind):
        return dp.Sequential([layers.Input((3,)), kind(2)])

    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        file["layers/strict/vars/0"] = np.zeros((3, 2))
        file["layers/strict/vars/extra"] = np.zeros(3)
    with pytest.raises(ConfigError, match=r"Layer 'strict' expected 2 variables, but received 1 variables"):
        model_of(Strict).load_weights(path)
    with pytest.warns(UserWarning, match="skipped layer 'strict'"):
        model_of(Strict).load_weights(path, skip_mismatch=True)
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.zeros((3, 2))
        file["layers/dense/vars/extra"] = np.zeros(3)
    with pytest.raises(DataError, match="expected arrays 0 to 1, found 0, extra"):
        model_of(layers.Dense).load_weights(path)
    with h5py.File(path, "w") as file:
        file.create_group("layers/dense/vars")
    with pytest.raises(DataError, match="strict/kernel: not in the file"):
        model_of(Strict).load_weights(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("a/b", 1, "a name without '/'"), ("a", "text", "expected numbers"), ("a", None, "expected numbers")],
)
def test_what_no_store_takes(tmp_path, name, value, message):
    class Wrong(layers.Dense):
        def save_own_variables(self, store):
            store[name] = value

    with pytest.raises(ConfigError, match=f"`save_own_variables` of layer 'wrong'.*{message}"):
        dp.Sequential([layers.Input((3,)), Wrong(2)]).save_weights(tmp_path / "m.weights.h5")


@pytest.mark.parametrize("name", ["assets/../../evil", "assets//evil", "assets/a\\b", "assets/./a"])
def test_assets_lie_in_their_folder(tmp_path, name):
    model().save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras", "a") as archive:
        archive.writestr(name, "evil")
    with pytest.raises(DataError, match="is not the name of a file in it"):
        dp.models.load_model(tmp_path / "m.keras", OBJECTS)


def test_a_file_in_the_place_of_a_folder_of_assets(tmp_path):
    model().save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras", "a") as archive:
        archive.writestr("assets/layers/words/more/words.txt/below", "evil")
    with pytest.raises(DataError, match=r"m\.keras: "):
        dp.models.load_model(tmp_path / "m.keras", OBJECTS)


def test_only_files_are_assets(tmp_path):
    class Linking(Words):
        def save_assets(self, inner_path):
            Path(inner_path, "link").symlink_to("/etc/passwd")

    with pytest.raises(ConfigError, match="layers/linking/link is neither a file nor a folder"):
        dp.Sequential([layers.Input((3,)), Linking()]).save(tmp_path / "m.keras")


def test_ranks_get_what_rank_0_has_read(tmp_path):
    net = model()
    net.save_weights(tmp_path / "m.weights.h5")
    content = io.BytesIO((tmp_path / "m.weights.h5").read_bytes())
    arrays_read = keras_h5.load(content, "m", net)
    messages: list[Any] = []

    class Comm:
        """Two ranks, one after the other: what the first sends the second gets."""

        size = 2

        def broadcast_fact(self, fact):
            if fact is None:
                return messages.pop(0)
            messages.append(fact)
            return fact

        def broadcast(self, buffer):
            if self.rank == 0:
                messages.append(buffer.copy())
            else:
                buffer[...] = messages.pop(0)

    comm, stored = Comm(), (keras_h5.stored_variables(net), saveables.layers_with_stores(net))
    comm.rank = 0
    reading.share(comm, arrays_read, *stored)
    comm.rank = 1
    shared = reading.share(comm, None, *stored)
    assert shared.stores.keys() == arrays_read.stores.keys()
    for layer, store in shared.stores.items():
        np.testing.assert_equal(store, arrays_read.stores[layer])
    assert messages == []
