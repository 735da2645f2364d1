"""What a callback is: hooks that the training loop calls on every rank."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dptrain.train.trainer import Trainer

Logs = dict[str, float]


class Callback:
    """Hooks in Keras' words and order, called on every rank with the same, global, values.

    Only rank 0 may write files or to the terminal. A hook that raises on one rank alone ends the job.

    Attributes:
        params: "epochs", "steps", "verbose".
        trainer: the loop that calls the hooks.
    """

    params: dict[str, Any]
    trainer: "Trainer"

    def set_params(self, params: dict[str, Any]) -> None:
        """Called once before `on_train_begin`."""
        self.params = params

    def set_trainer(self, trainer: "Trainer") -> None:
        """Called once before `on_train_begin`."""
        self.trainer = trainer

    def on_train_begin(self) -> None:
        """Before the first epoch."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Before an epoch, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """After an epoch and its validation, with the means of loss and metrics, validation's as "val_..."."""

    def on_train_batch_end(self, batch: int) -> None:
        """After a step, counted from 0; `trainer.logs()` gives the means over the epoch so far."""


class CallbackList:
    """Calls several callbacks in order.

    Args:
        callbacks: in the order in which they are called.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = list(callbacks)
        # Most callbacks have no hook at each step, and a step is short: ask once.
        self._at_batch_end = [
            c for c in self._callbacks if type(c).on_train_batch_end is not Callback.on_train_batch_end
        ]

    def set_params(self, params: dict[str, Any]) -> None:
        """Hand over the parameters."""
        for callback in self._callbacks:
            callback.set_params(params)

    def set_trainer(self, trainer: "Trainer") -> None:
        """Hand over the loop."""
        for callback in self._callbacks:
            callback.set_trainer(trainer)

    def on_train_begin(self) -> None:
        """Call the hook."""
        for callback in self._callbacks:
            callback.on_train_begin()

    def on_train_end(self) -> None:
        """Call the hook."""
        for callback in self._callbacks:
            callback.on_train_end()

    def on_epoch_begin(self, epoch: int) -> None:
        """Call the hook."""
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Call the hook."""
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)

    def on_train_batch_end(self, batch: int) -> None:
        """Call the hook of those that have one."""
        for callback in self._at_batch_end:
            callback.on_train_batch_end(batch)
