"""LambdaCallback: a callback made of functions."""

from collections.abc import Callable
from typing import Any

from dptrain.callbacks.base import Callback

Hook = Callable[..., Any] | None


class LambdaCallback(Callback):
    """Calls functions as hooks.

    Args:
        on_epoch_begin, on_epoch_end: called with (epoch, logs).
        on_train_begin, on_train_end: called with (logs).
        on_train_batch_begin, on_train_batch_end: called with (batch, logs).
        **kwargs: any other hook of `Callback` by its name.

    Source: keras/src/callbacks/lambda_callback.py, Keras 3.15.
    """

    def __init__(
        self,
        on_epoch_begin: Hook = None,
        on_epoch_end: Hook = None,
        on_train_begin: Hook = None,
        on_train_end: Hook = None,
        on_train_batch_begin: Hook = None,
        on_train_batch_end: Hook = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        hooks = {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
        }
        vars(self).update(kwargs)
        vars(self).update({name: function for name, function in hooks.items() if function is not None})
