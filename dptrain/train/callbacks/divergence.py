"""StopOnDivergence: ends the job when the loss is no longer a number."""

import math

from dptrain.errors import AgreedError, ExitCode
from dptrain.train.callbacks.base import Callback, Logs


class StopOnDivergence(Callback):
    """Raises after an epoch whose loss is NaN or infinite.

    The loss is the global one, the same on every rank, so all ranks raise.
    """

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Look at the loss.

        Raises:
            AgreedError: it is not finite; the exit code is 76.
        """
        logs = logs or {}
        for key in ("loss", "val_loss"):
            if not math.isfinite(logs.get(key, 0.0)):
                text = f"training diverged: {key} = {logs[key]} in epoch {epoch + 1}; try a smaller --learning-rate"
                raise AgreedError("training", ExitCode.DIVERGED, text, [])
