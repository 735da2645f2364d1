import json

import numpy as np
import pytest

from dptrain.batches.feed import StreamedFeed
from dptrain.callbacks import (
    BackupAndRestore,
    CallbackList,
    LambdaCallback,
    LearningRateScheduler,
    ReduceLROnPlateau,
)
from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.optimizers import SGD, Adam, RMSprop, schedules
from dptrain.saving.state import variables
from tests.unit.callbacks import build, toy


class KilledError(Exception):
    """What ends the training."""


def bomb(epoch: int, step: int) -> LambdaCallback:
    """Return a callback that ends the training after a step (counted from 0) of an epoch."""
    at = []

    def fail(batch, logs):
        if (at[-1], batch) == (epoch, step):
            raise KilledError

    return LambdaCallback(on_epoch_begin=lambda number, logs: at.append(number), on_train_batch_end=fail)


def state(model) -> list[bytes]:
    return [one.numpy().tobytes() for one in variables(model).values()]


ROWS = 53
FIT = {"batch_size": 8, "epochs": 4, "verbose": 0}  # 7 steps an epoch
CASES = {
    "epoch": ({}, {}, "epoch", (2, 3)),
    "step": ({}, {}, 3, (2, 3)),
    "every step": ({}, {}, 1, (1, 0)),
    "last step of an epoch": ({}, {}, 7, (2, 0)),
    "before the first backup": ({}, {}, 5, (0, 2)),
    "dropout": ({"dropout": 0.4}, {}, 4, (2, 5)),
    "sgd": ({"optimizer": lambda: SGD(0.1, momentum=0.9)}, {}, 4, (2, 5)),
    "rmsprop": ({"optimizer": RMSprop}, {}, "epoch", (3, 5)),
    "batch shuffle": ({}, {"shuffle": "batch"}, 4, (2, 5)),
    "steps_per_epoch": ({}, {"steps_per_epoch": 5}, 3, (2, 3)),
    "initial_epoch": ({}, {"initial_epoch": 1}, 3, (2, 3)),
    "initial_epoch and steps_per_epoch": ({}, {"initial_epoch": 1, "steps_per_epoch": 4}, "epoch", (3, 2)),
}


def make(options):
    options = dict(options)
    return build((options.pop("optimizer", None) or (lambda: Adam(0.01)))(), **options)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_an_uninterrupted_training(tmp_path, case):
    options, fit, freq, at = CASES[case]
    x, y = toy(ROWS)
    arguments = FIT | fit | {"validation_data": (x[:20], y[:20])}
    whole = make(options)
    expected = whole.fit(x, y, **arguments).history
    first = make(options)
    with pytest.raises(KilledError):
        first.fit(x, y, **arguments, callbacks=[BackupAndRestore(tmp_path, freq), bomb(*at)])
    again = make(options)
    history = again.fit(x, y, **arguments, callbacks=BackupAndRestore(tmp_path, freq))
    assert state(again) == state(whole)
    if case != "before the first backup":
        assert again.history.epoch[0] > 0
    for key, values in history.history.items():
        assert values == expected[key][-len(again.history.epoch) :], key
    assert list(tmp_path.parent.glob("*/latest*")) == []


class Halving(schedules.LearningRateSchedule):
    """A schedule of the user's own, which cannot be serialized."""

    def __call__(self, step):
        return 0.02 * 0.9**step


SCHEDULES = {
    "CosineDecay": lambda: schedules.CosineDecay(0.02, 20, warmup_target=0.05, warmup_steps=5),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.02, 6),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.02, 5, 0.7),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.02, 5, 0.7, staircase=True),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([8, 17], [0.02, 0.01, 0.001]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.02, 24),
    "Halving": Halving,
}


def test_every_schedule_is_tried():
    assert SCHEDULES.keys() - {"Halving"} == schedules.SCHEDULES.keys()


@pytest.mark.parametrize("freq", ["epoch", 3])
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("accumulated", [None, 2])
def test_a_schedule_goes_on_by_its_steps(tmp_path, kind, freq, accumulated):
    def make():
        return build(Adam(SCHEDULES[kind](), gradient_accumulation_steps=accumulated))

    x, y = toy(ROWS)
    whole, again = make(), make()
    whole.fit(x, y, **FIT)
    with pytest.raises(KilledError):
        make().fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, freq), bomb(2, 4)])
    history = again.fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, freq)])
    assert history.epoch[0] == 2
    assert again.optimizer.learning_rate == whole.optimizer.learning_rate
    assert state(again) == state(whole)


@pytest.mark.parametrize("freq", ["epoch", 3])
@pytest.mark.parametrize("first", [True, False])
def test_learning_rates_go_on_too(tmp_path, freq, first):
    """The schedule depends on the rate before: asked twice for one epoch it would give another."""

    def callbacks(*more):
        backup = [BackupAndRestore(tmp_path, freq)]
        rates = [LearningRateScheduler(lambda epoch, rate: rate * 0.9)]
        return [*(backup + rates if first else rates + backup), *more]

    x, y = toy(ROWS)
    whole = build()
    whole.fit(x, y, **FIT, callbacks=[LearningRateScheduler(lambda epoch, rate: rate * 0.9)])
    with pytest.raises(KilledError):
        build().fit(x, y, **FIT, callbacks=callbacks(bomb(2, 4)))
    again = build()
    again.fit(x, y, **FIT, callbacks=callbacks())
    assert again.optimizer.learning_rate == whole.optimizer.learning_rate
    assert state(again) == state(whole)


def test_a_reduced_learning_rate_stays_reduced(tmp_path):
    def reduce():
        return ReduceLROnPlateau("loss", mode="max", factor=0.5, patience=1)

    x, y = toy(ROWS)
    with pytest.raises(KilledError):
        build().fit(x, y, **FIT, callbacks=[reduce(), BackupAndRestore(tmp_path), bomb(3, 0)])
    again = build()
    again.fit(x, y, **FIT | {"epochs": 3}, callbacks=[BackupAndRestore(tmp_path)])
    assert again.optimizer.learning_rate == 0.01 * 0.25


def test_streamed_samples_go_on_in_the_middle(tmp_path):
    x, y = toy(ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dptrain.batches.base.make_feed", lambda backend, arrays, *_: StreamedFeed(backend, arrays, 16))
        whole, again = build(), build()
        whole.fit(x, y, **FIT)
        with pytest.raises(KilledError):
            build().fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, 4), bomb(2, 5)])
        again.fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, 4)])
    assert state(again) == state(whole)


def interrupt(path, freq="epoch", **options):
    x, y = toy(ROWS)
    with pytest.raises(KilledError):
        build().fit(x, y, **FIT, callbacks=[BackupAndRestore(path, freq, **options), bomb(2, 3)])
    return x, y


def test_timing_counts_what_was_done_now(tmp_path):
    x, y = interrupt(tmp_path, 4)
    seen = []
    model = build()
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model._trainer_kept.timing))
    model.fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, 4), note])
    assert [(timing.steps, timing.samples) for timing in seen] == [(5, 53 - 16), (7, 53)]


def test_files_are_deleted_or_kept(tmp_path):
    x, y = interrupt(tmp_path)
    (tmp_path / "mine").write_text("stays")
    build().fit(x, y, **FIT, callbacks=BackupAndRestore(tmp_path, delete_checkpoint=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.safetensors", "mine"]
    model = build()
    model.fit(x, y, **FIT, callbacks=BackupAndRestore(tmp_path))
    assert model.history.epoch == [], "all epochs were done"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "other"])
def test_a_damaged_file_is_named_and_the_one_before_taken(tmp_path, damage):
    x, y = interrupt(tmp_path, double_checkpoint=True)
    latest = tmp_path / "latest.safetensors"
    content = bytearray(latest.read_bytes())
    if damage == "bit":
        content[-5] ^= 1
    latest.write_bytes({"cut": content[:-9], "bit": content, "empty": b"", "other": b"\x02" + bytes(7) + b"{}"}[damage])
    whole, again = build(), build()
    whole.fit(x, y, **FIT)
    with pytest.warns(UserWarning, match=r"latest.safetensors is .*; going on from latest.safetensors.bkp"):
        again.fit(x, y, **FIT, callbacks=BackupAndRestore(tmp_path, delete_checkpoint=False))
    assert again.history.epoch == [1, 2, 3]
    assert state(again) == state(whole)
    (tmp_path / "latest.safetensors.bkp").unlink()
    latest.write_bytes(content[:-9])
    with pytest.raises(DataError, match=r"latest.safetensors is damaged .*; delete it to start afresh"):
        build().fit(x, y, **FIT, callbacks=BackupAndRestore(tmp_path))


@pytest.mark.parametrize(
    ("options", "fit", "what"),
    [
        ({"optimizer": SGD(0.1)}, {}, "optimizer: it has Adam, this one SGD"),
        ({}, {"batch_size": 16}, "steps: it has 7, this one 4"),
    ],
)
def test_the_backup_of_another_training_is_refused(tmp_path, options, fit, what):
    x, y = interrupt(tmp_path)
    with pytest.raises(ConfigError, match=f"is the backup of another training: {what}"):
        build(**options).fit(x, y, **FIT | fit, callbacks=BackupAndRestore(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "Empty `backup_dir` argument passed"),
        (("a", "batch"), r"Invalid value for argument `save_freq`. Received: save_freq=batch. Expected either 'epoch'"),
        (("a", 0), "Received: save_freq=0"),
        (("a", False), "not supported: save_freq=False"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        BackupAndRestore(*arguments)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    x, y = toy()
    with pytest.raises(OutputError, match="choose another `backup_dir` of BackupAndRestore"):
        build().fit(x, y, verbose=0, callbacks=BackupAndRestore(tmp_path / "file"))


def test_no_pickle_and_one_file(tmp_path):
    interrupt(tmp_path, 4)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    about = json.loads(header.pop("__metadata__")["about"])
    assert (about["epoch"], about["step"]) == (2, 2)
    weights = ("dense/bias", "dense/kernel", "dense_1/bias", "dense_1/kernel")
    slots = [f"adam/{path.replace('/', '_')}_{slot}" for path in weights for slot in ("momentum", "velocity")]
    totals = [f"{name}/{part}" for name in ("loss", "sparse_categorical_accuracy") for part in ("count", "total")]
    assert sorted(header) == sorted([*weights, *slots, "adam/iteration", "adam/learning_rate", *totals])
    assert {entry["dtype"] for entry in header.values()} == {"F64", "I64"}
    assert np.frombuffer(content[8 + length :], np.float64).size > 0


def test_steps_cost_nothing_where_epochs_are_saved():
    assert not CallbackList(BackupAndRestore("a")).has_batch_hooks("train")
    assert CallbackList(BackupAndRestore("a", 5)).has_batch_hooks("train")
