"""Models by the folder of a run or a sweep."""

import os
from pathlib import Path

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError, DataError
from dptrain.saving import keras_zip
from dptrain.saving.run_folder import model_file


def small(units: int = 2) -> dp.Model:
    model = dp.Sequential([dp.layers.Input((3,)), dp.layers.Dense(units)], seed=1)
    model.compile("adam", "mse", device="cpu")
    return model


def test_a_run_s_folder_is_its_model(tmp_path):
    model = small()
    model.save(tmp_path / "model.keras")
    x = np.ones((2, 3), np.float32)
    for load in (dp.models.load_model, dp.saving.load_model):
        loaded = load(str(tmp_path), device="cpu")
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_the_best_model_is_another_file(tmp_path):
    small(2).save(tmp_path / "model.keras")
    small(4).save(tmp_path / "best.keras")
    assert dp.models.load_model(tmp_path, best=True).output_shape == (None, 4)
    assert dp.models.load_model(tmp_path).output_shape == (None, 2)
    with pytest.raises(ConfigError, match="best = True needs the folder of a run"):
        dp.models.load_model(tmp_path / "model.keras", best=True)


def test_the_same_model_has_the_same_bytes(monkeypatch):
    model = small()
    first = keras_zip.encode(model)
    monkeypatch.setattr("time.localtime", lambda *_: (2001, 2, 3, 4, 5, 6, 0, 0, 0))
    assert keras_zip.encode(model) == first


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no folder of a run: it has neither model.keras nor config.yaml$"),
        (["X/model.keras"], r"did you mean .*/X\?"),
        (["config.yaml"], "the run has not finished; it has no checkpoint; `python -m dptrain --config .*--out"),
        (
            ["config.yaml", "checkpoints/000002-step-8/x", "checkpoints/000010-step-40/x"],
            "not finished; its newest checkpoint is checkpoints/000010-step-40; ",
        ),
        (["config.yaml", "summary.json"], "the run is of an earlier version; `python -m dptrain --config"),
        (["sweep.yaml"], "the sweep has kept no model; --keep best"),
        (["sweep.yaml", "models/a.keras", "models/b.keras"], "kept 2 models: name one of models/a.keras, models/b.ker"),
    ],
)
def test_a_folder_without_a_model_says_what_to_do(tmp_path, files, message):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        model_file(tmp_path)


def test_a_sweep_s_only_model_is_found(tmp_path):
    (tmp_path / "models").mkdir()
    for name in ("sweep.yaml", "models/trial-0-seed-1.keras"):
        (tmp_path / name).touch()
    assert model_file(tmp_path) == tmp_path / "models" / "trial-0-seed-1.keras"


def test_a_finished_run_without_a_best_model(tmp_path):
    for name in ("config.yaml", "summary.json", "model.keras"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"monitored no metric; its last model is model.keras"):
        model_file(tmp_path, best=True)


def test_what_is_neither_folder_nor_keras_file(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: not found; expected the folder of a run, or a .keras file"):
        model_file(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"expected a `.keras` extension, or the folder of a run"):
        model_file(tmp_path / "model.h5")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["model.keras", "models/trial-0-seed-0.keras"])
def test_a_model_in_a_folder_is_a_regular_file(tmp_path, name, kind):
    """Whoever wants a link followed names the file."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "sweep.yaml").write_text("")
    creators = {"link": lambda path: path.symlink_to("/etc/hostname"), "pipe": os.mkfifo, "folder": Path.mkdir}
    creators[kind](tmp_path / name)
    with pytest.raises(DataError, match=r"\.keras: it is a (link|named pipe|folder), expected a regular file"):
        model_file(tmp_path)
