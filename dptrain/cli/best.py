"""What watches a metric of a run: early stopping, and best.keras, the model of the best epoch."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptrain.callbacks import EarlyStopping, Logs, ModelCheckpoint
from dptrain.callbacks.monitor import direction_of
from dptrain.callbacks.ranks import on_rank_0, ranks_of
from dptrain.cli.config import Config
from dptrain.cli.words import suggest
from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.models import Model
from dptrain.runtime import terminal
from dptrain.runtime.files import open_directory, write_atomically
from dptrain.saving import keras_zip
from dptrain.saving.keras_zip import why_not_saved
from dptrain.saving.run_folder import BEST


def monitored(config: Config, model: Model | None = None) -> tuple[str, str]:
    """Return what is watched, and whether "min", "max" or "auto" is good.

    Args:
        config: of the run.
        model: compiled, for what its logs will have; None to check the words alone.

    Raises:
        ConfigError: the model has no such metric, or nobody knows what is good.
    """
    name, colon, mode = config.train.monitor.partition(":")
    if colon and mode not in ("min", "max"):
        raise ConfigError(f"train.monitor = {config.train.monitor!r}: expected such as {name}:max or {name}:min")
    if model is not None and not model._has_own_steps:
        metrics = model._metrics_by_key
        known = [f"{prefix}{key}" for prefix in ("val_", "") for key in metrics]
        if name not in known:
            raise ConfigError(f"unknown train.monitor {name!r}{suggest(name, known)}")
        if not mode and direction_of(name, metrics) is None:
            raise ConfigError(f"train.monitor = {name!r}: say what is good, --monitor {name}:max or {name}:min")
    return name, mode or "auto"


def early_stopping(config: Config, *, first: int = 0, verbose: int = 0) -> EarlyStopping | None:
    """Return what ends the training as configured; None where nothing does. In the end the best weights are back.

    Args:
        config: of the run.
        first: epoch, counted from 0, that may be the best.
        verbose: 1 says when it acts.
    """
    if config.train.early_stopping is None:
        return None
    name, mode = monitored(config)
    patience = config.train.early_stopping
    return EarlyStopping(
        name, patience=patience, mode=mode, restore_best_weights=True, start_from_epoch=first, verbose=verbose
    )


class BestModel(ModelCheckpoint):
    """Keeps the model of the best epoch as best.keras.

    Args:
        folder: of the run.
        monitor: the log's key.
        mode: "min", "max" or "auto".
        source: what the training goes on from, if it is not in the run's folder.
        first: epoch, counted from 0, that may be the best.

    Attributes:
        best_epoch: counted from 1; None before there is one.
        best_logs: of that epoch.
    """

    def __init__(self, folder: str, monitor: str, mode: str, source: Path | None = None, first: int = 0) -> None:
        self.file = Path(folder) / BEST
        escaped = str(self.file).replace("{", "{{").replace("}", "}}")  # a path, no format
        super().__init__(escaped, monitor, save_best_only=True, mode=mode)
        self.best_epoch: int | None = None
        self.best_logs: Logs = {}
        self._source, self._first, self._digest = source, first, ""

    def state_dict(self) -> dict[str, Any]:
        """Return which epoch was the best, and the SHA-256 of its file, which is there."""
        own = {"monitor": self.monitor, "epoch": self.best_epoch, "logs": self.best_logs, "digest": self._digest}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, if the file is that epoch's; else look for the best anew. Collective.

        A run that was killed may have replaced the file after its last checkpoint. The epoch that did it is trained
        again, and is the best again.
        """
        if state["monitor"] != self.monitor or state["epoch"] is None:
            return
        same = on_rank_0(self, "best model", lambda: self._bring(state["digest"]))
        if not ranks_of(self).broadcast_fact(same):
            return
        super().load_state_dict({key: state[key] for key in ("best", "_steps_since_saving", "_last_step")})
        self.best_epoch, self.best_logs, self._digest = state["epoch"], state["logs"], state["digest"]

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save where the metric is better than ever before. Collective.

        Raises:
            OutputError: it cannot be written, or the file before.
        """
        value = self._agreed((logs or {}).get(self.monitor))
        if value is None or value != value or epoch < self._first:  # NaN is never the best
            return
        before = self.best
        super().on_epoch_end(epoch, logs)
        if self.best != before:
            self.best_epoch, self.best_logs = epoch + 1, dict(logs or {})

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of it."""
        return {"epoch": self.best_epoch, "monitor": self.monitor, "value": self.best, "metrics": self.best_logs}

    def _begin(self, path: Path) -> None:
        content = keras_zip.encode(self.model)
        self._digest = hashlib.sha256(content).hexdigest()
        self._write(path, content)

    def _bring(self, digest: str) -> bool:
        """Return whether the file of a digest is in place; the run that this one goes on from may have it."""
        places = [self.file]
        if self._source is not None:  # a run, its checkpoints or one of them
            places += [place / BEST for place in (self._source, *self._source.resolve().parents[:2])]
        for place in places:
            try:
                with open_directory(place.parent) as folder, folder.open(place.name) as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                        continue
                    file.seek(0)
                    if place != self.file:
                        write_atomically(self.file, file.read())
                    return True
            except OutputError:
                raise
            except (OSError, DataError):
                continue
        return False


def best_model(config: Config, model: Model, folder: str | None, first: int = 0) -> BestModel | None:
    """Return what keeps the run's best model; None without a folder, or where no file can hold the model.

    Args:
        config: of the run.
        model: that is trained.
        folder: of the run.
        first: epoch, counted from 0, that may be the best.
    """
    if folder is None or why_not_saved(model):
        return None
    source = config.checkpoint.resume
    return BestModel(folder, *monitored(config, model), None if source in ("auto", "never") else Path(source), first)


def final_metrics(history: Mapping[str, list[float]], epochs: list[int], stopping: EarlyStopping | None) -> Logs:
    """Return the logs of the epoch whose weights a training ends with: the last, or the best one that was restored.

    Args:
        history: values by key, one an epoch.
        epochs: that there are, counted from 0.
        stopping: of the training.
    """
    at = -1
    if stopping is not None and stopping.best_weights is not None and stopping.best_epoch in epochs:
        at = epochs.index(stopping.best_epoch)
    return {key: values[at] for key, values in history.items()}


def say_why_not_kept(model: Model) -> None:
    """Say that the run will hold no `.keras` file, if so."""
    if why := why_not_saved(model):
        terminal.say(f"no model.keras will be kept, model.safetensors alone: {why}")
