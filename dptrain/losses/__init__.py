"""Losses: what is minimised, with no device code. A new loss is one class, and one line in the table here."""

from collections.abc import Mapping
from typing import Any

from dptrain.errors import ConfigError
from dptrain.losses.base import Loss
from dptrain.losses.binary import BinaryCrossentropy
from dptrain.losses.categorical import CategoricalCrossentropy, SparseCategoricalCrossentropy
from dptrain.losses.regression import Huber, MeanAbsoluteError, MeanSquaredError
from dptrain.registry import lookup

__all__ = [
    "LOSSES",
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "Huber",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "SparseCategoricalCrossentropy",
    "deserialize",
    "get",
    "serialize",
]

# Names as Keras accepts them; the command line and the test matrix read this table.
LOSSES: dict[str, type[Loss]] = {
    "binary_crossentropy": BinaryCrossentropy,
    "bce": BinaryCrossentropy,
    "BCE": BinaryCrossentropy,
    "categorical_crossentropy": CategoricalCrossentropy,
    "huber": Huber,
    "mean_absolute_error": MeanAbsoluteError,
    "mae": MeanAbsoluteError,
    "MAE": MeanAbsoluteError,
    "mean_squared_error": MeanSquaredError,
    "mse": MeanSquaredError,
    "MSE": MeanSquaredError,
    "sparse_categorical_crossentropy": SparseCategoricalCrossentropy,
}
LOSSES |= {one.__name__: one for one in LOSSES.values()}


def get(identifier: str | Loss | type[Loss] | Mapping[str, Any]) -> Loss:
    """Return the loss of that name with Keras' defaults, of that class or configuration, or the one given.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(identifier, Loss):
        return identifier
    if isinstance(identifier, str):
        loss: Any = lookup("loss", identifier, LOSSES)
        return loss()  # type: ignore[no-any-return]
    if isinstance(identifier, type) and issubclass(identifier, Loss):
        made: Any = identifier
        return made()  # type: ignore[no-any-return]
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    raise ConfigError(f"Could not interpret loss identifier: {identifier}")


def serialize(loss: Loss) -> dict[str, Any]:
    """Return a loss as Keras writes it into model files."""
    return {
        "module": "keras.losses",
        "class_name": type(loss).__name__,
        "config": loss.config(),
        "registered_name": None,
    }


def deserialize(config: Mapping[str, Any], custom_objects: Mapping[str, type[Loss]] | None = None) -> Loss:
    """Return the loss that `serialize`, or Keras, wrote.

    Args:
        config: with "class_name" and "config".
        custom_objects: classes of the user's own by name.

    Raises:
        ConfigError: the class is unknown, or takes no such arguments.
    """
    loss: Any = lookup("loss", str(config.get("class_name")), LOSSES | dict(custom_objects or {}))
    try:
        return loss(**config.get("config", {}))  # type: ignore[no-any-return]
    except TypeError as error:
        raise ConfigError(f"loss {config.get('class_name')}: {error}") from error
