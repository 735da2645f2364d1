"""Trainings with callbacks. Arguments: way folder; rank 0 saves what a test looks at as out.npz in the folder."""

import json
import os
import sys
from pathlib import Path

import numpy as np

import dptrain as dp
from dptrain.comm import current

way, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
rng = np.random.default_rng(0)
x = rng.standard_normal((53, 6))
y = rng.integers(0, 3, 53)
model = dp.Sequential(
    [
        dp.layers.Dense(8, "tanh", input_shape=(6,)),
        dp.layers.Dropout(0.2),
        dp.layers.Dense(3, "softmax"),
    ],
    seed=1,
)
model.compile(
    dp.optimizers.Adam(0.01),
    "sparse_categorical_crossentropy",
    dtype="float32",
    device=os.environ.get("DEVICE", "cpu"),
)
steps: list[tuple[int, int]] = []


class Steps(dp.callbacks.Callback):
    """Notes the steps, and does what the way says at the third of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        steps.append((self.epoch, batch))
        if (self.epoch, batch) != (1, 2):
            return
        if way == "stop on rank 1" and rank == 1:
            self.model.stop_training = True
        if way.startswith("kill") and os.environ.get("KILL"):
            raise RuntimeError("killed")


class OwnLog(dp.callbacks.Callback):
    """Adds a log that is another one on rank 1, after the first epoch: NaN, none, or another number."""

    def on_epoch_end(self, epoch, logs=None):
        logs["own"] = 1.0 - 0.1 * epoch
        if epoch and rank == 1:
            logs["own"] += 0.5
            if way.startswith("NaN"):
                logs["own"] = float("nan")
            if way.startswith("no log"):
                del logs["own"]


class Saving(dp.Sequential):
    """Saves as `save` promises: rank 0 writes, all ranks fail alike."""

    def save(self, filepath, overwrite=True):
        current().agree("saving", lambda: Path(filepath).write_text("saved") if rank == 0 else None)


callbacks: list[dp.callbacks.Callback] = [Steps()]
options = {"verbose": 0}
backup = folder / "backup"
if way.startswith("kill"):
    callbacks.insert(0, dp.callbacks.BackupAndRestore(backup, 4 if way == "kill step" else "epoch"))
elif way == "schedule that differs":
    callbacks.append(dp.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 * (rank + 1)))
elif way == "csv":
    callbacks.append(dp.callbacks.CSVLogger(folder / "log.csv"))
    model.__class__ = Saving
    callbacks.append(dp.callbacks.ModelCheckpoint(folder / "new" / "{epoch}.keras", verbose=1))
    callbacks.append(dp.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10, factor=0.5))
    callbacks.append(dp.callbacks.EarlyStopping("loss", patience=2, min_delta=10, restore_best_weights=True, verbose=1))
    options = {"verbose": 2}
elif way == "csv that cannot be written":
    callbacks.append(dp.callbacks.CSVLogger(folder / "no" / "log.csv"))
elif way == "backup that cannot be written":
    (folder / "file").touch()
    callbacks.append(dp.callbacks.BackupAndRestore(folder / "file"))
elif way == "disk fails later" and rank == 0:

    def fail(*arguments, **named):
        raise OSError(28, "No space left on device")

    os.fsync = fail
if way == "disk fails later":
    callbacks.append(dp.callbacks.BackupAndRestore(backup, 3))
if way == "only rank 0 has one" and rank == 0:
    callbacks.append(dp.callbacks.CSVLogger(folder / "log.csv"))
if way == "ranks save at other steps":
    callbacks.append(dp.callbacks.BackupAndRestore(backup, 2 + rank))
if way.endswith("a log of its own"):
    watching = {
        "EarlyStopping": dp.callbacks.EarlyStopping("own", mode="min"),
        "ReduceLROnPlateau": dp.callbacks.ReduceLROnPlateau("own", mode="min", patience=1),
        "ModelCheckpoint": dp.callbacks.ModelCheckpoint(folder / "best.keras", "own", mode="min", save_best_only=True),
    }
    callbacks += [OwnLog(), *(callback for name, callback in watching.items() if name in way)]
if way == "nan":
    x[33] = np.nan
    callbacks.append(dp.callbacks.TerminateOnNaN(raise_error=True))
if way == "monitor nobody knows":
    callbacks.append(dp.callbacks.EarlyStopping("learning_rate"))
if way.startswith("rate of a schedule"):
    model.optimizer.learning_rate = dp.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    setting = dp.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    lowering = dp.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10)
    callbacks.append(setting if way.endswith("set") else lowering)
if way == "live line on rank 0" or way == "evaluation watched on rank 1":
    options = {"verbose": 1}
if way == "evaluation watched on rank 1" and rank == 1:
    callbacks.append(dp.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: steps.append((9, batch))))
model.fit(x, y, batch_size=8, epochs=4, callbacks=callbacks, validation_data=(x[:21], y[:21]), **options)
if way.startswith("evaluation stopped"):

    class Stop(dp.callbacks.Callback):
        """Ends evaluations and predictions after the third batch, where one rank says so."""

        def on_test_batch_end(self, batch, logs=None):
            steps.append((9, batch))
            self.model.stop_evaluating = rank == 1 and batch == 2

        def on_predict_batch_end(self, batch, logs=None):
            steps.append((8, batch))
            self.model.stop_predicting = rank == 1 and batch == 2

    def endless():
        while True:
            yield x[:7], y[:7]

    stopping = {"verbose": 0, "callbacks": [Stop()]}
    model.evaluate(x, y, batch_size=8, **stopping)
    model.evaluate(endless(), **stopping)
    assert len(model.predict(x, batch_size=8, **stopping)) == 24
    assert len(model.predict(((row,) for row, _ in endless()), **stopping)) == 21
facts = {"steps": steps, "epochs": model.history.epoch, "rate": model.optimizer.learning_rate}
facts["history"] = model.history.history
weights = model.get_weights()
facts["weights"] = [weight.tobytes().hex() for weight in weights]
everywhere = current().allgather(facts)
if way == "evaluation watched on rank 1":
    everywhere[1]["steps"] = [step for step in everywhere[1]["steps"] if step[0] != 9]
assert all(facts == everywhere[0] for facts in everywhere), everywhere
if rank == 0:
    (folder / "out.json").write_text(json.dumps(everywhere[0]))
