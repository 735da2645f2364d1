"""ReduceLROnPlateau: lowers the learning rate when a training no longer improves."""

from typing import Any

import numpy as np

from dptrain.callbacks.base import Logs
from dptrain.callbacks.models import optimizers_of, rates_of
from dptrain.callbacks.monitor import MonitorCallback, take_numbers
from dptrain.callbacks.ranks import on_all, say
from dptrain.errors import ConfigError
from dptrain.runtime.failure import warn


class ReduceLROnPlateau(MonitorCallback):
    """Multiplies the learning rate by a factor when a value of the logs has stopped improving.

    With a MultiOptimizer, those of its optimizers. The logs, and so the history, get the epoch's "learning_rate", or
    "learning_rate_adam" and so on.

    Args:
        monitor, mode, min_delta: see `MonitorCallback`.
        factor: below 1, else ConfigError (a ValueError, as in Keras).
        patience: epochs without improvement before a reduction.
        verbose: 1 reports when it acts.
        cooldown: epochs after a reduction that do not count.
        min_lr: the lowest learning rate.
        **kwargs: not used, as in Keras.

    Source: keras/src/callbacks/reduce_lr_on_plateau.py, Keras 3.15.
    """

    _same_on_all_ranks = ("monitor", "factor", "patience", "mode", "min_delta", "cooldown", "min_lr")

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(monitor, mode, min_delta=min_delta)
        if factor >= 1.0:
            raise ConfigError(f"ReduceLROnPlateau does not support a factor >= 1.0. Received factor={factor}")
        self.factor = factor
        self.min_lr = min_lr
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.cooldown_counter = 0
        self.wait = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Reset."""
        self.best = None
        self.cooldown_counter = self.wait = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {"wait": self.wait, "best": self.best, "cooldown_counter": self.cooldown_counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        take_numbers(self, state)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Check the log, and reduce after too long without improvement. Collective.

        Raises:
            ConfigError: the optimizer has a schedule (a TypeError, as in Keras).
            AgreedError: the ranks have different logs.
        """
        self._find_direction()
        logs = {} if logs is None else logs
        logs.update(rates_of(self.model.optimizer))
        current = self._agreed(logs.get(self.monitor))
        if current is None:
            warn(
                f"Learning rate reduction is conditioned on metric `{self.monitor}` which is not available. "
                f"Available metrics are: {','.join(logs)}."
            )
            return
        if self.in_cooldown():
            self.cooldown_counter -= 1
            self.wait = 0
        if self._is_improvement(current, self.best):
            self.best = current
            self.wait = 0
        elif not self.in_cooldown():
            self.wait += 1
            if self.wait >= self.patience and on_all(self, "ReduceLROnPlateau", lambda: self._reduce(epoch)):
                self.cooldown_counter = self.cooldown
                self.wait = 0

    def in_cooldown(self) -> bool:
        """Return whether epochs after a reduction do not count yet."""
        return self.cooldown_counter > 0

    def _reduce(self, epoch: int) -> bool:
        """Lower the learning rates, each optimizer's of a MultiOptimizer; return whether one could be lowered."""
        lowered = False
        for name, optimizer in optimizers_of(self.model.optimizer):
            rate = float(optimizer.learning_rate)
            if rate <= np.float32(self.min_lr):
                continue
            rate = max(rate * self.factor, self.min_lr)
            optimizer.learning_rate = rate
            if self.verbose > 0:
                say(self, f"\nEpoch {epoch + 1}: ReduceLROnPlateau reducing{name} learning rate to {rate}.")
            lowered = True
        return lowered
