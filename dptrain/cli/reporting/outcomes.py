"""What a model says about held-out samples, beside what is true: of classes, or of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.cli.classes import count_pairs
from dptrain.cli.reporting.digits import Digits, digits_of

Array = npt.NDArray[Any]
# Equally wide parts of the confidence, and parts of equally many samples by target.
_BINS, _DECILES = 10, 10
# The least probability in a logarithm.
_LEAST = 1e-7


@dataclass(frozen=True)
class Bin:
    """Samples of about the same confidence."""

    count: int
    confidence: float  # mean, 0 to 1
    share: float  # of the samples for which it was right


@dataclass(frozen=True)
class ClassOutcome:
    """Class probabilities of held-out samples.

    Attributes:
        names: of the classes.
        labels: (rows,) true classes, int64.
        probabilities: (rows, classes), float64.
    """

    names: Sequence[str]
    labels: Array
    probabilities: Array

    @cached_property
    def predicted(self) -> Array:
        """(rows,): the class of the highest probability; of two, the second above one half."""
        if self.probabilities.shape[1] == 2:
            return (self.probabilities[:, 1] > 0.5).astype(np.int64)
        return np.asarray(self.probabilities.argmax(axis=1))

    @cached_property
    def confusion(self) -> npt.NDArray[np.int64]:
        """(classes, classes): samples by true class (row) and predicted class (column)."""
        return count_pairs(self.labels, self.predicted, len(self.names))

    @cached_property
    def losses(self) -> Array:
        """(rows,): the negative logarithm of the true class's probability; infinite where that is no number."""
        true = self.probabilities[np.arange(len(self.labels)), self.labels]
        return np.where(np.isfinite(true), -np.log(np.clip(true, _LEAST, 1)), np.inf)

    @cached_property
    def is_wrong(self) -> Array:
        """(rows,): 1 where another class was predicted, else 0."""
        wrong: Array = (self.predicted != self.labels).astype(np.float64)
        return wrong

    def calibration(self) -> list[Bin]:
        """Return bins by confidence that hold samples: of two classes that in the second, else in the predicted one."""
        if self.probabilities.shape[1] == 2:
            confidence, is_so = self.probabilities[:, 1], self.labels == 1
        else:
            confidence, is_so = self.probabilities.max(axis=1), self.predicted == self.labels
        valid = np.isfinite(confidence)
        confidence, is_so = confidence[valid], is_so[valid]
        indices = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
        return [
            Bin(int(inside.sum()), float(confidence[inside].mean()), float(is_so[inside].mean()))
            for inside in (indices == index for index in range(_BINS))
            if inside.any()
        ]

    def confusions(self, most: int) -> list[tuple[int, int, int]]:
        """Return the most frequent confusions: true class, predicted class, samples."""
        wrong = self.confusion - np.diag(np.diag(self.confusion))
        order = np.argsort(-wrong, axis=None, kind="stable")[:most]
        pairs = ((int(row), int(column)) for row, column in zip(*np.unravel_index(order, wrong.shape), strict=True))
        return [(row, column, int(wrong[row, column])) for row, column in pairs if wrong[row, column]]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Return the expected calibration error: the mean distance of confidence and share, over samples.

    Source: Guo et al., "On calibration of modern neural networks", ICML 2017.
    """
    count = sum(part.count for part in bins)
    return sum(part.count * abs(part.confidence - part.share) for part in bins) / count if count else 0.0


@dataclass(frozen=True)
class Decile:
    """A tenth of the samples, by their true value."""

    low: float
    high: float
    count: int
    error: float  # mean absolute
    bias: float  # mean of predicted minus true


@dataclass(frozen=True)
class NumberOutcome:
    """Predicted numbers of held-out samples, where both are finite.

    Attributes:
        target: its name.
        true, predicted: (rows,), float64.
        rows: (rows,) indices of the held-out samples.
        digits: of the target.
        lost: samples without a finite prediction.
    """

    target: str
    true: Array
    predicted: Array
    rows: Array
    digits: Digits
    lost: int = 0

    @classmethod
    def of(cls, target: str, true: Array, predicted: Array) -> "NumberOutcome":
        """Return the outcome of a target: both (rows,)."""
        digits = digits_of(true)
        true, predicted = true.astype(np.float64), predicted.astype(np.float64)
        valid = np.isfinite(true) & np.isfinite(predicted)
        return cls(target, true[valid], predicted[valid], np.flatnonzero(valid), digits, int((~valid).sum()))

    @cached_property
    def residuals(self) -> Array:
        """(rows,): predicted minus true."""
        return self.predicted - self.true

    @cached_property
    def errors(self) -> Array:
        """(rows,): absolute errors."""
        return np.abs(self.residuals)

    def deciles(self) -> list[Decile]:
        """Return the errors by tenths of the true values; equal values stay together, so there may be fewer."""
        edges = np.unique(np.quantile(self.true, np.linspace(0, 1, _DECILES + 1)[1:-1]))
        part = np.searchsorted(edges, self.true, side="left")
        return [
            Decile(
                float(self.true[inside].min()),
                float(self.true[inside].max()),
                int(inside.sum()),
                float(self.errors[inside].mean()),
                float(self.residuals[inside].mean()),
            )
            for inside in (part == index for index in range(len(edges) + 1))
            if inside.any()
        ]


def r2(true: Array, predicted: Array) -> float:
    """Return the coefficient of determination; NaN where the true values are all alike."""
    spread = float(((true - true.mean()) ** 2).sum()) if len(true) else 0.0
    return 1 - float(((true - predicted) ** 2).sum()) / spread if spread else float("nan")
