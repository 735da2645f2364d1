"""Metrics: totals over samples and a value computed from them.

A new metric is a class here and a line in `CLASSES`: a mean over samples of a function in `means`, from counts at
thresholds in `confusion`, from a confusion matrix in `overlap`, else in `scores`. Users' metrics need no table.
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
    *(metric_class.__name__ for metric_class in CLASSES),
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("metrics", __all__)

# Keras' metrics by the functions that may stand for them.
_OF_FUNCTIONS: dict[Callable[..., Any], type[Metric]] = {
    vars(metric_class)["_function"].__func__: metric_class
    for metric_class in CLASSES
    if metric_class.__module__ == means.__name__
    and "_function" in vars(metric_class)
    and metric_class is not RootMeanSquaredError
}


# A function of y_true and y_pred serves as well, as in Keras.
MetricLike = Metric | Callable[..., Any]

_registry: Registry[MetricLike] = Registry("metric", "keras.metrics", Metric, METRICS, functions={})
serialize, deserialize = _registry.serialize, _registry.deserialize


def get(identifier: Any) -> MetricLike | None:
    """Return the metric for a name, class or configuration; a metric, function or None unchanged; else ConfigError."""
    return None if identifier is None else _registry.get(identifier)


def as_metric(identifier: Any) -> Metric:
    """Return the metric for `compile(metrics=[identifier])`; a function becomes its mean, under its name."""
    metric = _registry.get(identifier)
    if isinstance(metric, Metric):
        return metric
    metric_class = _OF_FUNCTIONS.get(metric)
    return MeanMetricWrapper(metric) if metric_class is None else metric_class(name=metric.__name__)


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
    """Return the metrics of `compile(metrics=..., weighted_metrics=...)` by Keras' log keys, in order.

    "accuracy" and "acc" become `BinaryAccuracy` for a single output, else `SparseCategoricalAccuracy` for labels and
    `CategoricalAccuracy` for values; "crossentropy" and "ce" likewise. Shapes are of a sample, () for a label; if they
    are unknown (None), the loss tells whether targets are labels, or with `defers` each batch, see `ByTargets`.
    """
    labels = None if loss is None else loss._takes_labels
    one_output = output_shape is not None and len(output_shape) > 0 and output_shape[-1] == 1
    sparse = labels
    if sparse is None and target_shape is not None and output_shape is not None:
        sparse = len(target_shape) < len(output_shape) or target_shape[-1:] == (1,)
    place = 0 if one_output else None if defers and sparse is None else 2 if sparse is False else 1
    times: dict[str, int] = {}
    resolved: tuple[dict[str, Metric], dict[str, Metric]] = ({}, {})
    for weighted, argument, identifiers in ((0, "metrics", metrics), (1, "weighted_metrics", weighted_metrics)):
        if identifiers and not isinstance(identifiers, list | tuple | dict):
            raise ConfigError(
                f"Expected `{argument}` argument to be a list, tuple, or dict. Received instead: "
                f"{argument}={identifiers} of type {type(identifiers)}"
            )
        for identifier in _flattened(identifiers or ()):
            metric, name = _named(identifier, labels, place)
            key = f"weighted_{name}" if weighted and name in times else name
            times[key] = times.get(key, -1) + 1
            resolved[weighted][f"{key}_{times[key]}" if times[key] else key] = metric
    return resolved


def _named(identifier: Any, labels: bool | None, place: int | None) -> tuple[Metric, str]:
    """Return a metric that takes the loss's targets, and its reported name; `place` indexes `_BY_SHAPE`."""
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
        raise ConfigError(f"metric {name!r} expects targets that are {ours}, the loss {theirs}")
    return metric, name


def _flattened(nested: Any) -> Sequence[Any]:
    """Return the leaves of nested lists, tuples and dicts (in the order of their keys)."""
    if isinstance(nested, dict) and "class_name" not in nested:
        return [leaf for key in sorted(nested) for leaf in _flattened(nested[key])]
    if isinstance(nested, list | tuple):
        return [leaf for entry in nested for leaf in _flattened(entry)]
    return [nested]
