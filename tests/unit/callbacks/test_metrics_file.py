"""MetricsFile, read by Prometheus' own parser."""

import time
import warnings

import pytest

from dptrain.callbacks import BackupAndRestore, LambdaCallback, MetricsFile
from dptrain.errors import ConfigError, OutputError
from tests.unit.callbacks import Rank1, build, toy, trainer

parser = pytest.importorskip("prometheus_client.parser")


def state(path):
    families = parser.text_string_to_metric_families(path.read_text())
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels.pop("run") for sample in samples} == {"first"}
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_it_says_where_the_training_is_after_steps_and_epochs_and_at_the_end(tmp_path):
    x, y = toy(50)
    path, seen = tmp_path / "run.prom", []
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(state(path)))
    begun = time.time()
    history = (
        build()
        .fit(
            x,
            y,
            batch_size=10,
            epochs=2,
            verbose=0,
            validation_data=(x, y),
            callbacks=[
                MetricsFile(path, "first", interval=0),
                BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
                look,
            ],
        )
        .history
    )
    steps = [(figures[("dptrain_epoch",)], figures[("dptrain_step",)]) for figures in seen]
    assert steps == [(epoch, step) for epoch in (1, 2) for step in range(1, 6)]
    assert all(figures[("dptrain_training",)] == 1 for figures in seen)
    assert ("dptrain_checkpoint_timestamp_seconds",) not in seen[0]
    figures = state(path)
    expected = {"dptrain_training": 0, "dptrain_ranks": 1, "dptrain_epoch": 2, "dptrain_epochs": 2, "dptrain_step": 5}
    assert {name: figures[(name,)] for name in expected} == expected
    assert {name[1]: value for name, value in figures.items() if name[0] == "dptrain_metric"} == {
        name: values[-1] for name, values in history.items()
    }
    assert figures[("dptrain_memory_bytes", "0")] > 1e7
    assert figures[("dptrain_samples_per_second",)] > 0
    for name in ("dptrain_heartbeat_timestamp_seconds", "dptrain_checkpoint_timestamp_seconds"):
        assert begun - 1 < figures[(name,)] < time.time() + 1


def test_steps_write_no_sooner_than_asked(tmp_path):
    x, y = toy(50)
    path, seen = tmp_path / "run.prom", []
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(state(path)[("dptrain_step",)]))
    build().fit(x, y, batch_size=10, verbose=0, callbacks=[MetricsFile(path, "first", interval=3600), look])
    assert seen == [0] * 5
    assert state(path)[("dptrain_step",)] == 5


def test_a_training_that_fails_has_ended(tmp_path):
    x, y = toy(50)
    path = tmp_path / "run.prom"

    def fail(batch, logs):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build().fit(
            x,
            y,
            batch_size=10,
            verbose=0,
            callbacks=[MetricsFile(path, "first"), LambdaCallback(on_train_batch_end=fail)],
        )
    assert state(path)[("dptrain_training",)] == 0


def test_what_cannot_be_written_is_an_error_at_first_and_given_up_later(tmp_path):
    x, y = toy(50)
    with pytest.raises(OutputError, match=r"run\.prom.*choose another `path` of MetricsFile"):
        build().fit(x, y, verbose=0, callbacks=[MetricsFile(tmp_path / "none" / "run.prom")])
    folder = tmp_path / "some"
    folder.mkdir()

    remove = LambdaCallback(
        on_epoch_end=lambda epoch, logs: folder.rename(tmp_path / "elsewhere") if not epoch else None
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = build().fit(x, y, epochs=3, verbose=0, callbacks=[MetricsFile(folder / "run.prom"), remove])
    assert len(losses.history["loss"]) == 3
    [warning] = [str(each.message) for each in caught]
    assert "is given up, and training continues" in warning


def test_options_that_make_no_sense_and_other_ranks(tmp_path):
    with pytest.raises(ConfigError, match="interval = -1: expected seconds >= 0"):
        MetricsFile(tmp_path / "run.prom", interval=-1)
    callback = MetricsFile(tmp_path / "run.prom")
    callback._set_trainer(trainer(Rank1()))
    callback._values = {"dptrain_training": {}}
    callback._release()
    assert not (tmp_path / "run.prom").exists()
