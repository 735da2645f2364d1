"""Access to models from callbacks; foreign models need only Keras' methods."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.metrics import Metric

Arrays = Sequence[npt.NDArray[Any]]


def weights_of(model: Any) -> list[npt.NDArray[Any]]:
    """Return copies of this rank's weights of a model."""
    read: Callable[[], list[npt.NDArray[Any]]] = getattr(model, "_local_weights", model.get_weights)
    return read()


def set_weights_of(model: Any, values: Arrays) -> None:
    """Set weights that `weights_of` returned."""
    write: Callable[[Arrays], None] = getattr(model, "_set_local_weights", model.set_weights)
    write(values)


def named_weights_of(model: Any) -> dict[str, npt.NDArray[Any]]:
    """Return copies of a model's weights by path."""
    if hasattr(model, "_named_weights"):
        weights: dict[str, npt.NDArray[Any]] = model._named_weights()
        return weights
    return {weight._path: np.asarray(weight) for weight in model.weights}


def optimizers_of(optimizer: Any) -> list[tuple[str, Any]]:
    """Return the optimizers with a learning rate each, those of a MultiOptimizer, and their names for messages."""
    parts = getattr(optimizer, "optimizers", None)
    return [("", optimizer)] if parts is None else [(f" {part.name}", part) for part in parts]


def rates_of(optimizer: Any) -> dict[str, float]:
    """Return an optimizer's learning rates by name; {} for None."""
    if optimizer is None:
        return {}
    if hasattr(optimizer, "_rates"):
        rates: dict[str, float] = optimizer._rates
        return rates
    return {"learning_rate": float(np.asarray(optimizer.learning_rate))}


def metrics_of(model: Any) -> Mapping[str, Metric]:
    """Return a model's metrics by log key, if it has any."""
    metrics: Mapping[str, Metric] = getattr(model, "_metrics_by_key", {})
    return metrics
