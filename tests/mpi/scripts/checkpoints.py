"""Trains a model that keeps checkpoints, on one mesh after another. Arguments: FOLDER OUT.npz EPOCHS FORM...

A form is "", "--shard-weights", "--shard-optimizer", a mesh or both, or "--stages=2". On each the training goes on from
the checkpoint that the one before has left, for EPOCHS more, and begins with its bits: else the script fails. Rank 0
saves what comes out, and as "best/PATH" the weights of the first epoch, which early stopping keeps for the end.

PLANTED="R CALL N" lets rank R kill itself at its Nth call of os.CALL in `runtime.storage.files`; PLANTED="R step N"
after N steps; PLANTED="R CALL N ENOSPC" lets the call fail so.
"""

import errno
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

import dptrain as dp
from dptrain import layers
from dptrain.callbacks import BackupAndRestore, Callback, EarlyStopping
from dptrain.cli.options.mesh import arranged, lay_out
from dptrain.comm import current
from dptrain.distribution import set_distribution
from dptrain.runtime.storage import files
from dptrain.saving.state import variables
from dptrain.train.sharding import Sharding

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(90, 12)), RNG.integers(0, 3, 90)


@contextmanager
def without_gathering():
    """Let no sharded variable be made whole."""
    with mock.patch.object(Sharding, "read", side_effect=AssertionError("gathered")):
        yield


class Watch(Callback):
    """Compares the state at the beginning with the one that was saved, keeps the last, and dies after so many steps."""

    def __init__(self, saved, dies):
        super().__init__()
        self.saved, self.dies = saved, dies

    def on_train_end(self, logs=None):
        self.ended = whole(self.model)

    def on_train_begin(self, logs=None):
        if self.saved is not None:
            same_bits(whole(self.model), self.saved)

    def on_train_batch_end(self, batch, logs=None):
        self.dies -= 1
        if self.dies == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Keeper(BackupAndRestore):
    """Neither saves nor restores with a sharded variable made whole."""

    def resume(self, hooks):
        with without_gathering():
            return super().resume(hooks)

    def save(self, hooks, position):
        with without_gathering():
            super().save(hooks, position)


class Stopping(EarlyStopping):
    """Keeps the weights of the epoch with the highest loss, the first, by parts."""

    def __init__(self):
        super().__init__("loss", mode="max", patience=99, restore_best_weights=True)

    def on_epoch_end(self, epoch, logs=None):
        with without_gathering():
            super().on_epoch_end(epoch, logs)
        assert self.best_epoch == 0

    def on_train_end(self, logs=None):
        with without_gathering():
            super().on_train_end(logs)


def whole(model):
    """Return all that a training changes. Collective."""
    return {path: variable.numpy() for path, variable in variables(model).items()}


def same_bits(arrays, expected):
    assert arrays.keys() == expected.keys()
    for path, array in arrays.items():
        assert array.dtype == expected[path].dtype, path
        assert array.tobytes() == expected[path].tobytes(), path


def build(form):
    dp.utils.set_random_seed(5)
    flags = form.split()
    options_given = [flag[2:].replace("-", "_").partition("=") for flag in flags if flag.startswith("--")]
    sharded = {name: int(number) if number else True for name, _, number in options_given}
    mesh = next((flag for flag in flags if not flag.startswith("--")), None)
    if mesh is not None:
        arranged(mesh, current())
    # With a fixed number of shards no layer may need all samples of a batch at once.
    normal = [] if "DPTRAIN_REPRODUCIBLE" in os.environ else [layers.BatchNormalization()]
    stack = [layers.Dense(17, "relu"), *normal, layers.Dropout(0.2), layers.Dense(10, "tanh")]
    model = dp.Sequential([dp.Input((12,)), *stack, layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", dtype="float64", jit_compile=False, **sharded)
    if mesh is not None:
        lay_out(model)
    return model


def planted():
    """Let this rank kill itself, or a call fail, where PLANTED says so; return after how many steps it does."""
    rank, call, number, *error = os.environ.get("PLANTED", "-1 step 0").split()
    if int(rank) != current().rank:
        return -1
    if call == "step":
        return int(number)
    left, real = [int(number)], getattr(os, call)

    def counted(*inputs, **options):
        left[0] -= 1
        if left[0] == 0 and error:
            raise OSError(getattr(errno, error[0]), os.strerror(getattr(errno, error[0])))
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*inputs, **options)

    module = type(os)("os")
    module.__dict__.update(vars(os))
    setattr(module, call, counted)
    files.os = module
    return -1


if __name__ == "__main__":
    folder, out, epochs, *forms = sys.argv[1:]
    dies, saved, best = planted(), None, None
    for number, form in enumerate(forms, 1):
        model = build(form)
        keeper = Keeper(Path(folder), save_freq=2, double_checkpoint=True, delete_checkpoint=False)
        watch, total = Watch(saved, dies), number * int(epochs)
        model.fit(X, Y, batch_size=30, epochs=total, verbose=0, callbacks=[keeper, watch, Stopping()])
        saved, before = watch.ended, best
        best = {f"best/{path}": weight.numpy() for path, weight in model._weights_by_path().items()}
        if before is not None:
            same_bits(best, before)
        set_distribution(None)
    if current().rank == 0:
        np.savez(out, **saved, **best)
