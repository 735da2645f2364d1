"""ModelCheckpoint: saves the model, or its weights, during a training."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.callbacks.base import Callback, Logs, is_of_the_package
from dptrain.callbacks.monitor import MonitorCallback, take_numbers
from dptrain.callbacks.ranks import on_all, on_rank_0, say
from dptrain.errors import ConfigError, OutputError
from dptrain.runtime.failure import describe, warn
from dptrain.runtime.storage.files import output_error, sweep_temporaries, write_through_links
from dptrain.saving import keras_zip
from dptrain.saving.background import Background
from dptrain.saving.weights import weights_encoder

# Endings of weight files; the second is not in Keras.
_WEIGHTS_ENDINGS = (".weights.h5", ".safetensors")
_ADVICE = "choose another `filepath` of ModelCheckpoint"
# Shared by all: two callbacks may write the same file.
_writing = Background()


class ModelCheckpoint(MonitorCallback):
    """Saves the model like `model.save`, or its weights like `model.save_weights`, whole files or none.

    A file holds the model at the time of the hook, but is written while the training continues: it is complete before
    the next is begun, and before a checkpoint of the training is saved or `fit` ends. If the user's code could look for
    it earlier (another callback that is not dptrain's, a LambdaCallback, the model's own `save`), it is complete when
    this callback's hook returns, as in Keras.

    Args:
        filepath: ends in ".keras", or with `save_weights_only` in ".weights.h5" or ".safetensors". It may hold
            "{epoch:02d}", counted from 1, "{batch}" and keys of the logs, such as "{val_loss:.2f}".
        monitor, mode: see `MonitorCallback`.
        verbose: 1 reports when it acts.
        save_best_only: save only if the log is better than ever before.
        save_weights_only: save the weights (and the optimizer's state, if the format has it) instead of the model.
        save_freq: "epoch", or a number of steps between saves, counted across epochs.
        initial_value_threshold: the log must be better than this.

    Raises:
        ConfigError: a path with another ending, or another `save_freq` (a ValueError, as in Keras).

    Source: keras/src/callbacks/model_checkpoint.py, Keras 3.15.
    """

    _same_on_all_ranks = ("filepath", "monitor", "save_best_only", "save_weights_only", "mode", "save_freq", "best")

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode, initial_value_threshold)
        self.verbose = verbose
        self.filepath = os.fspath(filepath)
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_freq = save_freq
        self._epoch = 0
        self._steps_since_saving = 0
        self._last_step: int | None = None
        self._background = False
        self._finished: str | None = None  # message for when the file is complete
        if save_freq != "epoch" and not isinstance(save_freq, int):
            raise ConfigError(f"Unrecognized save_freq: {save_freq}. Expected save_freq are 'epoch' or integer values")
        if save_weights_only and not self.filepath.endswith(_WEIGHTS_ENDINGS):
            raise ConfigError(
                "When using `save_weights_only=True` in `ModelCheckpoint`, the filepath provided must end in "
                f"`.weights.h5` (Keras weights format) or `.safetensors`. Received: filepath={self.filepath}"
            )
        if not save_weights_only and not self.filepath.endswith(".keras"):
            raise ConfigError(
                f"The filepath provided must end in `.keras` (Keras model format). Received: filepath={self.filepath}"
            )
        if save_freq != "epoch":  # a batch hook makes all ranks meet after each batch
            vars(self)["on_train_batch_end"] = self._after_step

    def _set_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Check whether any of them could read a file early."""
        self._background = not any(map(_could_look, callbacks))

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the step counters, once pending files are written."""
        _writing.wait()
        return {"best": self.best, "_steps_since_saving": self._steps_since_saving, "_last_step": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        take_numbers(self, state)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Wait for the last file. Collective."""
        self._wait()

    def _release(self) -> None:
        """Wait for the last file after an error, and warn if it cannot be written."""
        try:
            _writing.wait()
        except Exception as error:
            warn(describe(error))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save if it is due. Collective.

        Raises:
            OutputError: this file, or the one before, cannot be written.
            KeyError: the path holds a key that the logs lack.
            AgreedError: the ranks have different logs, and these decide.
        """
        self._find_direction()
        if self.save_freq == "epoch":
            self._save(epoch, None, {} if logs is None else logs)

    def _after_step(self, batch: int, logs: Any = None) -> None:
        """Save if it is due. Collective."""
        new_epoch = self._last_step is None or batch <= self._last_step
        self._steps_since_saving += batch + 1 if new_epoch else batch - (self._last_step or 0)
        self._last_step = batch
        if self._steps_since_saving >= int(self.save_freq):
            self._steps_since_saving = 0
            if self.save_best_only:
                self._find_direction()
            self._save(self._epoch, batch, {} if logs is None else logs)

    def _save(self, epoch: int, batch: int | None, logs: Any) -> None:
        path = on_all(self, "ModelCheckpoint", lambda: self._path(epoch, batch, logs))
        self._wait()
        if not self._is_due(epoch, logs, path):
            return
        on_rank_0(self, "ModelCheckpoint", lambda: _prepare(Path(path)))
        save = self.model.save_weights if self.save_weights_only else self.model.save
        background = self._background and is_of_the_package(save)
        if background:
            on_rank_0(self, "ModelCheckpoint", lambda: self._begin(Path(path)), reads_model=True)
        else:
            save(path, overwrite=True)  # collective: rank 0 writes, and all fail if it fails
        self._finished = f"\nEpoch {epoch + 1}: finished saving model to {path}"
        if not background:
            self._wait()

    def _begin(self, path: Path) -> None:
        """Encode a file, and begin to write it. On rank 0."""
        self._write(path, weights_encoder(path)(self.model) if self.save_weights_only else keras_zip.encode(self.model))

    def _write(self, path: Path, content: bytes) -> None:
        """Begin to write a file. On rank 0."""
        _writing.start(lambda: write_through_links(path, content, advice=_ADVICE))

    def _wait(self) -> None:
        """Wait for the last file. Collective."""
        on_rank_0(self, "ModelCheckpoint", _writing.wait)
        if self._finished is not None and self.verbose > 0:
            say(self, self._finished)
        self._finished = None

    def _path(self, epoch: int, batch: int | None, logs: Any) -> str:
        placeholders = {"epoch": epoch + 1} if batch is None else {"epoch": epoch + 1, "batch": batch + 1}
        try:
            return str(self.filepath).format(**(placeholders | dict(logs)))
        except KeyError as error:
            raise KeyError(f'Failed to format this callback filepath: "{self.filepath}". Reason: {error}') from error

    def _is_due(self, epoch: int, logs: Any, path: str) -> bool:
        """Return whether to save, and print why; the same on all ranks, as the logs are. Collective."""
        number = f"\nEpoch {epoch + 1}: "
        if not self.save_best_only:
            if self.verbose > 0:
                say(self, f"{number}saving model to {path}")
            return True
        current = self._agreed(logs.get(self.monitor))
        if current is None:
            warn(f"Can save best model only with {self.monitor} available.")
            return True
        if np.ndim(current) > 0:
            warn(
                f"Can save best model only when `monitor` is a scalar value. Received: {current}. "
                "Falling back to `save_best_only=False`."
            )
            return True
        best = "None" if self.best is None else f"{self.best:.5f}"
        if not self._is_improvement(current, self.best):
            if self.verbose > 0:
                say(self, f"{number}{self.monitor} did not improve from {best}")
            return False
        if self.verbose > 0:
            say(self, f"{number}{self.monitor} improved from {best} to {current:.5f}, saving model to {path}")
        self.best = current
        return True


def _could_look(callback: Callback) -> bool:
    """Return whether a callback runs user code."""
    hooks = (function for name, function in vars(callback).items() if name.startswith("on_"))
    return not all(map(is_of_the_package, (type(callback), *hooks)))


def _prepare(path: Path) -> None:
    """Create the directory of a file, and remove remains of killed saves."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(path.parent, path.name)
    except OSError as error:
        raise output_error(path.parent, error, advice=_ADVICE) from error
    if path.is_dir():
        raise OutputError(
            "Please specify a non-directory filepath for ModelCheckpoint. Filepath used is an existing directory: "
            f"{path}"
        )
