"""Early stopping, and best.keras, the model of the best epoch."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dptrain.callbacks import EarlyStopping, Logs, ModelCheckpoint
from dptrain.callbacks.monitor import direction_of
from dptrain.callbacks.ranks import on_rank_0, ranks_of
from dptrain.cli.options.config import Config
from dptrain.cli.options.words import suggest
from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.models import Model
from dptrain.runtime.output import terminal
from dptrain.runtime.storage.files import open_directory, write_atomically
from dptrain.saving import keras_zip
from dptrain.saving.keras_zip import why_not_saved
from dptrain.saving.run_folder import BEST


def monitored(config: Config, model: Model | None = None) -> tuple[str, str]:
    """Return the monitored log key and "min", "max" or "auto"; without a model only the words are checked."""
    name, colon, mode = config.train.monitor.partition(":")
    if colon and mode not in ("min", "max"):
        raise ConfigError(f"train.monitor = {config.train.monitor!r}: expected {name}:max or {name}:min")
    if model is not None and not model._has_custom_steps:
        metrics = model._metrics_by_key
        keys = [f"{prefix}{key}" for prefix in ("val_", "") for key in metrics]
        if name not in keys:
            raise ConfigError(f"unknown train.monitor {name!r}{suggest(name, keys)}")
        if not mode and direction_of(name, metrics) is None:
            raise ConfigError(f"train.monitor = {name!r}: its direction is unknown: --monitor {name}:max or {name}:min")
    return name, mode or "auto"


def directions(model: Model, keys: Iterable[str]) -> dict[str, str]:
    """Return whether better values are "up" or "down" of those logs whose direction is known."""
    metrics = {} if model._has_custom_steps else model._metrics_by_key
    known = {key: direction_of(key, metrics) for key in keys}
    return {key: direction for key, direction in known.items() if direction is not None}


def early_stopping(config: Config, *, first: int = 0, verbose: int = 0) -> EarlyStopping | None:
    """Return the configured early stopping, which restores the best weights, or None."""
    if config.train.early_stopping is None:
        return None
    name, mode = monitored(config)
    patience = config.train.early_stopping
    return EarlyStopping(
        name, patience=patience, mode=mode, restore_best_weights=True, start_from_epoch=first, verbose=verbose
    )


class BestModel(ModelCheckpoint):
    """Saves the model of the best epoch as best.keras."""

    def __init__(self, folder: str, monitor: str, mode: str, source: Path | None = None, first: int = 0) -> None:
        self.file = Path(folder) / BEST
        escaped = str(self.file).replace("{", "{{").replace("}", "}}")  # a path, not a format
        super().__init__(escaped, monitor, save_best_only=True, mode=mode)
        self.best_epoch: int | None = None
        self.best_logs: Logs = {}
        self._source, self._first, self._digest = source, first, ""

    def state_dict(self) -> dict[str, Any]:
        """Return the best epoch and the SHA-256 of its existing file."""
        state = {"monitor": self.monitor, "epoch": self.best_epoch, "logs": self.best_logs, "digest": self._digest}
        return super().state_dict() | state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume if the file is that epoch's, else start comparing anew. Collective.

        A killed run may have replaced the file after its last checkpoint; that epoch is trained again and is the best
        again.
        """
        if state["monitor"] != self.monitor or state["epoch"] is None:
            return
        same = on_rank_0(self, "best model", lambda: self._bring(state["digest"]))
        if not ranks_of(self).broadcast_fact(same):
            return
        super().load_state_dict({key: state[key] for key in ("best", "_steps_since_saving", "_last_step")})
        self.best_epoch, self.best_logs, self._digest = state["epoch"], state["logs"], state["digest"]

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save the model where the metric improves. Collective."""
        value = self._agreed((logs or {}).get(self.monitor))
        if value is None or value != value or epoch < self._first:  # NaN is never the best
            return
        before = self.best
        super().on_epoch_end(epoch, logs)
        if self.best != before:
            self.best_epoch, self.best_logs = epoch + 1, dict(logs or {})

    def summary(self) -> dict[str, Any]:
        """Return its entries of summary.json."""
        return {"epoch": self.best_epoch, "monitor": self.monitor, "value": self.best, "metrics": self.best_logs}

    def _begin(self, path: Path) -> None:
        content = keras_zip.encode(self.model)
        self._digest = hashlib.sha256(content).hexdigest()
        self._write(path, content)

    def _bring(self, digest: str) -> bool:
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
    """Return the callback that saves the best model; None without a folder or for a model that no file can hold."""
    if folder is None or why_not_saved(model):
        return None
    source = config.checkpoint.resume
    return BestModel(folder, *monitored(config, model), None if source in ("auto", "never") else Path(source), first)


def final_metrics(history: Mapping[str, list[float]], epochs: list[int], stopping: EarlyStopping | None) -> Logs:
    """Return the logs of the epoch whose weights a training ends with: the last, or the restored best."""
    at = -1
    if stopping is not None and stopping.best_weights is not None and stopping.best_epoch in epochs:
        at = epochs.index(stopping.best_epoch)
    return {key: values[at] for key, values in history.items()}


def restored_epoch(epochs: list[int], stopping: EarlyStopping | None) -> int | None:
    """Return the epoch, from 1, whose weights early stopping restored; None where they are the last one's."""
    if stopping is None or stopping.best_weights is None or stopping.best_epoch not in epochs[:-1]:
        return None
    return stopping.best_epoch + 1


def say_why_unsaved(model: Model) -> None:
    """Print why the run will hold no `.keras` file, if so."""
    if why := why_not_saved(model):
        terminal.say(f"model.keras will not be written, only model.safetensors: {why}")
