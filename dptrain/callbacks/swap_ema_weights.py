"""SwapEMAWeights: evaluates with the moving averages of the weights."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from dptrain.callbacks.base import Callback, Logs
from dptrain.callbacks.monitor import take_numbers
from dptrain.errors import ConfigError
from dptrain.program.tensor import Variable


class SwapEMAWeights(Callback):
    """Swaps the moving averages that an optimizer keeps (`use_ema=True`) with the weights, and back.

    Evaluations, validations and predictions then use them. With `swap_on_epoch` they are also in place at the end of an
    epoch, for later callbacks, such as `ModelCheckpoint`; a training then ends with them.

    Raises:
        ConfigError: when an evaluation begins, if the optimizer keeps no averages.
    """

    _same_on_all_ranks = ("swap_on_epoch",)

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch = bool(swap_on_epoch)
        self._averages_in_model = self._is_restored = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Expect no state of a checkpoint yet."""
        self._is_restored = False

    def state_dict(self) -> dict[str, Any]:
        """Return which of both the checkpoint has as the model's weights."""
        return {"_averages_in_model": self._averages_in_model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it, once: an epoch that has begun has the weights in place."""
        if not self._is_restored:
            take_numbers(self, state)
            self._is_restored = True

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Put the weights back."""
        if self._averages_in_model:
            self._swap()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Put the averages in their place, after the last epoch to stay."""
        if self.swap_on_epoch and not self._averages_in_model:
            self._swap()
            if epoch == self.params["epochs"] - 1:
                for variable, average in self._pairs():
                    average.assign(variable)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Put the averages in place."""
        if not self._averages_in_model:
            self._swap()

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Put the weights back."""
        if self._averages_in_model:
            self._swap()

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Put the averages in place."""
        self.on_test_begin(logs)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Put the weights back."""
        self.on_test_end(logs)

    def _pairs(self) -> Iterator[tuple[Variable, Variable]]:
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        optimizers: list[Any] = [
            candidate for candidate in getattr(optimizer, "optimizers", [optimizer]) if candidate.use_ema
        ]
        if not optimizers:
            raise ConfigError(
                "SwapEMAWeights must be used when `use_ema=True` is set on the optimizer. Received: use_ema=False"
            )
        for owner in optimizers:
            for variable, slots in owner._slots.items() if int(owner.iterations) else ():
                if "average" in slots:
                    yield variable, slots["average"]

    def _swap(self) -> None:
        with self._trainer.changing() if "_trainer" in vars(self) else nullcontext():
            for variable, average in list(self._pairs()):
                value = variable.numpy()
                variable.assign(average.numpy())
                average.assign(value)
        self._averages_in_model = not self._averages_in_model
