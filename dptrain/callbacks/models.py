"""What callbacks ask a model for; one that is not dptrain's need only have Keras' methods."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.metrics import Metric

Arrays = Sequence[npt.NDArray[Any]]


def weights_of(model: Any) -> list[npt.NDArray[Any]]:
    """Return copies of what this rank has of a model's weights."""
    read: Callable[[], list[npt.NDArray[Any]]] = getattr(model, "_local_weights", model.get_weights)
    return read()


def set_weights_of(model: Any, values: Arrays) -> None:
    """Give a model weights that `weights_of` returned."""
    write: Callable[[Arrays], None] = getattr(model, "_set_local_weights", model.set_weights)
    write(values)


def named_weights_of(model: Any) -> dict[str, npt.NDArray[Any]]:
    """Return copies of a model's weights by path."""
    if hasattr(model, "_named_weights"):
        found: dict[str, npt.NDArray[Any]] = model._named_weights()
        return found
    return {one.path: np.asarray(one) for one in model.weights}


def rates_of(optimizer: Any) -> dict[str, float]:
    """Return an optimizer's learning rates by name; of None none."""
    if optimizer is None:
        return {}
    if hasattr(optimizer, "_rates"):
        found: dict[str, float] = optimizer._rates
        return found
    return {"learning_rate": float(np.asarray(optimizer.learning_rate))}


def metrics_of(model: Any) -> Mapping[str, Metric]:
    """Return a model's metrics by their keys in logs, where it says them."""
    found: Mapping[str, Metric] = getattr(model, "_metrics_by_key", {})
    return found
