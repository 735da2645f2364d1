"""Every callback goes on where a training was interrupted, wherever that was: weights, history and decisions."""

from pathlib import Path

import pytest

from dptrain import callbacks as rooms
from dptrain.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    EpochRecorder,
    History,
    LambdaCallback,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    SwapEMAWeights,
    TerminateOnNaN,
)
from dptrain.optimizers import SGD
from tests.unit.callbacks import build, toy

EPOCHS, STEPS = 6, 4
# Where a training ends: an epoch and a step of it, from 0. Step 0 is an epoch's begin.
INTERRUPTIONS = [(1, 1), (2, 0), (4, 2), (5, 3)]
# By class, with options that let states matter in every epoch: nothing improves by as much as `min_delta`.
CALLBACKS = {
    CSVLogger: lambda folder: CSVLogger(folder / "log.csv"),
    EarlyStopping: lambda folder: EarlyStopping(
        "loss", min_delta=10, patience=4, restore_best_weights=True, start_from_epoch=1
    ),
    LearningRateScheduler: lambda folder: LearningRateScheduler(lambda epoch, rate: 0.7 * rate),
    ModelCheckpoint: lambda folder: ModelCheckpoint(
        folder / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3
    ),
    ReduceLROnPlateau: lambda folder: ReduceLROnPlateau("loss", factor=0.7, min_delta=10, patience=1, cooldown=2),
    SwapEMAWeights: lambda folder: SwapEMAWeights(swap_on_epoch=True),
}
# What keeps nothing that decides: they show, note or end a training.
WITHOUT_STATE = {
    *(BackupAndRestore, EpochRecorder, History, LambdaCallback, TerminateOnNaN),
    *(
        rooms.MetricsFile,
        rooms.MlflowCallback,
        rooms.Profiler,
        rooms.ProgbarLogger,
        rooms.TensorBoard,
        rooms.WandbMetricsLogger,
    ),
}


class CutShortError(Exception):
    """What ends a training."""


def interruption(epoch: int, step: int) -> LambdaCallback:
    numbers: list[int] = []

    def end(batch, logs):
        if (numbers[-1], batch) == (epoch, step):
            raise CutShortError

    return LambdaCallback(on_epoch_begin=lambda number, logs: numbers.append(number), on_train_batch_begin=end)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix == ".csv"} | {
        path.name: b"" for path in folder.iterdir() if path.suffix == ".h5"
    }


def test_the_table_has_every_callback():
    public = {getattr(rooms, name) for name in rooms.__all__}
    classes = {each for each in public if isinstance(each, type) and issubclass(each, Callback)}
    assert classes - {Callback, rooms.CallbackList, rooms.MonitorCallback} == CALLBACKS.keys() | WITHOUT_STATE


@pytest.mark.sample(6)
@pytest.mark.parametrize("save_freq", ["epoch", 3])
@pytest.mark.parametrize("kind", CALLBACKS, ids=lambda kind: kind.__name__)
def test_an_interrupted_training_goes_on_with_the_callback_as_it_was(tmp_path, kind, save_freq):
    x, y = toy(4 * STEPS)

    def train(folder, *more):
        folder.mkdir(exist_ok=True)
        model = build(SGD(0.1, momentum=0.5, use_ema=True, ema_momentum=0.8))
        callback = CALLBACKS[kind](folder)
        arguments = {"batch_size": 4, "epochs": EPOCHS, "verbose": 0, "validation_data": (x[:8], y[:8])}
        model.fit(x, y, **arguments, callbacks=[callback, *more])
        weights = [weight.tolist() for weight in model.get_weights()]
        return weights, model.history.history, repr(callback.state_dict()), files(folder)

    whole = train(tmp_path / "whole")
    for at in INTERRUPTIONS if save_freq == "epoch" else INTERRUPTIONS[::2]:
        folder = tmp_path / f"{at}"
        backup = BackupAndRestore(folder / "backup", save_freq)
        try:
            train(folder, backup, interruption(*at))
        except CutShortError:
            assert train(folder, BackupAndRestore(folder / "backup", save_freq)) == whole, at
        else:
            assert kind is EarlyStopping, "the training has ended before"
