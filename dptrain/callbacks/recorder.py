"""EpochRecorder: passes every epoch's metrics to a function."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain.callbacks.base import Callback, Logs


class EpochRecorder(Callback):
    """Calls `record` with epoch (from 1), logs, seconds and samples_per_second after every epoch.

    Args:
        record: such as `RunDirectory.add_epoch`.
        keep: called on resume with the records of earlier epochs; such as `RunDirectory.keep_epochs`.
    """

    def __init__(
        self,
        record: Callable[[dict[str, Any]], None],
        keep: Callable[[Sequence[dict[str, Any]]], None] | None = None,
    ) -> None:
        super().__init__()
        self._record, self._keep = record, keep
        self._epochs: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the records."""
        return {"epochs": self._epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the records."""
        self._epochs = list(state["epochs"])
        if self._keep is not None:
            self._keep(self._epochs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Record the epoch."""
        timing = self._trainer.timing
        seconds, speed = round(timing.seconds, 6), round(timing.samples_per_second, 1)
        self._epochs.append({"epoch": epoch + 1, **(logs or {}), "seconds": seconds, "samples_per_second": speed})
        self._record(self._epochs[-1])
