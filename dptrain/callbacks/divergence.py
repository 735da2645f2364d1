"""StopOnDivergence: ends the job when the loss or a parameter is no longer a number."""

import math

from dptrain.callbacks.base import Callback, Logs
from dptrain.errors import DivergenceError


class StopOnDivergence(Callback):
    """Raises on every rank after an epoch whose loss is NaN or infinite, or that leaves such parameters behind.

    The loss is the global one. The parameters are each rank's own: they should be alike after the all-reduce, but a
    rank whose memory or MPI library says otherwise must not stop alone.
    """

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Look at the loss, then at the parameters. Collective.

        Raises:
            AgreedError: on any rank, something is not finite; the exit code is 76.
        """
        self.trainer.comm.agree("training", lambda: self._check(epoch, logs or {}))

    def _check(self, epoch: int, logs: Logs) -> None:
        for key in ("loss", "val_loss"):
            if not math.isfinite(logs.get(key, 0.0)):
                raise DivergenceError(
                    f"training diverged: {key} = {logs[key]} in epoch {epoch + 1}; try a smaller --learning-rate"
                )
        if found := self.model.nonfinite_weight():
            name, count = found
            raise DivergenceError(
                f"training diverged: parameter {name!r} has {count} value{'s' if count > 1 else ''} that "
                f"{'are' if count > 1 else 'is'} not finite after epoch {epoch + 1}; try a smaller --learning-rate"
            )
