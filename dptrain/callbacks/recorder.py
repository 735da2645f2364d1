"""EpochRecorder: hands every epoch's metrics to whoever keeps them."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain.callbacks.base import Callback, Logs


class EpochRecorder(Callback):
    """Calls `record` with epoch (from 1), logs, seconds and samples_per_second after every epoch.

    Args:
        record: such as `RunDirectory.add_epoch`.
        keep: called where a training goes on, with what `record` was called with for the epochs that are done; such as
            `RunDirectory.keep_epochs`.
    """

    def __init__(
        self,
        record: Callable[[dict[str, Any]], None],
        keep: Callable[[Sequence[dict[str, Any]]], None] | None = None,
    ) -> None:
        super().__init__()
        self._record, self._keep = record, keep
        self._done: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return what was recorded."""
        return {"epochs": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tell of it."""
        self._done = list(state["epochs"])
        if self._keep is not None:
            self._keep(self._done)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Pass the epoch on."""
        timing = self._trainer.timing
        seconds, speed = round(timing.seconds, 6), round(timing.samples_per_second, 1)
        self._done.append({"epoch": epoch + 1, **(logs or {}), "seconds": seconds, "samples_per_second": speed})
        self._record(self._done[-1])
