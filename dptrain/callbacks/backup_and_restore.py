"""BackupAndRestore: a training that was interrupted goes on where it was, to the bit."""

import json
import os
from pathlib import Path
from typing import Any

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.ranks import on_rank_0, ranks_of
from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.runtime.failure import warn
from dptrain.runtime.files import output_error, sync, write_atomically
from dptrain.saving.state import Arrays, decode, encode, restore, variables

_FILE, _PREVIOUS = "latest.safetensors", "latest.safetensors.bkp"
_ADVICE = "choose another `backup_dir` of BackupAndRestore"


class BackupAndRestore(Callback):
    """Keeps the state of the training in a directory, and lets the next `fit` go on from what it finds there.

    The state is: epoch and step; all variables: weights, optimizer slots, number of updates, learning rate, numbers of
    random draws, and the sums of loss and metrics in the epoch at hand. The order of the samples is a function of seed
    and epoch. So with the same arguments of `compile` and `fit` the result has the bits of an uninterrupted training,
    on the same number of ranks. What other callbacks hold, such as EarlyStopping's best value, is not in it, as in
    Keras. Put it behind callbacks that change the learning rate at an epoch's end.

    One file holds it all (safetensors, with a checksum), so that no weights of one step meet the number of another;
    Keras has two.

    Args:
        backup_dir: a directory for nothing else.
        save_freq: "epoch", or a number of steps after which it saves, counted on from epoch to epoch. With a number
            the training goes on in the middle of an epoch, where Keras begins the epoch again with newer weights.
        double_checkpoint: keep the state before the last as well, to go on from if the last is damaged.
        delete_checkpoint: delete the files when the training has come to its end.

    Raises:
        ConfigError: no directory, or another `save_freq` (a ValueError, as in Keras).

    Source: keras/src/callbacks/backup_and_restore.py, Keras 3.15.
    """

    same_on_all_ranks = ("save_freq", "double_checkpoint", "delete_checkpoint")

    def __init__(
        self,
        backup_dir: Any,
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        if not backup_dir:
            raise ConfigError("Empty `backup_dir` argument passed")
        if save_freq is False:
            raise ConfigError("not supported: save_freq=False of BackupAndRestore")
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ConfigError(
                f"Invalid value for argument `save_freq`. Received: save_freq={save_freq}. "
                "Expected either 'epoch' or an integer value."
            )
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self._epoch = 0
        self._rate_at_begin = 0.0
        self._steps_since_saving = 0
        if save_freq != "epoch":  # a hook of batches makes all ranks meet after each
            vars(self)["on_train_batch_end"] = self._after_step

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Restore what is there: rank 0 reads it, the others get it from rank 0. Collective.

        Raises:
            DataError: the file is damaged.
            ConfigError: it is another model's.
        """
        self._steps_since_saving = 0
        if self.model.compiled:  # its slots are in the backup
            self.model.optimizer.build(self.model.trainable_weights)
        found = on_rank_0(self, "backup", self._read)
        comm = ranks_of(self)
        about = None if found is None else found[0]
        if comm.size > 1:
            about = comm.broadcast_fact(about)
        if about is None:
            return
        arrays = {}
        for path, one in variables(self.model).items():
            arrays[path] = one.numpy() if found is None else found[1][path]
            if comm.size > 1:
                comm.broadcast(arrays[path])
        restore(self.model, arrays)
        step = about["step"]
        # In the middle of an epoch the hooks of its begin come again, and get the learning rate that they got.
        resume = self.model.optimizer.resume_learning_rate
        resume(about["rate_at_begin"] if step else about["rate"])
        self.trainer.go_to(about["epoch"], step, (lambda: resume(about["rate"])) if step else None)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Keep what a backup in the middle of the epoch needs."""
        self._epoch = epoch
        self._rate_at_begin = self._rate()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save if it is time to. Collective.

        Raises:
            OutputError: it cannot be written.
        """
        if self.save_freq == "epoch":
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Delete the files. Collective."""
        if self.delete_checkpoint:
            on_rank_0(self, "backup", self._delete)

    def _after_step(self, batch: int, logs: Any = None) -> None:
        self._steps_since_saving += 1
        if self._steps_since_saving >= int(self.save_freq):
            self._steps_since_saving = 0
            self._save(self._epoch, batch + 1)

    def _rate(self) -> float:
        return float(self.model.optimizer.learning_rate)

    def _save(self, epoch: int, step: int) -> None:
        on_rank_0(self, "backup", lambda: self._write(epoch, step))

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same for a training to go on."""
        model = self.model
        weights = model.weights_by_path()
        return {
            "weights": [[path, list(one.shape)] for path, one in weights.items()],
            "dtype": model.dtype,
            "optimizer": type(model.optimizer).__name__ if model.compiled else None,
            "state": {path: list(one.shape) for path, one in variables(model).items()},
            "seed": model.seed,
            "steps": self.params.get("steps"),
        }

    def _write(self, epoch: int, step: int) -> None:
        about = {
            "epoch": epoch,
            "step": step,
            "rate": self._rate(),
            "rate_at_begin": self._rate_at_begin,
            "identity": self._identity(),
        }
        content = encode(self.model, about)
        folder = Path(self.backup_dir)
        latest = folder / _FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.double_checkpoint and latest.exists():
                os.replace(latest, folder / _PREVIOUS)
                sync(folder)
        except OSError as error:
            raise output_error(folder, error, advice=_ADVICE) from error
        write_atomically(latest, content, advice=_ADVICE)

    def _read(self) -> tuple[dict[str, Any], Arrays] | None:
        """Return the newest state that is whole, or None where there is no file."""
        paths = [path for name in (_FILE, _PREVIOUS) if (path := Path(self.backup_dir) / name).exists()]
        for path in paths:
            try:
                about, arrays = _load(path)
            except DataError as error:
                if path == paths[-1]:
                    raise
                warn(f"{error}; going on from {paths[-1].name}")
                continue
            identity = json.loads(json.dumps(self._identity()))
            if differing := [key for key in identity if about["identity"].get(key) != identity[key]]:
                key = differing[0]
                other, own = about["identity"].get(key), identity[key]
                if isinstance(other, dict):  # of state: what differs
                    other, own = (
                        {name: one for name, one in a.items() if b.get(name) != one}
                        for a, b in ((other, own), (own, other))
                    )
                raise ConfigError(
                    f"{path} is the backup of another training: {key}: it has {other}, this one "
                    f"{own}; call fit with the same arguments, or delete it to start afresh"
                )
            return about, arrays
        return None

    def _delete(self) -> None:
        folder = Path(self.backup_dir)
        try:
            for name in (_FILE, _PREVIOUS):
                (folder / name).unlink(missing_ok=True)
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        except OSError as error:
            raise output_error(folder, error, advice="delete it by hand") from error


def _load(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Return what a file says.

    Raises:
        DataError: it is damaged, or no backup.
        OutputError: it cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from error
    return decode(content, str(path))
