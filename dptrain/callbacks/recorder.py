"""EpochRecorder: hands every epoch's metrics to whoever keeps them."""

from collections.abc import Callable
from typing import Any

from dptrain.callbacks.base import Callback, Logs


class EpochRecorder(Callback):
    """Calls `record` with epoch (from 1), logs, seconds and samples_per_second after every epoch.

    Args:
        record: such as `RunDirectory.add_epoch`.
    """

    def __init__(self, record: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._record = record

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Pass the epoch on."""
        timing = self.trainer.timing
        self._record(
            {
                "epoch": epoch + 1,
                **(logs or {}),
                "seconds": round(timing.seconds, 6),
                "samples_per_second": round(timing.samples_per_second, 1),
            }
        )
