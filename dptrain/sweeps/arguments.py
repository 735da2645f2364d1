"""What users hand to sweeps and ensembles: a function that makes models, data that many trainings read."""

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
from dptrain.random import default_seed, set_default_seed
from dptrain.utils import PyDataset, set_random_seed

# Held while a model is built with a seed of its own, since seeds are the process's.
_SEEDING = threading.RLock()


class Builder:
    """Makes models of a user's function, each with a seed.

    Args:
        build_model: returns a new model each time.
        compiled: whether it is to be compiled.

    Attributes:
        takes: the parameters of the function.

    Raises:
        ConfigError: it is no function.
    """

    def __init__(self, build_model: Callable[..., Model], *, compiled: bool = True) -> None:
        require_function("build_model", build_model)
        self._build_model, self._compiled = build_model, compiled
        self.takes = inspect.signature(build_model).parameters
        self._built: weakref.WeakSet[Model] = weakref.WeakSet()

    def build(self, seed: int, **fields: Any) -> Model:
        """Call the user's function; the seed is its `seed`, if it has one, and set as `set_random_seed` does meanwhile.

        Args:
            seed: of the model, unless the function gives it another.
            fields: further arguments of the function.

        Raises:
            ConfigError: it returns something else than a new model, compiled where that is asked for.
        """
        with _SEEDING:
            before, pythons, numpys = default_seed(), random.getstate(), np.random.get_state()
            set_random_seed(seed)
            try:
                model = self._build_model(**fields, **({"seed": seed} if "seed" in self.takes else {}))
            finally:
                set_default_seed(before)
                random.setstate(pythons)
                np.random.set_state(numpys)
        if not isinstance(model, Model) or (self._compiled and not model.compiled):
            expected = "a compiled model" if self._compiled else "a model of dptrain"
            raise ConfigError(f"build_model: expected {expected}, found {type(model).__name__}")
        if model in self._built:
            raise ConfigError(
                "build_model: returned the same model twice; expected a new one each time, for a run each"
            )
        self._built.add(model)
        return model


def require_function(name: str, given: Any) -> None:
    """Refuse what is no function.

    Raises:
        ConfigError: it is none.
    """
    if not callable(given):
        raise ConfigError(f"{name}: expected a function that returns new ones, found {type(given).__name__}")


def require_array(where: str, x: Any) -> None:
    """Refuse data that cannot be read by one training after another.

    Raises:
        ConfigError: it is neither an array nor a `PyDataset`.
    """
    if not (isinstance(x, PyDataset) or is_array(x)):
        raise ConfigError(f"{where}: x is a {type(x).__name__}: expected an array, which every run reads anew")


def facts(value: Any) -> Any:
    """Return what tells an argument of `fit` from another one, of what JSON can carry."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): facts(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [facts(one) for one in value]
    if is_array(value):
        array = as_array(value, "x")
        return fingerprint(array)
    return type(value).__name__
