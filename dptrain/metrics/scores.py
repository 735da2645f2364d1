"""Scores based on several totals: F-beta and R^2."""

import math
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.losses.base import wide
from dptrain.losses.functions import same_rank
from dptrain.metrics.base import Metric
from dptrain.ops.nn.cross_entropy import EPSILON
from dptrain.program.shapes import without_rows
from dptrain.program.tensor import Tensor, Variable


class _OfColumns(Metric):
    """A metric with totals for each output; the first batch tells how many there are."""

    _direction = "up"
    _takes_labels = False
    _totals: tuple[str, ...]

    def _pair(self, y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
        """Return targets and outputs, (rows, outputs), as float64."""
        target, output = same_rank(wide(y_true), wide(y_pred))
        if target.ndim != 2 or output.ndim != 2:
            raise ConfigError(
                f"{type(self).__name__} expects 2D inputs with shape (batch_size, output_dim). Received input shapes: "
                f"y_pred.shape={without_rows(output.shape)} and y_true.shape={without_rows(target.shape)}."
            )
        if not hasattr(self, self._totals[0]):
            for name in self._totals:
                setattr(self, name, self.add_variable(self._shape(int(output.shape[1])), name=name))
        return ops.cast(target, np.float64), ops.cast(output, np.float64)

    def _shape(self, outputs: int) -> tuple[int, ...]:
        return (outputs,)

    def _total(self, name: str) -> Variable:
        """Return a total; ConfigError before the first batch."""
        total: Variable | None = getattr(self, name, None)
        if total is None:
            raise ConfigError(f"metric {self.name!r}: no result before the first batch")
        return total


def _each(weights: Any, values: Tensor) -> Tensor:
    """Return weights as a column that broadcasts to values."""
    column = ops.cast(ops.convert_to_tensor(weights), np.float64)
    return ops.reshape(column, (-1, 1)) if column.ndim == 1 else column * ops.ones_like(values[:, :1])


class FBetaScore(_OfColumns):
    """(1 + beta^2) precision recall / (beta^2 precision + recall), of each class or averaged.

    Args:
        average: None for each class's score, "micro" for that of all together, "macro" for the mean, "weighted" for the
            mean weighted by the frequency of classes.
        beta: weight of recall relative to precision.
        threshold: outputs above it count as 1, above 0 to 1; None for only the greatest of a sample.
        name, dtype: see `Metric`.
    """

    _totals = ("true_positives", "false_positives", "false_negatives", "intermediate_weights")

    def __init__(
        self,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str | None = "fbeta_score",
        dtype: str | None = None,
    ) -> None:
        super().__init__(dtype, name)
        if average not in (None, "micro", "macro", "weighted"):
            raise ConfigError(
                "Invalid `average` argument value. Expected one of: {None, 'micro', 'macro', 'weighted'}. "
                f"Received: average={average}"
            )
        for argument, value in (("beta", beta), ("threshold", threshold)):
            if not isinstance(value, float | None) or (argument == "beta" and value is None):
                raise ConfigError(
                    f"Invalid `{argument}` argument value. It should be a Python float. "
                    f"Received: {argument}={value} of type '{type(value)}'"
                )
        if beta <= 0:
            raise ConfigError(f"Invalid `beta` argument value. It should be > 0. Received: beta={beta}")
        if threshold is not None and not 0 < threshold <= 1:
            raise ConfigError(
                "Invalid `threshold` argument value. It should verify 0 < threshold <= 1. "
                f"Received: threshold={threshold}"
            )
        self.average, self.beta, self.threshold = average, beta, threshold

    def _shape(self, outputs: int) -> tuple[int, ...]:
        return () if self.average == "micro" else (outputs,)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch: one-hot or binary targets and outputs, (rows, classes), and weights (rows,) or None."""
        target, output = self._pair(y_true, y_pred)
        if self.threshold is None:
            greatest = ops.max(output, -1, keepdims=True)
            positive = ops.logical_and(output >= greatest, ops.absolute(output) > 1e-9)
        else:
            positive = output > self.threshold
        answer = ops.cast(positive, np.float64)
        counts = (answer * target, answer * (1 - target), (1 - answer) * target, target)
        for name, count in zip(self._totals, counts, strict=True):
            values = count if sample_weight is None else count * _each(sample_weight, count)
            self._total(name).assign_add(ops.sum(values, None if self.average == "micro" else 0))

    def result(self) -> Tensor:
        """Return the score, or that of each class."""
        right, wrong, missed, weights = (self._total(name) for name in self._totals)
        precision, recall = right / (right + wrong + EPSILON), right / (right + missed + EPSILON)
        score: Tensor = precision * recall / (self.beta**2 * precision + recall + EPSILON) * (1 + self.beta**2)
        if self.average == "weighted":
            return ops.sum(score * (weights / (ops.sum(weights) + EPSILON)))
        return score if self.average is None else ops.mean(score)

    def _get_config(self) -> dict[str, Any]:
        return super()._get_config() | {"average": self.average, "beta": self.beta, "threshold": self.threshold}


class F1Score(FBetaScore):
    """2 precision recall / (precision + recall): `FBetaScore` with beta 1."""

    def __init__(
        self,
        average: str | None = None,
        threshold: float | None = None,
        name: str | None = "f1_score",
        dtype: str | None = None,
    ) -> None:
        super().__init__(average, 1.0, threshold, name, dtype)

    def _get_config(self) -> dict[str, Any]:
        return {key: value for key, value in super()._get_config().items() if key != "beta"}


class R2Score(_OfColumns):
    """1 - sum of (y_true - y_pred)^2 / sum of (y_true - mean)^2: the fraction of variance that a regression explains.

    Args:
        class_aggregation: "uniform_average" over outputs, "variance_weighted_average", or None for each output's.
        num_regressors: number of inputs for the adjusted score; 0 for the plain score.
        name, dtype: see `Metric`.
    """

    _totals = ("squared_sum", "sum", "residual", "count")

    def __init__(
        self,
        class_aggregation: str | None = "uniform_average",
        num_regressors: int = 0,
        name: str | None = "r2_score",
        dtype: str | None = None,
    ) -> None:
        super().__init__(dtype, name)
        choices = (None, "uniform_average", "variance_weighted_average")
        if class_aggregation not in choices:
            raise ConfigError(
                f"Invalid value for argument `class_aggregation`. Expected one of {choices}. Received: "
                f"class_aggregation={class_aggregation}"
            )
        if num_regressors < 0:
            raise ConfigError(
                "Invalid value for argument `num_regressors`. Expected a value >= 0. Received: "
                f"num_regressors={num_regressors}"
            )
        self.class_aggregation, self.num_regressors = class_aggregation, int(num_regressors)
        self.num_samples = self.add_variable(name="num_samples")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch: targets and outputs (rows, outputs), and weights (rows,) or (rows, outputs), or None."""
        target, output = self._pair(y_true, y_pred)
        unit_weights = ops.ones_like(target)
        weights = unit_weights if sample_weight is None else unit_weights * _each(sample_weight, target)
        added = (ops.square(target) * weights, target * weights, ops.square(target - output) * weights, weights)
        for name, addend in zip(self._totals, added, strict=True):
            self._total(name).assign_add(ops.sum(addend, 0))
        self.num_samples.assign_add(math.prod(target.shape))

    def result(self) -> Tensor:
        """Return the score, or that of each output."""
        squares, total, residual, count = (self._total(name) for name in self._totals)
        variance = squares - total * (total / count)
        score: Tensor = 1 - residual / variance
        score = ops.where(ops.isinf(score), 0.0, score)
        if self.class_aggregation == "uniform_average":
            score = ops.mean(score)
        elif self.class_aggregation == "variance_weighted_average":
            score = ops.sum(variance * score) / ops.sum(variance)
        if not self.num_regressors:
            return score
        free = self.num_samples - 1
        rest = free - self.num_regressors
        adjusted: Tensor = 1 - (1 - score) * free / ops.where(rest > 0, rest, 1.0)
        return ops.where(rest > 0, adjusted, score)  # with too few samples, the plain score

    def _get_config(self) -> dict[str, Any]:
        config = {"class_aggregation": self.class_aggregation, "num_regressors": self.num_regressors}
        return super()._get_config() | config
