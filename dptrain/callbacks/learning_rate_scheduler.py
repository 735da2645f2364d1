"""LearningRateScheduler: sets the learning rate of every epoch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.models import optimizers_of, rates_of
from dptrain.callbacks.ranks import on_all, ranks_of, say
from dptrain.errors import ConfigError


class LearningRateScheduler(Callback):
    """Asks a function for the learning rate before every epoch; for each optimizer of a MultiOptimizer.

    The logs, and so the history, get the epoch's "learning_rate", or "learning_rate_adam" and so on. Every rank calls
    its function; all use rank 0's result.

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
        comm = ranks_of(self)
        for name, optimizer in optimizers_of(self.model.optimizer):
            rate = on_all(self, "schedule", partial(self._ask, epoch, optimizer))
            if comm.size > 1:
                rate = comm.broadcast_fact(rate)
            optimizer.learning_rate = rate
            if self.verbose > 0:
                say(self, f"\nEpoch {epoch + 1}: LearningRateScheduler setting{name} learning rate to {rate}.")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the learning rate to the logs."""
        if logs is not None:
            logs.update(rates_of(self.model.optimizer))

    def _ask(self, epoch: int, optimizer: Any) -> float:
        try:
            rate = self.schedule(epoch, float(optimizer.learning_rate))
        except TypeError:  # a function of the epoch alone
            rate = self.schedule(epoch)
        if not isinstance(rate, float | np.float32 | np.float64):
            raise ConfigError(f"The output of the `schedule` function should be a float. Got: {rate}")
        optimizer.learning_rate = float(rate)  # errors occur on all ranks alike
        return float(rate)
