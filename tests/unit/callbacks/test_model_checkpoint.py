import os
import threading

import pytest

import dptrain as dp
from dptrain.callbacks import Callback, CallbackList, LambdaCallback, ModelCheckpoint
from dptrain.errors import ConfigError, OutputError
from tests.unit.callbacks import FakeModel, Rank1, build, drive, toy


def epochs(*values: float) -> list[dict[str, float]]:
    return [{"loss": 1.0, "val_loss": value, "val_accuracy": value} for value in values]


def saved(callback, logs, **options) -> list[str]:
    model = FakeModel()
    drive(callback, logs, model, **options)
    return [path.rpartition("/")[2] for _, path in model.saved]


def test_names_follow_from_epoch_and_logs(tmp_path):
    callback = ModelCheckpoint(tmp_path / "new" / "{epoch:02d}-{val_loss:.2f}.keras")
    assert saved(callback, epochs(2.345, 1)) == ["01-2.35.keras", "02-1.00.keras"]
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({}, (3, 2, 2.5, 1), [1, 2, 4]),
        ({"mode": "max"}, (3, 2, 2.5, 4), [1, 4]),
        ({"initial_value_threshold": 2.2}, (3, 2, 2.5, 1), [2, 4]),
        ({"monitor": "val_accuracy"}, (0.1, 0.3, 0.2), [1, 2]),
        ({"save_best_only": False}, (3, 2, 2.5), [1, 2, 3]),
    ],
)
def test_only_the_best(tmp_path, options, values, expected):
    options = {"save_best_only": True} | options
    callback = ModelCheckpoint(tmp_path / "{epoch}.keras", **options)
    actual = saved(callback, epochs(*values), metrics=("accuracy",))
    assert actual == [f"{number}.keras" for number in expected]


def test_the_best_of_an_earlier_training_counts(tmp_path):
    callback = ModelCheckpoint(tmp_path / "best.keras", save_best_only=True)
    assert len(saved(callback, epochs(2))) == 1
    assert saved(callback, epochs(3)) == []


@pytest.mark.parametrize(("freq", "expected"), [(2, ["1-2", "2-1", "2-3"]), (3, ["1-3", "2-3"]), (4, ["2-1"])])
def test_every_few_steps_counted_on_over_epochs(tmp_path, freq, expected):
    callback = ModelCheckpoint(tmp_path / "{epoch}-{batch}.keras", save_freq=freq)
    steps = [[{"loss": 1.0}] * 3] * 2
    assert saved(callback, epochs(1, 1), steps=steps) == [f"{name}.keras" for name in expected]


def test_weights_alone_go_the_other_way(tmp_path):
    for name in ("a.weights.h5", "a.safetensors"):
        model = FakeModel()
        drive(ModelCheckpoint(tmp_path / name, save_weights_only=True), epochs(1), model)
        assert model.saved == [("weights", str(tmp_path / name))]


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("a.h5", {}, r"The filepath provided must end in `.keras` \(Keras model format\). Received: filepath=a.h5"),
        ("a.keras", {"save_weights_only": True}, r"must end in `.weights.h5`"),
        (
            "a.keras",
            {"save_freq": "batch"},
            r"Unrecognized save_freq: batch. Expected save_freq are 'epoch' or integer",
        ),
    ],
)
def test_bad_arguments(path, options, message):
    with pytest.raises(ConfigError, match=message):
        ModelCheckpoint(path, **options)


def test_a_key_that_the_logs_lack(tmp_path):
    with pytest.raises(KeyError, match="Failed to format this callback filepath: "):
        drive(ModelCheckpoint(tmp_path / "{val_mape}.keras"), epochs(1))


def test_a_log_that_is_not_there_saves_with_a_warning(tmp_path):
    callback = ModelCheckpoint(tmp_path / "a.keras", save_best_only=True)
    with pytest.warns(UserWarning, match="Can save best model only with val_loss available"):
        assert saved(callback, [{"loss": 1.0}]) == ["a.keras"]


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OutputError, match=r"Not a directory; choose another `filepath` of ModelCheckpoint|File exists; choose"
    ):
        drive(ModelCheckpoint(tmp_path / "file" / "a.keras"), epochs(1))
    (tmp_path / "a.keras").mkdir()
    with pytest.raises(OSError, match="Please specify a non-directory filepath for ModelCheckpoint"):
        drive(ModelCheckpoint(tmp_path / "a.keras"), epochs(1))


def test_it_speaks_as_keras(tmp_path, capsys):
    path = tmp_path / "a.keras"
    drive(ModelCheckpoint(path, verbose=1, save_best_only=True), epochs(2, 3, 1))
    assert capsys.readouterr().out == (
        f"\nEpoch 1: val_loss improved from None to 2.00000, saving model to {path}\n"
        f"\nEpoch 1: finished saving model to {path}\n"
        "\nEpoch 2: val_loss did not improve from 2.00000\n"
        f"\nEpoch 3: val_loss improved from 2.00000 to 1.00000, saving model to {path}\n"
        f"\nEpoch 3: finished saving model to {path}\n"
    )
    drive(ModelCheckpoint(path, verbose=1), epochs(2))
    out = f"\nEpoch 1: saving model to {path}\n\nEpoch 1: finished saving model to {path}\n"
    assert capsys.readouterr().out == out


def test_other_ranks_take_part_in_saving_but_make_no_directory(tmp_path, capsys):
    model = FakeModel()
    drive(ModelCheckpoint(tmp_path / "new" / "a.keras", verbose=1), epochs(1), model, comm=Rank1())
    assert len(model.saved) == 1
    assert not (tmp_path / "new").exists()
    assert capsys.readouterr().out == ""


def test_the_best_weights_of_a_training_are_in_the_file(tmp_path):
    x, y = toy()
    model, best_model = build(), build()
    path = tmp_path / "best.safetensors"
    best = ModelCheckpoint(path, "loss", mode="max", save_best_only=True, save_weights_only=True)
    model.fit(x, y, epochs=3, verbose=0, shuffle=False, callbacks=best)  # the first epoch's loss is the highest
    best_model.fit(x, y, verbose=0, shuffle=False)
    model.load_weights(path)
    for mine, expected in zip(model.get_weights(), best_model.get_weights(), strict=True):
        assert mine.tobytes() == expected.tobytes()


@pytest.fixture
def disk(monkeypatch):
    """A disk that is ready when the event is set, and full where `full` holds something."""
    ready, full, flush = threading.Event(), [], os.fsync

    def fsync(handle: int) -> None:
        assert ready.wait(60)
        if full:
            raise OSError(28, "No space left on device")
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    ready.full = full
    yield ready
    ready.set()


def begun(callback: Callback, *others: Callback, model=None) -> CallbackList:
    """Return the hooks of a training whose first epoch is over."""
    model = model or build()
    model.build(None)
    hooks = CallbackList([callback, *others], model, verbose=0, epochs=2, steps=None)
    hooks.on_train_begin()
    hooks.on_epoch_end(0, {"loss": 1.0})
    return hooks


@pytest.mark.parametrize("name", ["{epoch}.keras", "{epoch}.weights.h5", "{epoch}.safetensors"])
def test_a_file_is_written_while_the_training_goes_on(tmp_path, disk, name, capsys):
    model = build()
    callback = ModelCheckpoint(tmp_path / name, save_weights_only="keras" not in name, verbose=1)
    hooks = begun(callback, model=model)
    path = tmp_path / name.format(epoch=1)
    assert not path.exists()
    assert "finished" not in capsys.readouterr().out
    expected = model.get_weights()
    model.set_weights([weight + 1 for weight in expected])
    disk.set()
    hooks.on_epoch_end(1, {"loss": 1.0})
    output = capsys.readouterr().out
    assert output.index(f"Epoch 1: finished saving model to {path}") < output.index("Epoch 2: saving")
    hooks.on_train_end()
    assert "Epoch 2: finished" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 2
    model.load_weights(path)
    for mine, expected_weight in zip(model.get_weights(), expected, strict=True):
        assert mine.tobytes() == expected_weight.tobytes(), "the weights are those of the epoch's end"


class OwnSave(dp.Sequential):
    """A model whose user saves in another way."""

    def save(self, filepath, overwrite=True):
        super().save(filepath, overwrite)
        assert filepath.is_file() if hasattr(filepath, "is_file") else os.path.isfile(filepath)


class Looks(Callback):
    """A user's."""


@pytest.mark.parametrize("who", ["callback", "lambda", "model"])
def test_who_could_look_for_a_file_finds_it_as_in_keras(tmp_path, disk, who):
    disk.set()
    path = tmp_path / "a.keras"
    model = OwnSave(build().layers) if who == "model" else build()
    results = []
    others = {
        "callback": [Looks()],
        "lambda": [LambdaCallback(on_epoch_end=lambda epoch, logs: results.append(path.exists()))],
    }.get(who, [])
    begun(ModelCheckpoint(path), *others, model=model)
    assert path.exists()
    assert results == [True] * (who == "lambda")


def test_a_checkpoint_of_the_training_waits_for_the_file(tmp_path, disk):
    callback = ModelCheckpoint(tmp_path / "a.keras")
    begun(callback)
    threading.Timer(0.1, disk.set).start()
    callback.state_dict()
    assert (tmp_path / "a.keras").exists()


def test_what_the_thread_met_is_raised_at_the_next_save_and_in_the_end(tmp_path, disk):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"as it was")
    disk.full.append(True)
    disk.set()
    full = f"{path}: No space left on device .*; choose another `filepath` of ModelCheckpoint"
    for end in (lambda hooks: hooks.on_epoch_end(1, {}), lambda hooks: hooks.on_train_end()):
        hooks = begun(ModelCheckpoint(path, save_weights_only=True))
        with pytest.raises(OutputError, match=full):
            end(hooks)
    hooks = begun(ModelCheckpoint(path, save_weights_only=True))
    with pytest.warns(UserWarning, match=full):
        hooks._release()
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert path.read_bytes() == b"as it was"
