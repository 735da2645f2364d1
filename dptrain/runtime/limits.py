"""Limits of epochs and steps for trial runs, from Keras' environment variables."""

import os
from typing import Literal

from dptrain.errors import ConfigError

Limit = Literal["epochs", "steps_per_epoch"]

_limits: dict[Limit, int | None] = {}


def limit(name: Limit) -> int | None:
    """Return a limit or None, at first KERAS_MAX_EPOCHS or KERAS_MAX_STEPS_PER_EPOCH (ConfigError if invalid)."""
    if name not in _limits:
        variable = f"KERAS_MAX_{name.upper()}"
        text = os.environ.get(variable)
        if text is not None and not text.isdecimal():
            raise ConfigError(f"{variable} = {text!r}: expected a positive integer")
        set_limit(name, None if text is None else int(text))
    return _limits[name]


def set_limit(name: Limit, value: int | None) -> None:
    """Set a limit, a positive integer (else ConfigError), or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"max_{name} = {value!r}: expected a positive integer, or None")
    _limits[name] = value
