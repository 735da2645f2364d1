"""Metrics: sums over samples and what is reported of them, with no device code.

A new metric is one class, and one line in the table here; the user's own are subclasses of `Metric` or `Mean` that need
no table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dptrain.errors import ConfigError
from dptrain.metrics.accuracy import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from dptrain.metrics.base import Batch, Mean, Metric
from dptrain.metrics.confusion import Precision, Recall
from dptrain.metrics.cross_entropy import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    SparseCategoricalCrossentropy,
)
from dptrain.metrics.regression import MeanAbsoluteError, MeanSquaredError
from dptrain.metrics.tracking import MeanTracker
from dptrain.registry.names import not_there, snake_case
from dptrain.registry.serialization import Registry

__all__ = [
    "METRICS",
    "Accuracy",
    "Batch",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "MeanTracker",
    "Measured",
    "Metric",
    "Precision",
    "Recall",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "deserialize",
    "get",
    "resolve",
    "serialize",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("metrics", __all__)

CLASSES: tuple[type[Metric], ...] = (
    Accuracy,
    BinaryAccuracy,
    BinaryCrossentropy,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    MeanAbsoluteError,
    MeanSquaredError,
    Precision,
    Recall,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
# Names as Keras accepts them. In `compile`, "accuracy" and "acc" mean more than the class of that name: see `resolve`.
METRICS: dict[str, type[Metric]] = (
    {one.__name__: one for one in CLASSES}
    | {snake_case(one.__name__): one for one in CLASSES}
    | dict.fromkeys(("bce", "BCE"), BinaryCrossentropy)
    | dict.fromkeys(("mae", "MAE"), MeanAbsoluteError)
    | dict.fromkeys(("mse", "MSE"), MeanSquaredError)
)


@dataclass(frozen=True)
class Measured:
    """A metric of a compiled model.

    Attributes:
        key: in logs.
        metric: what is measured.
        weighted: it gets the sample weights.
    """

    key: str
    metric: Metric
    weighted: bool


_registry: Registry[Metric] = Registry("metric", "keras.metrics", Metric, METRICS)
get, serialize, deserialize = _registry.get, _registry.serialize, _registry.deserialize


def resolve(
    metrics: Any, weighted_metrics: Any, takes_labels: bool | None, output_shape: tuple[int, ...] | None
) -> tuple[Measured, ...]:
    """Return what `compile(metrics=..., weighted_metrics=...)` asks for, in the order and with the keys of Keras' logs.

    "accuracy" and "acc" become `BinaryAccuracy` where the model has one output, and else `SparseCategoricalAccuracy` or
    `CategoricalAccuracy` as the targets are labels or values. A metric that was named by a string is reported under it.

    Args:
        metrics: list, tuple or dict of names, metrics or classes, or None.
        weighted_metrics: the same, of metrics that get the sample weights.
        takes_labels: what the loss says of the targets; None where there is none.
        output_shape: of one sample; None where it is not known yet, then "accuracy" is one of the last two.

    Raises:
        ConfigError: an argument is none of these, a name is unknown, or a metric takes other targets than the loss.
    """
    keys: dict[str, int] = {}
    found = []
    for weighted, argument, given in ((False, "metrics", metrics), (True, "weighted_metrics", weighted_metrics)):
        if given and not isinstance(given, list | tuple | dict):
            raise ConfigError(
                f"Expected `{argument}` argument to be a list, tuple, or dict. Received instead: {argument}={given} of "
                f"type {type(given)}"
            )
        for identifier in _flattened(given or ()):
            metric, name = _named(identifier, takes_labels, output_shape)
            key = name
            if weighted and key in keys:
                key = f"weighted_{name}"
            times = keys.get(key, 0)
            keys[key] = times + 1
            found.append(Measured(f"{key}_{times}" if times else key, metric, weighted))
    return tuple(found)


def _named(identifier: Any, takes_labels: bool | None, output_shape: tuple[int, ...] | None) -> tuple[Metric, str]:
    """Return a metric that takes the loss's targets, and the name that it is reported under."""
    metric: Metric
    if not isinstance(identifier, str) or identifier.lower() not in ("accuracy", "acc"):
        metric = get(identifier)
    elif output_shape is not None and output_shape[-1] == 1:
        metric = BinaryAccuracy()
    else:
        metric = CategoricalAccuracy() if takes_labels is False else SparseCategoricalAccuracy()
    name = identifier if isinstance(identifier, str) else metric.name
    if takes_labels is not None and metric.takes_labels != takes_labels:
        ours, theirs = ("integer labels", "values") if metric.takes_labels else ("values", "integer labels")
        raise ConfigError(f"metric {name!r} compares with {ours}, the loss takes {theirs}")
    return metric, name


def _flattened(given: Any) -> Sequence[Any]:
    """Return the leaves of nested lists, tuples and dicts, dicts in the order of their keys."""
    if isinstance(given, dict) and "class_name" not in given:
        return [leaf for key in sorted(given) for leaf in _flattened(given[key])]
    if isinstance(given, list | tuple):
        return [leaf for one in given for leaf in _flattened(one)]
    return [given]
