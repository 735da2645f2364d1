"""MetricsFile: keeps a training's state in a file that Prometheus' node exporter collects."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.checkpointing import Checkpointing
from dptrain.callbacks.ranks import on_rank_0, ranks_of
from dptrain.errors import ConfigError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.failure import describe, warn
from dptrain.runtime.memory import most_resident_bytes
from dptrain.runtime.storage.files import output_error

_ADVICE = "choose another `path` of MetricsFile"
# By name: labels, and what it is.
_GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "dptrain_heartbeat_timestamp_seconds": ((), "When the file was written, between two steps."),
    "dptrain_training": ((), "1 while the training goes on, 0 once it has ended."),
    "dptrain_ranks": ((), "Ranks of the job."),
    "dptrain_epoch": ((), "The current epoch, from 1."),
    "dptrain_epochs": ((), "Epochs to train."),
    "dptrain_step": ((), "Steps done in this epoch."),
    "dptrain_samples_per_second": ((), "Samples of all ranks a second, in this epoch."),
    "dptrain_metric": (("name",), "Loss and metrics: of this epoch so far; val_* of the last validation."),
    "dptrain_memory_bytes": (("rank",), "The most memory that a rank's process has had resident."),
    "dptrain_checkpoint_timestamp_seconds": ((), "When the last checkpoint was complete."),
}


class MetricsFile(Callback):
    """Keeps epoch, step, loss, metrics, speed, memory and the last checkpoint's time in a file, on rank 0.

    The format is Prometheus' text. The file is replaced as a whole, at the begin and the end of the training and of its
    epochs, and after a step once `interval` seconds have passed; so its heartbeat stops where the ranks do. A file that
    can no longer be written is given up with a warning.

    Args:
        path: of the file, such as "/var/lib/node_exporter/train.prom"; the directory must exist.
        run: the label `run` of all metrics.
        interval: fewest seconds between two files within an epoch.

    Raises:
        ConfigError: `prometheus_client` is not installed, or `interval` is negative.
        OutputError: the file cannot be written when the training begins.

    Source: the textfile collector of Prometheus' node exporter.
    """

    _same_on_all_ranks = ()
    _shows_only = True

    def __init__(self, path: Any, run: str = "", interval: float = 15.0) -> None:
        super().__init__()
        if interval < 0:
            raise ConfigError(f"MetricsFile: interval = {interval!r}: expected seconds >= 0")
        self.path, self.run, self.interval = os.fspath(path), run, interval
        self._checkpointing: Checkpointing | None = None
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._written = 0.0
        self._is_active = False  # not before the first file, nor once one could not be written

    def _set_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Find the one that saves checkpoints."""
        self._checkpointing = next((each for each in callbacks if isinstance(each, Checkpointing)), None)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Write the first file. Collective."""
        self._is_active = False
        self._values = {name: {} for name in _GAUGES}
        self._set(dptrain_training=1, dptrain_ranks=ranks_of(self).size, dptrain_epochs=self.params.get("epochs", 0))
        self._set_memory()
        on_rank_0(self, "MetricsFile", self._write)
        self._is_active = True

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self._set(dptrain_epoch=epoch + 1, dptrain_step=0)
        self._update({})

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Write a file if it is time to."""
        if ranks_of(self).rank == 0 and time.monotonic() - self._written >= self.interval:
            self._set(dptrain_step=batch + 1)
            self._update(logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch's metrics. Collective."""
        self._set(dptrain_step=self._trainer.timing.steps)
        self._set_memory()
        self._update(logs or {})

    def _release(self) -> None:
        """Say that the training has ended, also by an error."""
        if self._values:
            self._set(dptrain_training=0)
            self._update({})

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            self._values[name][()] = value

    def _set_memory(self) -> None:
        memory = ranks_of(self).allgather(most_resident_bytes())
        self._values["dptrain_memory_bytes"] = {(str(rank),): nbytes for rank, nbytes in enumerate(memory) if nbytes}

    def _update(self, logs: Mapping[str, Any]) -> None:
        """Write the file on rank 0, with these metrics; give up where that fails."""
        if ranks_of(self).rank or not self._is_active:
            return
        if logs:
            self._set(dptrain_samples_per_second=self._trainer.timing.samples_per_second)
            self._values["dptrain_metric"] |= {(name,): float(value) for name, value in logs.items()}
        try:
            self._write()
        except Exception as error:
            self._is_active = False
            warn(f"{self.path} is given up, and training continues: {describe(error)}")

    def _write(self) -> None:
        client = prometheus_module()
        registry = client.CollectorRegistry()
        saved = None if self._checkpointing is None else self._checkpointing.last_saved
        self._set(dptrain_heartbeat_timestamp_seconds=time.time())
        if saved is not None:
            self._set(dptrain_checkpoint_timestamp_seconds=saved)
        for name, (labels, about) in _GAUGES.items():
            gauge = client.Gauge(name, about, ("run", *labels), registry=registry)
            for label_values, value in self._values[name].items():
                gauge.labels(self.run, *label_values).set(value)
        try:
            client.write_to_textfile(self.path, registry)
        except OSError as error:
            raise output_error(self.path, error, advice=_ADVICE) from error
        self._written = time.monotonic()


def prometheus_module() -> Any:
    """Import prometheus_client, or raise ConfigError."""
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigError(f"MetricsFile needs prometheus_client: {pip_install('metrics')}") from error
    return prometheus_client
