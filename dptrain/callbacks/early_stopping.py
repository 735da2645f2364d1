"""EarlyStopping: ends a training that no longer improves."""

from typing import Any

from dptrain.callbacks.base import Logs
from dptrain.callbacks.models import set_weights_of, weights_of
from dptrain.callbacks.monitor import MonitorCallback, take_numbers
from dptrain.callbacks.ranks import say
from dptrain.runtime.failure import warn

_STATE = ("wait", "best", "best_epoch", "best_weights", "stopped_epoch")


class EarlyStopping(MonitorCallback):
    """Ends the training when a value of the logs has stopped improving.

    Args:
        monitor, min_delta, mode: see `MonitorCallback`.
        patience: epochs without improvement before the training ends.
        verbose: 1 reports when it acts.
        baseline: a value that must be bettered for patience to start anew.
        restore_best_weights: restore the best epoch's weights when the training ends, however it ends.
        start_from_epoch: epochs to ignore first.

    Attributes:
        best_weights: this rank's parts of the model's weights after the best epoch, None if not kept: what
            `get_weights` returned then, and parts of sharded weights (`Model.local_weights`).

    Source: keras/src/callbacks/early_stopping.py, Keras 3.15.
    """

    _same_on_all_ranks = ("monitor", "min_delta", "patience", "mode", "baseline", "restore_best_weights")
    copies_of_weights = ("best_weights",)

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta=min_delta)
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.wait = 0
        self.stopped_epoch = 0
        self.restore_best_weights = restore_best_weights
        self.best_weights: Any = None
        self.best_epoch = 0
        self.start_from_epoch = start_from_epoch

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Reset."""
        self.wait = self.stopped_epoch = self.best_epoch = 0
        self.best = self.best_weights = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the best weights."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        take_numbers(self, state)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Check the log, keep the best weights, and stop after too long without improvement. Collective."""
        self._find_direction()
        current = self._agreed(self.get_monitor_value(logs))
        if current is None or epoch < self.start_from_epoch:
            return
        is_better = self._is_improvement(current, self.best)
        if self.restore_best_weights and (is_better or self.best_weights is None):
            self.best_weights = None  # two copies might not fit into memory
            self.best_weights = weights_of(self.model)
            self.best_epoch = epoch
        self.wait += 1
        if is_better:
            self.best = current
            self.best_epoch = epoch
            if self.baseline is None or self._is_improvement(current, self.baseline):
                self.wait = 0
            return
        if self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restore the best weights."""
        if self.stopped_epoch > 0 and self.verbose > 0:
            say(self, f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self.restore_best_weights and self.best_weights is not None:
            if self.verbose > 0:
                say(self, f"Restoring model weights from the end of the best epoch: {self.best_epoch + 1}.")
            set_weights_of(self.model, self.best_weights)

    def get_monitor_value(self, logs: Logs | None) -> float | None:
        """Return the monitored log; None, with a warning, if it is missing."""
        logs = logs or {}
        value = logs.get(self.monitor)
        if value is None:
            warn(
                f"Early stopping conditioned on metric `{self.monitor}` which is not available. "
                f"Available metrics are: {','.join(logs)}"
            )
        return value
