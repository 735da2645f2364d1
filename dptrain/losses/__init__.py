"""Losses. A new loss is a function, a class, and a line in the table here."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dptrain.losses.alignments import ctc
from dptrain.losses.base import Loss, LossFunctionWrapper
from dptrain.losses.classes import (
    CTC,
    BinaryCrossentropy,
    BinaryFocalCrossentropy,
    CategoricalCrossentropy,
    CategoricalFocalCrossentropy,
    CategoricalGeneralizedCrossEntropy,
    CategoricalHinge,
    Circle,
    CosineSimilarity,
    Dice,
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
    Tversky,
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
from dptrain.losses.overlap import (
    binary_focal_crossentropy,
    categorical_focal_crossentropy,
    categorical_generalized_cross_entropy,
    dice,
    tversky,
)
from dptrain.losses.pairs import circle
from dptrain.registry.names import by_name, not_there
from dptrain.registry.serialization import Registry

# Each loss's function and class; both are found by their names.
_CLASSES: dict[Callable[..., Any], type[Loss]] = {
    binary_crossentropy: BinaryCrossentropy,
    binary_focal_crossentropy: BinaryFocalCrossentropy,
    categorical_focal_crossentropy: CategoricalFocalCrossentropy,
    categorical_generalized_cross_entropy: CategoricalGeneralizedCrossEntropy,
    dice: Dice,
    tversky: Tversky,
    categorical_crossentropy: CategoricalCrossentropy,
    categorical_hinge: CategoricalHinge,
    circle: Circle,
    ctc: CTC,
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
    "LossLike",
    "as_loss",
    "deserialize",
    "get",
    "serialize",
    *(name for name in LOSSES if name.lower() not in _SHORT),
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("losses", __all__)


# A function of y_true and y_pred serves as well, as in Keras.
LossLike = Loss | Callable[..., Any]

# Keras' functions by their names, in snake case and short.
_FUNCTIONS = {
    name: function
    for function, cls in _CLASSES.items()
    for name, registered in LOSSES.items()
    if registered is cls and name != cls.__name__
}
_registry: Registry[LossLike] = Registry("loss", "keras.losses", Loss, LOSSES, _FUNCTIONS)
serialize, deserialize = _registry.serialize, _registry.deserialize


def get(identifier: Any) -> LossLike | None:
    """Return the loss or function that an identifier names.

    Args:
        identifier: "mse" or "mean_squared_error" gives the function, with a number for each sample;
            "MeanSquaredError" the loss with Keras' defaults, which returns a single number. Classes, configurations,
            losses, functions and None work, too.

    Raises:
        ConfigError: it is unknown, or an argument is out of range.
    """
    return None if identifier is None else _registry.get(identifier)


def as_loss(identifier: Any) -> Loss:
    """Return the loss that `compile(loss=identifier)` minimises; functions get a reduction."""
    loss = _registry.get(identifier)
    if isinstance(loss, Loss):
        return loss
    loss_class = _CLASSES.get(loss)
    return LossFunctionWrapper(loss) if loss_class is None else loss_class()
