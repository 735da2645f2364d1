"""Metrics: totals over samples and what is reported of them, in ops.

A new metric is one class, and one line in the table here; the user's own are functions, or subclasses of `Metric` or
`Mean`, that need no table.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.losses.base import Loss
from dptrain.losses.functions import (
    binary_crossentropy,
    categorical_crossentropy,
    categorical_hinge,
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
from dptrain.losses.overlap import binary_focal_crossentropy, categorical_focal_crossentropy
from dptrain.metrics import means
from dptrain.metrics.base import Mean, MeanMetricWrapper, Metric, Sum
from dptrain.metrics.confusion import (
    AUC,
    FalseNegatives,
    FalsePositives,
    Precision,
    PrecisionAtRecall,
    Recall,
    RecallAtPrecision,
    SensitivityAtSpecificity,
    SpecificityAtSensitivity,
    TrueNegatives,
    TruePositives,
)
from dptrain.metrics.functions import (
    binary_accuracy,
    categorical_accuracy,
    concordance_correlation,
    pearson_correlation,
    sparse_categorical_accuracy,
    sparse_top_k_categorical_accuracy,
    top_k_categorical_accuracy,
)
from dptrain.metrics.means import (
    Accuracy,
    BinaryAccuracy,
    BinaryCrossentropy,
    ByTargets,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    CategoricalHinge,
    ConcordanceCorrelation,
    CosineSimilarity,
    Hinge,
    KLDivergence,
    LogCoshError,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    PearsonCorrelation,
    Poisson,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy,
    SquaredHinge,
    TopKCategoricalAccuracy,
)
from dptrain.metrics.overlap import BinaryIoU, IoU, MeanIoU, OneHotIoU, OneHotMeanIoU
from dptrain.metrics.scores import F1Score, FBetaScore, R2Score
from dptrain.registry.names import by_name, not_there
from dptrain.registry.serialization import Registry

CLASSES: tuple[type[Metric], ...] = (
    AUC,
    Accuracy,
    BinaryAccuracy,
    BinaryCrossentropy,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    CategoricalHinge,
    CosineSimilarity,
    FalseNegatives,
    FalsePositives,
    Hinge,
    KLDivergence,
    LogCoshError,
    Mean,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    Poisson,
    Precision,
    Recall,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy,
    SquaredHinge,
    Sum,
    TopKCategoricalAccuracy,
    TrueNegatives,
    TruePositives,
    *(PrecisionAtRecall, RecallAtPrecision, SensitivityAtSpecificity, SpecificityAtSensitivity),
    *(PearsonCorrelation, ConcordanceCorrelation),
    *(BinaryIoU, IoU, MeanIoU, OneHotIoU, OneHotMeanIoU, F1Score, FBetaScore, R2Score),
)
_SHORT: dict[str, type[Metric]] = {
    "bce": BinaryCrossentropy,
    "mae": MeanAbsoluteError,
    "mape": MeanAbsolutePercentageError,
    "mse": MeanSquaredError,
    "msle": MeanSquaredLogarithmicError,
}
# Names as Keras accepts them. In `compile`, "accuracy" and "acc" mean more than the class of that name: see `resolve`.
METRICS = by_name(CLASSES, _SHORT)
__all__ = [
    "METRICS",
    "MeanMetricWrapper",
    "Metric",
    "MetricLike",
    "as_metric",
    "binary_accuracy",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_accuracy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_hinge",
    "concordance_correlation",
    "deserialize",
    "get",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "pearson_correlation",
    "poisson",
    "resolve",
    "serialize",
    "sparse_categorical_accuracy",
    "sparse_categorical_crossentropy",
    "sparse_top_k_categorical_accuracy",
    "squared_hinge",
    "top_k_categorical_accuracy",
    *(one.__name__ for one in CLASSES),
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("metrics", __all__)

# Functions that are metrics of Keras', by which these are found as well.
_OF_FUNCTIONS: dict[Callable[..., Any], type[Metric]] = {
    vars(one)["_function"].__func__: one
    for one in CLASSES
    if one.__module__ == means.__name__ and "_function" in vars(one) and one is not RootMeanSquaredError
}


# As Keras, a function of y_true and y_pred serves as well.
MetricLike = Metric | Callable[..., Any]

_registry: Registry[MetricLike] = Registry("metric", "keras.metrics", Metric, METRICS, functions={})
serialize, deserialize = _registry.serialize, _registry.deserialize


def get(identifier: Any) -> MetricLike | None:
    """Return the metric that a name, class or configuration means; a metric, a function or None as it is.

    Raises:
        ConfigError: it means none, or an argument is out of range.
    """
    return None if identifier is None else _registry.get(identifier)


def as_metric(identifier: Any) -> Metric:
    """Return what `compile(metrics=[identifier])` reports: of a function the mean, under its name.

    Raises:
        ConfigError: as `get`.
    """
    found = _registry.get(identifier)
    if isinstance(found, Metric):
        return found
    known = _OF_FUNCTIONS.get(found)
    return MeanMetricWrapper(found) if known is None else known(name=found.__name__)


# What these names mean depends on the outputs and the targets.
_ACCURACY = (BinaryAccuracy, SparseCategoricalAccuracy, CategoricalAccuracy)
_CROSSENTROPY = (BinaryCrossentropy, SparseCategoricalCrossentropy, CategoricalCrossentropy)
_BY_SHAPE: dict[str, tuple[type[means.BuiltIn], ...]] = {
    "accuracy": _ACCURACY,
    "acc": _ACCURACY,
    "crossentropy": _CROSSENTROPY,
    "ce": _CROSSENTROPY,
}


def resolve(
    metrics: Any,
    weighted_metrics: Any,
    loss: Loss | None,
    output_shape: Sequence[int | None] | None,
    target_shape: Sequence[int | None] | None = None,
    *,
    defers: bool = False,
) -> tuple[dict[str, Metric], dict[str, Metric]]:
    """Return what `compile(metrics=..., weighted_metrics=...)` asks for, each under its key in Keras' logs, in order.

    "accuracy" and "acc" become `BinaryAccuracy` where the model has one output, and else `SparseCategoricalAccuracy` or
    `CategoricalAccuracy` as the targets are labels or values; "crossentropy" and "ce" likewise. A metric that was named
    by a string is reported under it.

    Args:
        metrics: list, tuple or dict of names, metrics, classes or functions, or None.
        weighted_metrics: the same, of metrics that get the sample weights.
        loss: says whether targets are labels; None where there is none.
        output_shape: of one sample; None where it is not known yet, then it has several outputs.
        target_shape: of one sample, () of a label; None where it is not known. Tells labels where the loss does not.
        defers: where nobody knows what targets are, leave it to their shape in each batch, see `ByTargets`.

    Raises:
        ConfigError: an argument is none of these, a name is unknown, or a metric takes other targets than the loss.
    """
    labels = None if loss is None else loss._takes_labels
    one_output = output_shape is not None and len(output_shape) > 0 and output_shape[-1] == 1
    sparse = labels
    if sparse is None and target_shape is not None and output_shape is not None:
        sparse = len(target_shape) < len(output_shape) or target_shape[-1:] == (1,)
    place = 0 if one_output else None if defers and sparse is None else 2 if sparse is False else 1
    times: dict[str, int] = {}
    found: tuple[dict[str, Metric], dict[str, Metric]] = ({}, {})
    for weighted, argument, given in ((0, "metrics", metrics), (1, "weighted_metrics", weighted_metrics)):
        if given and not isinstance(given, list | tuple | dict):
            raise ConfigError(
                f"Expected `{argument}` argument to be a list, tuple, or dict. Received instead: {argument}={given} of "
                f"type {type(given)}"
            )
        for identifier in _flattened(given or ()):
            metric, name = _named(identifier, labels, place)
            key = f"weighted_{name}" if weighted and name in times else name
            times[key] = times.get(key, -1) + 1
            found[weighted][f"{key}_{times[key]}" if times[key] else key] = metric
    return found


def _named(identifier: Any, labels: bool | None, place: int | None) -> tuple[Metric, str]:
    """Return a metric that takes the loss's targets, and the name that it is reported under.

    Args:
        identifier: the user's.
        labels: whether targets are labels.
        place: of what is meant in the entries of `_BY_SHAPE`; None where the targets of a batch tell.
    """
    by_shape = _BY_SHAPE.get(identifier.lower()) if isinstance(identifier, str) else None
    if by_shape is None:
        metric = as_metric(identifier)
    else:
        metric = ByTargets(by_shape, identifier) if place is None else by_shape[place]()
    if isinstance(identifier, str):
        metric.name = identifier
    name = metric.name
    if labels is not None and metric._takes_labels is not None and metric._takes_labels != labels:
        ours, theirs = ("integer labels", "values") if metric._takes_labels else ("values", "integer labels")
        raise ConfigError(f"metric {name!r} compares with {ours}, the loss takes {theirs}")
    return metric, name


def _flattened(given: Any) -> Sequence[Any]:
    """Return the leaves of nested lists, tuples and dicts, dicts in the order of their keys."""
    if isinstance(given, dict) and "class_name" not in given:
        return [leaf for key in sorted(given) for leaf in _flattened(given[key])]
    if isinstance(given, list | tuple):
        return [leaf for one in given for leaf in _flattened(one)]
    return [given]
