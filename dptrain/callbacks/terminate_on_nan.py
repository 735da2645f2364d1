"""TerminateOnNaN: ends a training whose loss is not finite."""

import math
from typing import Any

from dptrain.callbacks.base import Callback
from dptrain.callbacks.ranks import on_all, say
from dptrain.errors import DivergenceError


class TerminateOnNaN(Callback):
    """Ends the training after a step that makes the mean loss of the epoch NaN or infinite.

    It reads the loss at every step, for which the host waits. `fit(on_nonfinite="stop")`, which checks now and then and
    reports where a NaN comes from, leaves the decision to it.

    With `raise_error` it raises instead of stopping, so that no other callback's `on_train_end` is called.

    Source: keras/src/callbacks/terminate_on_nan.py, Keras 3.15.
    """

    _same_on_all_ranks = ("raise_error",)

    def __init__(self, raise_error: bool = False) -> None:
        super().__init__()
        self.raise_error = raise_error

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check the global loss; DivergenceError with `raise_error` (a RuntimeError, as in Keras)."""
        loss = ({} if logs is None else logs).get("loss")
        if loss is None or math.isfinite(loss):
            return
        if self.raise_error:
            on_all(self, "training", lambda: self._fail(batch, loss))
        say(self, f"Batch {batch}: Invalid loss, terminating training")
        self.model.stop_training = True

    def _fail(self, batch: int, loss: float) -> None:
        raise DivergenceError(
            f"NaN or Inf loss encountered at batch {batch}. Loss value: {loss}. Terminating training immediately."
        )
