"""Losses: what is minimised, with no device code. A new loss is one class, and one line in the table here."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dptrain.losses.base import Loss
from dptrain.losses.binary import BinaryCrossentropy
from dptrain.losses.categorical import CategoricalCrossentropy, SparseCategoricalCrossentropy
from dptrain.losses.regression import Huber, MeanAbsoluteError, MeanSquaredError
from dptrain.registry import serialization
from dptrain.registry.names import not_there

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

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("losses", __all__)

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
    found: Loss = serialization.get("loss", identifier, Loss, LOSSES)
    return found


def serialize(loss: Loss) -> dict[str, Any]:
    """Return a loss as Keras writes it into model files."""
    return serialization.to_dict("keras.losses", loss, LOSSES.values())


def deserialize(config: Mapping[str, Any], custom_objects: Mapping[str, type[Loss]] | None = None) -> Loss:
    """Return the loss that `serialize`, or Keras, wrote.

    Args:
        config: with "class_name" and "config".
        custom_objects: classes of the user's own by name.

    Raises:
        ConfigError: the class is unknown, or takes no such arguments.
    """
    loss: Loss = serialization.made("loss", config, LOSSES | dict(custom_objects or {}))
    return loss
