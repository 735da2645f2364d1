"""Losses: what is minimised, in ops. A new loss is a function, one class, and one line in the table here."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dptrain.losses.base import Loss, LossFunctionWrapper
from dptrain.losses.classes import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    CategoricalHinge,
    CosineSimilarity,
    Hinge,
    Huber,
    KLDivergence,
    LogCosh,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    Poisson,
    SparseCategoricalCrossentropy,
    SquaredHinge,
)
from dptrain.losses.functions import (
    binary_crossentropy,
    categorical_crossentropy,
    categorical_hinge,
    cosine_similarity,
    hinge,
    huber,
    kl_divergence,
    log_cosh,
    mean_absolute_error,
    mean_absolute_percentage_error,
    mean_squared_error,
    mean_squared_logarithmic_error,
    poisson,
    sparse_categorical_crossentropy,
    squared_hinge,
)
from dptrain.registry.names import by_name, not_there
from dptrain.registry.serialization import Registry

# Each loss's function and class; both are found by their names.
_CLASSES: dict[Callable[..., Any], type[Loss]] = {
    binary_crossentropy: BinaryCrossentropy,
    categorical_crossentropy: CategoricalCrossentropy,
    categorical_hinge: CategoricalHinge,
    cosine_similarity: CosineSimilarity,
    hinge: Hinge,
    huber: Huber,
    kl_divergence: KLDivergence,
    log_cosh: LogCosh,
    mean_absolute_error: MeanAbsoluteError,
    mean_absolute_percentage_error: MeanAbsolutePercentageError,
    mean_squared_error: MeanSquaredError,
    mean_squared_logarithmic_error: MeanSquaredLogarithmicError,
    poisson: Poisson,
    sparse_categorical_crossentropy: SparseCategoricalCrossentropy,
    squared_hinge: SquaredHinge,
}
_SHORT: dict[str, type[Loss]] = {
    "bce": BinaryCrossentropy,
    "kld": KLDivergence,
    "mae": MeanAbsoluteError,
    "mape": MeanAbsolutePercentageError,
    "mse": MeanSquaredError,
    "msle": MeanSquaredLogarithmicError,
}
# Names as Keras accepts them; the command line and the test matrix read this table.
LOSSES = by_name(_CLASSES.values(), _SHORT)
__all__ = [
    "LOSSES",
    "Loss",
    "LossFunctionWrapper",
    "deserialize",
    "get",
    "serialize",
    *(name for name in LOSSES if name.lower() not in _SHORT),
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("losses", __all__)


def _of_function(function: Callable[..., Any]) -> Loss:
    """Return the loss that a function computes."""
    known = _CLASSES.get(function)
    return LossFunctionWrapper(function) if known is None else known()


_registry: Registry[Loss] = Registry("loss", "keras.losses", Loss, LOSSES, _of_function)
get, serialize, deserialize = _registry.get, _registry.serialize, _registry.deserialize
