"""Checks arguments that sweeps and ensembles share: the model function and the data."""

import inspect
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dptrain.batches.fingerprint import fingerprint
from dptrain.batches.inputs import as_array, is_array
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.random import seed_of_all_models
from dptrain.utils import PyDataset, set_random_seed

# Held while a model is built with its own seed, since seeds belong to the process.
_SEEDING = threading.RLock()


class Builder:
    """Calls a user's function for new models, each with its own seed."""

    def __init__(self, build_model: Callable[..., Model], *, compiled: bool = True) -> None:
        require_function("build_model", build_model)
        self._build_model, self._compiled = build_model, compiled
        self.takes = inspect.signature(build_model).parameters
        self._built: weakref.WeakSet[Model] = weakref.WeakSet()

    def build(self, seed: int, **fields: Any) -> Model:
        """Call the user's function, seeded as by `set_random_seed`; it gets `seed` if it has that parameter."""
        with _SEEDING:
            pythons, numpys = random.getstate(), np.random.get_state()
            try:
                with seed_of_all_models(seed):
                    set_random_seed(seed)
                    model = self._build_model(**fields, **({"seed": seed} if "seed" in self.takes else {}))
            finally:
                random.setstate(pythons)
                np.random.set_state(numpys)
        if not isinstance(model, Model) or (self._compiled and not model.compiled):
            expected = "a compiled model" if self._compiled else "a dptrain model"
            raise ConfigError(f"build_model: expected {expected}, found {type(model).__name__}")
        if model in self._built:
            raise ConfigError("build_model: returned the same model twice; expected a new model for each run")
        self._built.add(model)
        return model


def require_function(name: str, function: Any) -> None:
    """Refuse a value that cannot be called."""
    if not callable(function):
        raise ConfigError(f"{name}: expected a function, which is called for each run, found {type(function).__name__}")


def require_array(where: str, x: Any) -> None:
    """Refuse data that only one training can read."""
    if not (isinstance(x, PyDataset) or is_array(x)):
        raise ConfigError(
            f"{where}: x is a {type(x).__name__}: expected an array, which each run can read from its start"
        )


def facts(value: Any) -> Any:
    """Return a JSON value that identifies an argument of `fit`; arrays by their fingerprint."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): facts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [facts(item) for item in value]
    if is_array(value):
        array = as_array(value, "x")
        return fingerprint(array)
    return type(value).__name__
