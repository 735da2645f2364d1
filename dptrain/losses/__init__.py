"""Losses: what is minimised, with no device code. A new loss is one class, and one line in the table here."""

from typing import TYPE_CHECKING

from dptrain.losses.base import Loss
from dptrain.losses.binary import BinaryCrossentropy
from dptrain.losses.categorical import CategoricalCrossentropy, SparseCategoricalCrossentropy
from dptrain.losses.regression import Huber, MeanAbsoluteError, MeanSquaredError
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Registry

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


_registry: Registry[Loss] = Registry("loss", "keras.losses", Loss, LOSSES)
get, serialize, deserialize = _registry.get, _registry.serialize, _registry.deserialize
