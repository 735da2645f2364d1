"""A layer in several models of a model is one layer in files, too."""

import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.layers import Dense, Input

pytest.importorskip("h5py", reason="Keras' files need the extra 'keras-files'")

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def two_heads() -> dp.Model:
    shared, inputs = Dense(4, name="shared"), Input((3,))
    heads = [dp.Sequential([Input((3,)), shared, Dense(units)], name=f"head_{units}") for units in (1, 2)]
    return dp.Model(inputs, [head(inputs) for head in heads])


def two_towers() -> dp.Model:
    encoder = dp.Sequential([Input((3,)), Dense(3)], name="encoder")
    ends = [Input((3,)) for _ in range(3)]
    towers = [dp.Model(end, Dense(2)(encoder(end)), name=f"tower_{n}") for n, end in enumerate(ends[:2])]
    return dp.Model(ends[2], layers.Add()([towers[0](ends[2]), towers[1](encoder(ends[2]))]))


def extractor_of_a_base() -> dp.Model:
    inputs, outer = Input((3,)), Input((3,))
    hidden = Dense(4, name="hidden")(inputs)
    base = dp.Model(inputs, Dense(2)(hidden), name="base")
    extractor = dp.Model(base.input, base.get_layer("hidden").output, name="extractor")
    return dp.Model(outer, [base(outer), extractor(outer)])


class Twice(layers.Layer):
    """Two layers, which may be one."""

    def __init__(self, first, second, **options):
        super().__init__(**options)
        self.first, self.second = first, second

    def call(self, inputs):
        return self.second(self.first(inputs))

    def get_config(self):
        inner = {name: dp.saving.serialize_keras_object(getattr(self, name)) for name in ("first", "second")}
        return {**super().get_config(), **inner}

    @classmethod
    def from_config(cls, config):
        inner = {name: dp.saving.deserialize_keras_object(config[name]) for name in ("first", "second")}
        return cls(**{**config, **inner})


def in_a_layer_of_ones_own() -> dp.Model:
    layer = Dense(3)
    return dp.Sequential([Input((3,)), Twice(layer, layer)])


@pytest.mark.parametrize("make", [two_heads, two_towers, extractor_of_a_base, in_a_layer_of_ones_own])
def test_a_layer_in_several_models_of_a_model(tmp_path, make):
    model, path = make(), tmp_path / "m.keras"
    model.save(path)
    loaded = dp.models.load_model(path, {"Twice": Twice})
    np.testing.assert_equal(loaded.get_weights(), model.get_weights())
    expected, actual = ([np.asarray(output) for output in dp.tree.flatten(net(X))] for net in (model, loaded))
    np.testing.assert_equal(actual, expected)
    loaded.save(tmp_path / "again.keras")
    assert (tmp_path / "again.keras").read_bytes() == path.read_bytes()
    restored = dp.models.model_from_json(model.to_json(), {"Twice": Twice})
    assert len(restored.weights) == len(model.weights)


def test_only_what_is_shared_has_an_id(tmp_path):
    extractor_of_a_base().save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        config = json.loads(archive.read("config.json"))["config"]
    _, base, extractor = config["layers"]
    ids = [[layer.get("shared_object_id") for layer in net["config"]["layers"]] for net in (base, extractor)]
    assert ids[0][:2] == ids[1]
    assert None not in ids[1]
    assert ids[0][2] is None
    assert "shared_object_id" not in base


def test_ids_hold_within_a_file(tmp_path):
    two_heads().save(tmp_path / "m.keras")
    first, other = (dp.models.load_model(tmp_path / "m.keras") for _ in range(2))
    assert not {id(layer) for layer in first._flatten_layers()} & {id(layer) for layer in other._flatten_layers()}


def test_configurations_need_no_import_before():
    code = "import dptrain as k; print(k.saving.serialize_keras_object(k.layers.Dense(3))['class_name'])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.stdout.strip() == "Dense", process.stderr
