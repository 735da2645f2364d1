"""LearningRateScheduler: sets the learning rate of every epoch."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.ranks import on_all, ranks_of, say
from dptrain.errors import ConfigError


class LearningRateScheduler(Callback):
    """Asks a function for the learning rate before every epoch.

    The logs, and so the history, get the epoch's "learning_rate". Every rank calls its function; all use rank 0's
    result.

    Args:
        schedule: (epoch counted from 0, learning rate) -> new learning rate, a float; or of the epoch alone.
        verbose: 1 reports the rate.

    Source: keras/src/callbacks/learning_rate_scheduler.py, Keras 3.15.
    """

    _same_on_all_ranks = ()

    def __init__(self, schedule: Callable[..., Any], verbose: int = 0) -> None:
        super().__init__()
        self.schedule = schedule
        self.verbose = verbose

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Set the learning rate. Collective.

        Raises:
            ConfigError: no float (also a ValueError, as in Keras), or an optimizer with a schedule (also a TypeError).
        """
        rate = on_all(self, "schedule", lambda: self._ask(epoch))
        comm = ranks_of(self)
        if comm.size > 1:
            rate = comm.broadcast_fact(rate)
        self.model.optimizer.learning_rate = rate
        if self.verbose > 0:
            say(self, f"\nEpoch {epoch + 1}: LearningRateScheduler setting learning rate to {rate}.")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the learning rate to the logs."""
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    def _ask(self, epoch: int) -> float:
        try:
            rate = self.schedule(epoch, float(self.model.optimizer.learning_rate))
        except TypeError:  # a function of the epoch alone
            rate = self.schedule(epoch)
        if not isinstance(rate, float | np.float32 | np.float64):
            raise ConfigError(f"The output of the `schedule` function should be a float. Got: {rate}")
        self.model.optimizer.learning_rate = float(rate)  # errors occur on all ranks alike
        return float(rate)
