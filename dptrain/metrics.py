"""Metrics: sums over samples that are reported as means, with no device code.

A metric is one element of the message that also carries the gradients, so that global values cost no message of
their own; the count to divide by is the sum of the sample weights in the same message.
"""

from abc import ABC, abstractmethod

from dptrain.backend.base import Backend, Buffer
from dptrain.registry import lookup
from dptrain.tracking import Mean as Mean


class Metric(ABC):
    """A sum over samples of one number each.

    Attributes:
        name: its key in logs.
        takes_labels: targets are integer labels; otherwise values of the output's shape.
    """

    takes_labels = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def update(self, ops: Backend, y_pred: Buffer, target: Buffer, total: Buffer) -> None:
        """Add the batch's sum to total (one element)."""


class SparseCategoricalAccuracy(Metric):
    """Fraction of samples whose highest output is at the label."""

    takes_labels = True

    def __init__(self, name: str = "sparse_categorical_accuracy") -> None:
        super().__init__(name)

    def update(self, ops: Backend, y_pred: Buffer, target: Buffer, total: Buffer) -> None:
        """Count the correct samples; logits and probabilities have their highest value at the same place."""
        ops.count_correct(y_pred, target, total)


class MeanAbsoluteError(Metric):
    """Mean over a sample's outputs of |y_pred - target|."""

    def __init__(self, name: str = "mean_absolute_error") -> None:
        super().__init__(name)

    def update(self, ops: Backend, y_pred: Buffer, target: Buffer, total: Buffer) -> None:
        """Sum the samples' mean absolute errors."""
        ops.absolute_error(y_pred, target, total)


# Names as Keras accepts them; a metric is reported under the name that it was asked for by.
METRICS: dict[str, type[Metric]] = {
    "accuracy": SparseCategoricalAccuracy,
    "acc": SparseCategoricalAccuracy,
    "sparse_categorical_accuracy": SparseCategoricalAccuracy,
    "mean_absolute_error": MeanAbsoluteError,
    "mae": MeanAbsoluteError,
}


def get(identifier: str | Metric) -> Metric:
    """Return the metric of that name, reported under it, or the one given.

    Raises:
        ConfigError: no metric has that name.
    """
    if isinstance(identifier, Metric):
        return identifier
    metric: type[Metric] = lookup("metric", identifier, METRICS)
    return metric(name=identifier)
