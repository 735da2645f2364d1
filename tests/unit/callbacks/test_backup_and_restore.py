import contextlib
import itertools
import json
import os
import re
import signal

import numpy as np
import pytest
import safetensors.numpy

import dptrain as dp
from dptrain.batches.feed import StreamedFeed
from dptrain.callbacks import (
    BackupAndRestore,
    CallbackList,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.optimizers import SGD, Adam, RMSprop, schedules
from dptrain.saving.state import variables
from tests.sample import sample
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
    return [variable.numpy().tobytes() for variable in variables(model).values()]


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


def began(epochs: list[int]) -> LambdaCallback:
    """Return a callback that notes the epochs that begin."""
    return LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))


def make(options):
    options = dict(options)
    return build((options.pop("optimizer", None) or (lambda: Adam(0.01)))(), **options)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("case", sample(CASES, 2))
def test_the_bits_of_an_uninterrupted_training(tmp_path, case):
    options, fit, freq, at = CASES[case]
    x, y = toy(ROWS)
    arguments = FIT | fit | {"validation_data": (x[:20], y[:20])}
    complete = make(options)
    expected = complete.fit(x, y, **arguments).history
    whole_epochs = complete.history.epoch
    first = make(options)
    with pytest.raises(KilledError):
        first.fit(x, y, **arguments, callbacks=[BackupAndRestore(tmp_path, freq), bomb(*at)])
    resumed, epochs = make(options), []
    resumed.fit(x, y, **arguments, callbacks=[BackupAndRestore(tmp_path, freq), began(epochs)])
    assert state(resumed) == state(complete)
    assert (resumed.history.epoch, resumed.history.history) == (whole_epochs, expected)
    assert (epochs[0] > arguments.get("initial_epoch", 0)) == (case not in ("before the first backup", "every step"))
    assert not tmp_path.exists(), "nothing is left when the training has come to its end"


@pytest.mark.parametrize(("freq", "at"), [("epoch", (2, 3)), (3, (2, 3)), (3, (3, 6)), (7, (3, 1))])
def test_callbacks_go_on_with_what_they_held(tmp_path, freq, at):
    def callbacks(folder):
        folder.mkdir(exist_ok=True)
        return [
            EarlyStopping("loss", patience=3, min_delta=10, restore_best_weights=True),
            CSVLogger(folder / "log.csv"),
            ReduceLROnPlateau("loss", patience=2, min_delta=10, factor=0.5),
            BackupAndRestore(folder / "backup", freq),
            ModelCheckpoint(folder / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True),
        ]

    x, y = toy(ROWS)
    fit = FIT | {"epochs": 8, "validation_data": (x[:20], y[:20])}
    model, again = build(), build()
    expected = callbacks(tmp_path / "whole")
    model.fit(x, y, **fit, callbacks=expected)
    assert len(model.history.epoch) == 4, "stopped early"
    with pytest.raises(KilledError):
        build().fit(x, y, **fit, callbacks=[*callbacks(tmp_path / "again"), bomb(*at)])
    actual = callbacks(tmp_path / "again")
    again.fit(x, y, **fit, callbacks=actual)
    assert state(again) == state(model)
    assert again.history.history == model.history.history
    assert (tmp_path / "again/log.csv").read_bytes() == (tmp_path / "whole/log.csv").read_bytes()
    for actual_logs, other in zip(actual, expected, strict=True):
        assert repr(actual_logs.state_dict()) == repr(other.state_dict())


def test_a_training_that_was_stopped_is_not_trained_on(tmp_path):
    """The kill comes between the last checkpoint and the end."""
    x, y = toy(ROWS)

    def stop(epoch, logs):
        model.stop_training = epoch == 1

    def fail(logs):
        raise KilledError

    for ending in (fail, lambda logs: None):
        model, epochs = build(), []
        callbacks = [LambdaCallback(on_epoch_end=stop, on_train_end=ending), BackupAndRestore(tmp_path), began(epochs)]
        with contextlib.suppress(KilledError):
            model.fit(x, y, **FIT, callbacks=callbacks)
    assert epochs == []
    assert model.history.epoch == [0, 1]


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


@pytest.mark.parametrize(
    ("kind", "freq", "accumulated"),
    sample([("Halving", "epoch", None), *((schedule, 3, 2) for schedule in SCHEDULES)], 2),
)
def test_a_schedule_goes_on_by_its_steps(tmp_path, kind, freq, accumulated):
    def make():
        return build(Adam(SCHEDULES[kind](), gradient_accumulation_steps=accumulated))

    x, y = toy(ROWS)
    complete, resumed = make(), make()
    complete.fit(x, y, **FIT)
    with pytest.raises(KilledError):
        make().fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, freq), bomb(2, 4)])
    epochs = []
    resumed.fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, freq), began(epochs)])
    assert epochs[0] == 2
    assert resumed.optimizer.learning_rate == complete.optimizer.learning_rate
    assert state(resumed) == state(complete)


@pytest.mark.parametrize("freq", ["epoch", 3])
@pytest.mark.parametrize("first", [True, False])
def test_learning_rates_go_on_too(tmp_path, freq, first):
    """The schedule depends on the rate before: asked twice for one epoch it would give another."""

    def callbacks(*more):
        backup = [BackupAndRestore(tmp_path, freq)]
        rates = [LearningRateScheduler(lambda epoch, rate: rate * 0.9)]
        return [*(backup + rates if first else rates + backup), *more]

    x, y = toy(ROWS)
    model = build()
    model.fit(x, y, **FIT, callbacks=[LearningRateScheduler(lambda epoch, rate: rate * 0.9)])
    with pytest.raises(KilledError):
        build().fit(x, y, **FIT, callbacks=callbacks(bomb(2, 4)))
    again = build()
    again.fit(x, y, **FIT, callbacks=callbacks())
    assert again.optimizer.learning_rate == model.optimizer.learning_rate
    assert state(again) == state(model)


def test_a_reduced_learning_rate_stays_reduced(tmp_path):
    def reduce():
        return ReduceLROnPlateau("loss", mode="max", factor=0.5, patience=1)

    x, y = toy(ROWS)
    with pytest.raises(KilledError):
        build().fit(x, y, **FIT, callbacks=[reduce(), BackupAndRestore(tmp_path), bomb(3, 0)])
    model = build()
    model.fit(x, y, **FIT | {"epochs": 3}, callbacks=[BackupAndRestore(tmp_path)])
    assert model.optimizer.learning_rate == 0.01 * 0.25


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_saves_and_ends(tmp_path, capsys, number, error):
    def at(epoch, step):
        return LambdaCallback(on_train_batch_end=lambda batch, logs: batch == step and os.kill(os.getpid(), number))

    x, y = toy(ROWS)
    model, again, epochs = build(), build(), []
    model.fit(x, y, **FIT)
    before = signal.getsignal(number)
    with pytest.raises(error) as ended:
        build().fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path), at(0, 2)])
    assert getattr(ended.value, "code", 75) == 75
    assert signal.getsignal(number) is before
    assert re.search(rf" after [34] steps, saved as {tmp_path}/000001-step-[34]\n", capsys.readouterr().err)
    again.fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path), began(epochs)])
    assert (state(again), again.history.history) == (state(model), model.history.history)
    assert epochs[0] == 0


def test_steps_that_were_left_out_before_the_interruption_count(tmp_path):
    x, y = toy(ROWS)
    x[[3, 30]] = float("nan")
    fit = FIT | {"on_nonfinite": "skip", "shuffle": False}
    model, again = build(), build()
    expected = model.fit(x, y, **fit).history
    assert expected["skipped_steps"] == [2] * 4
    with pytest.raises(KilledError):
        build().fit(x, y, **fit, callbacks=[BackupAndRestore(tmp_path, 1), bomb(1, 2)])
    assert again.fit(x, y, **fit, callbacks=[BackupAndRestore(tmp_path, 1)]).history == expected


def stopping(at: tuple[int, int]) -> LambdaCallback:
    """Return a callback that stops the training after a step of an epoch, both counted from 0."""
    epochs = []

    def step(batch, logs):
        epochs[-1].model.stop_training |= (len(epochs) - 1, batch) == at

    callback = LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(callback), on_train_batch_end=step)
    return callback


@pytest.mark.parametrize("case", ["arrays", "dropout", "generator", "stopped"])
def test_a_signal_in_a_validation_ends_it_and_the_epoch_goes_on_there(tmp_path, case):
    x, y = toy(ROWS)
    seen = []

    def callbacks(signals):
        def step(batch, logs):
            seen.append(batch)
            if signals and len(seen) == 7:  # the second epoch's second
                os.kill(os.getpid(), signal.SIGTERM)

        # A hook of batches makes the training look at what the host is asked to do after each.
        return [LambdaCallback(on_test_batch_end=step)] + [stopping((1, 2))] * (case == "stopped")

    def fit(model, *more, signals=False):
        arguments = FIT | {"validation_data": (x[:20], y[:20]), "validation_batch_size": 4}
        data = (x, y)
        if case == "generator":
            batches = [(x[begin : begin + 8], y[begin : begin + 8]) for begin in range(0, 24, 8)]
            data = (itertools.chain.from_iterable(itertools.repeat(batches)),)
            arguments = {"epochs": 4, "verbose": 0, "steps_per_epoch": 3, "shuffle": False} | {
                key: arguments[key] for key in ("validation_data", "validation_batch_size")
            }
        model.fit(*data, **arguments, callbacks=[*more, *callbacks(signals)])

    options = {"steps_per_execution": 1, "dropout": 0.4 * (case == "dropout")}
    complete, first, resumed = (build(**options) for _ in range(3))
    fit(complete)
    seen.clear()
    with pytest.raises(SystemExit) as ended:
        fit(first, BackupAndRestore(tmp_path), signals=True)
    assert ended.value.code == 75
    assert seen == [*range(5), 0, 1], "the validation was left at once"
    epochs = []
    fit(resumed, BackupAndRestore(tmp_path), began(epochs))
    assert epochs[0] == 1
    assert state(resumed) == state(complete)
    assert (resumed.history.epoch, resumed.history.history) == (complete.history.epoch, complete.history.history)


def test_streamed_samples_go_on_in_the_middle(tmp_path):
    x, y = toy(ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dptrain.batches.base.make_feed", lambda backend, arrays, *_: StreamedFeed(backend, arrays, 16))
        model, again = build(), build()
        model.fit(x, y, **FIT)
        with pytest.raises(KilledError):
            build().fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, 4), bomb(2, 5)])
        again.fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, 4)])
    assert state(again) == state(model)


class Numbered(dp.utils.PyDataset):
    """Batches by number; every epoch but the first has another order."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.turns = x, y, 0

    def __len__(self):
        return 7

    def __getitem__(self, index):
        index = (index + self.turns) % 7
        return self.x[8 * index : 8 * index + 8], self.y[8 * index : 8 * index + 8]

    def on_epoch_end(self):
        self.turns += 1


class Loader:
    """Batches afresh for every epoch."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return 7

    def __iter__(self):
        return ((self.x[8 * n : 8 * n + 8], self.y[8 * n : 8 * n + 8]) for n in range(7))


def endless(x, y):
    """A generator whose batches never come twice."""
    for number in itertools.count():
        yield x[:8] + number, y[:8]


@pytest.mark.parametrize(("freq", "at"), sample([(3, (2, 4)), ("epoch", (2, 4)), (7, (2, 1))], 3))
@pytest.mark.parametrize(
    ("make", "fit"),
    [
        (Numbered, {}),
        (Numbered, {"steps_per_epoch": 7, "shuffle": False}),
        (endless, {"steps_per_epoch": 7, "shuffle": False}),
        (Loader, {"shuffle": False}),
    ],
    ids=["by number", "steps_per_epoch", "generator", "loader"],
)
def test_batches_of_the_users_own_go_on(tmp_path, make, fit, freq, at):
    x, y = toy(56)
    fit = {"epochs": 4, "verbose": 0} | fit
    model, again = build(), build()
    model.fit(make(x, y), **fit)
    with pytest.raises(KilledError):
        build().fit(make(x, y), **fit, callbacks=[BackupAndRestore(tmp_path, freq), bomb(*at)])
    again.fit(make(x, y), **fit, callbacks=BackupAndRestore(tmp_path, freq))
    assert (state(again), again.history.history) == (state(model), model.history.history)


def interrupt(path, freq="epoch", **options):
    x, y = toy(ROWS)
    with pytest.raises(KilledError):
        build().fit(x, y, **FIT, callbacks=[BackupAndRestore(path, freq, **options), bomb(2, 3)])
    return x, y


def test_timing_counts_what_was_done_now(tmp_path):
    x, y = interrupt(tmp_path, 4)
    seen = []
    model = build()
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model._fit_trainer.timing))
    model.fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, 4), note])
    assert [(timing.steps, timing.samples) for timing in seen] == [(5, 53 - 16), (7, 53)]


def test_files_are_deleted_or_kept(tmp_path):
    x, y = interrupt(tmp_path)
    (tmp_path / "mine").write_text("stays")
    build().fit(x, y, **FIT, callbacks=BackupAndRestore(tmp_path, delete_checkpoint=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000004-step-28", "lock", "mine"]
    model, epochs = build(), []
    model.fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path), began(epochs)])
    assert (epochs, model.history.epoch) == ([], [0, 1, 2, 3]), "all epochs were done"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, file):
    x, y = interrupt(tmp_path, double_checkpoint=True)
    _, latest = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    content = bytearray((latest / file).read_bytes())
    content[-5] ^= 1
    (latest / file).write_bytes(content)
    model, again = build(), build()
    model.fit(x, y, **FIT)
    epochs = []
    with pytest.warns(UserWarning, match=rf"000002-step-14: damaged: .*{file}.*; resuming from 000001-step-7"):
        again.fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path, delete_checkpoint=False), began(epochs)])
    assert epochs == [1, 2, 3]
    assert state(again) == state(model)
    (left,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (left / file).write_bytes(b"")
    with pytest.raises(DataError, match=rf"no checkpoint can be used: .*{left.name}: damaged"):
        build().fit(x, y, **FIT, callbacks=BackupAndRestore(tmp_path))


def test_two_trainings_cannot_use_one_directory(tmp_path):
    x, y = toy(ROWS)

    def second(epoch, logs):
        build().fit(x, y, **FIT, callbacks=BackupAndRestore(tmp_path))

    with pytest.raises(OutputError, match=rf"another training is using it \(host .*, pid {os.getpid()}, since "):
        build().fit(x, y, **FIT, callbacks=[BackupAndRestore(tmp_path), LambdaCallback(on_epoch_begin=second)])


@pytest.mark.parametrize(
    ("options", "fit", "what"),
    [
        ({"optimizer": SGD(0.1)}, {}, "optimizer.class: it has 'Adam', this one 'SGD'; optimizer.name: .*; start with"),
        ({"optimizer": Adam(0.02)}, {}, "optimizer.learning_rate: it has 0.01, this one 0.02; start with the same"),
        ({}, {"batch_size": 16}, "steps: it has 7, this one 4; batch_size: it has 8, this one 16; start with the same"),
    ],
)
def test_the_backup_of_another_training_is_refused(tmp_path, options, fit, what):
    x, y = interrupt(tmp_path)
    with pytest.raises(ConfigError, match=f"is the checkpoint of another training: {what}"):
        build(**options).fit(x, y, **FIT | fit, callbacks=BackupAndRestore(tmp_path))


def test_what_may_differ_is_named(tmp_path):
    x, y = interrupt(tmp_path)
    callback, model = BackupAndRestore(tmp_path), build(Adam(0.02))
    callback.resume_anyway = ["optimizer.learning_rate"]
    model.fit(x, y, **FIT, callbacks=callback)
    assert model.optimizer.learning_rate == 0.02, "what was asked for"


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


def test_what_a_checkpoint_holds(tmp_path):
    interrupt(tmp_path, 4)
    (path,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert path.name == "000004-step-16"
    state = json.loads((path / "state.json").read_text())
    assert state["position"] | {"rate_at_begin": 0} == {
        "epoch": 2, "step": 2, "made": 16, "rate_at_begin": 0, "ended": False, "logs": {}, "stops": False,
        "skipped_at_begin": None,
    }  # fmt: skip
    weights = ("dense/bias", "dense/kernel", "dense_1/bias", "dense_1/kernel")
    slots = [f"adam/{path.replace('/', '_')}_{slot}" for path in weights for slot in ("momentum", "velocity")]
    totals = [f"{name}/{part}" for name in ("loss", "sparse_categorical_accuracy") for part in ("count", "total")]
    rest = safetensors.numpy.load_file(path / "training.safetensors")
    assert sorted(rest) == sorted([*slots, "adam/iteration", "adam/learning_rate", *totals])
    assert sorted(safetensors.numpy.load_file(path / "model.safetensors")) == sorted(weights)
    build().load_weights(path / "model.safetensors")


def test_steps_run_together_all_the_same():
    assert not CallbackList(BackupAndRestore("a", 5))._has_batch_hooks("train")


def test_a_model_that_is_made_anew_goes_on_with_the_seed_of_the_backup(tmp_path):
    """As in a notebook: the second model of a process has another seed than the first."""
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.ones((40, 1))

    def made():
        model = dp.Sequential([dp.layers.Dense(4, "tanh"), dp.layers.Dropout(0.5), dp.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    class Stops(dp.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise ZeroDivisionError

    def fit(model, *callbacks):
        model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=list(callbacks))
        return model.get_weights()

    dp.utils.set_random_seed(0)
    expected = fit(made())
    dp.utils.set_random_seed(0)
    backup = dp.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(ZeroDivisionError):
        fit(made(), backup, Stops())
    second = made()
    assert second.seed != 0
    for weight, other in zip(fit(second, backup), expected, strict=True):
        np.testing.assert_array_equal(weight, other)
    with pytest.raises(ZeroDivisionError):
        fit(made(), backup, Stops())
    chosen = dp.Sequential(made().layers, seed=7)
    chosen.compile("adam", "mse")
    with pytest.raises(ConfigError, match="another training: seed"):
        fit(chosen, backup)
