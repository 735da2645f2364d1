"""Metrics based on true and false positives and negatives at one or several thresholds."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.losses.base import wide
from dptrain.losses.functions import pair
from dptrain.metrics.base import Metric, positive
from dptrain.program.dims import Dim
from dptrain.program.shapes import without_rows
from dptrain.program.tensor import Tensor, Variable

# Below all outputs except those dropped by `top_k` (Keras' NEG_INF).
_LOWEST = -1e10
Cell = Literal["true_positives", "false_positives", "true_negatives", "false_negatives"]


class _Confusion(Metric):
    """Weighted counts of some of the four kinds, (thresholds,) each; for arguments see `Precision`."""

    _takes_labels = False

    def __init__(
        self,
        kinds: Sequence[Cell],
        thresholds: Sequence[float],
        name: str | None,
        dtype: str | None,
        class_id: int | None = None,
        top_k: int | None = None,
    ) -> None:
        super().__init__(dtype, name)
        self.class_id, self._limits = class_id, np.array(thresholds, np.float64)
        self.top_k = None if top_k is None else positive(top_k, "top_k")
        self._counts: dict[Cell, Variable] = {
            kind: self.add_variable((len(self._limits),), name=kind) for kind in kinds
        }

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch: targets (non-zero is positive) shaped like outputs, (rows, ...), and weights or None."""
        target, output = pair(wide(y_true), wide(y_pred))
        if target.shape != output.shape:
            raise ConfigError(
                f"metric {self.name!r}: y_true and y_pred must have the same shape. Received: y_true.shape="
                f"{without_rows(target.shape)}, y_pred.shape={without_rows(output.shape)}"
            )
        rows = isinstance(output.shape[-1], Dim)
        if (output.ndim == 1 and self.class_id is not None) or (rows and self.top_k is not None):
            raise ConfigError(
                f"When {'top_k' if self.class_id is None else 'class_id'} is provided, y_pred must be a 2D array with "
                f"shape (num_samples, num_classes), found shape: {without_rows(output.shape)}"
            )
        if self.top_k is not None:
            output = ops.where(_among_highest(output, self.top_k), output, -np.inf)
        if self.class_id is not None:
            target, output = target[..., self.class_id], output[..., self.class_id]
        shape = (*output.shape, 1)
        positive = ops.reshape(ops.not_equal(target, 0), shape)
        above = ops.reshape(output, shape) > self._limits.astype(output.dtype)
        weights: Tensor | None = None
        if sample_weight is not None:
            weights = ops.cast(sample_weight, output.dtype)
            if weights.ndim > output.ndim:
                weights = ops.squeeze(weights, -1)
            weights = ops.reshape(weights, (*weights.shape, *(1,) * (len(shape) - weights.ndim)))
        for kind, count in self._counts.items():
            right, sign = kind.split("_")
            predicted = above if sign == "positives" else ops.logical_not(above)
            actual = positive if (right == "true") == (sign == "positives") else ops.logical_not(positive)
            both = ops.cast(ops.logical_and(predicted, actual), output.dtype)
            both = both if weights is None else both * weights
            if count.ndim == 2:  # per label
                count.assign_add(ops.transpose(ops.sum(both, 0)))
            else:
                count.assign_add(ops.sum(both, tuple(range(len(shape) - 1))))

    @property
    def true_positives(self) -> Variable:
        return self._count_of("true_positives")

    @property
    def false_positives(self) -> Variable:
        return self._count_of("false_positives")

    @property
    def true_negatives(self) -> Variable:
        return self._count_of("true_negatives")

    @property
    def false_negatives(self) -> Variable:
        return self._count_of("false_negatives")

    def _count_of(self, kind: Cell) -> Variable:
        if kind not in self._counts:
            raise AttributeError(f"metric {type(self).__name__} does not count {kind}")
        return self._counts[kind]

    def _squeezed(self, values: Tensor) -> Tensor:
        """Return a scalar if there is a single threshold."""
        return ops.reshape(values, ()) if len(self._limits) == 1 else values


def _among_highest(output: Tensor, k: int) -> Tensor:
    """Return whether each output, (rows, ..., classes), is among the k highest of its vector; earlier ones win ties."""
    classes = int(output.shape[-1])
    mine, other = ops.expand_dims(output, -1), ops.expand_dims(output, -2)
    before = np.tri(classes, k=-1, dtype=bool)  # [i, j]: j comes before i
    ahead = ops.logical_or(other > mine, ops.logical_and(ops.equal(other, mine), before))
    return ops.sum(ops.cast(ahead, "int32"), -1) < k


def _limits(thresholds: float | Sequence[float] | None, otherwise: float = 0.5) -> list[float]:
    """Return thresholds in [0, 1] as a list; `otherwise` if there are none."""
    if thresholds is None:
        return [otherwise]
    values: list[Any] = list(thresholds) if isinstance(thresholds, list | tuple) else [thresholds]
    outside = [value for value in values if value is None or not 0 <= float(value) <= 1]
    if outside or not values:
        raise ConfigError(f"Threshold values must be in [0, 1]. Received: {outside}")
    return [float(value) for value in values]


class _Count(_Confusion):
    """The count of one kind."""

    _kind: Cell

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__([type(self)._kind], _limits(thresholds), name, dtype)
        self.init_thresholds, self.thresholds = thresholds, self._limits.tolist()

    @property
    def accumulator(self) -> Variable:
        return self._counts[type(self)._kind]

    def result(self) -> Tensor:
        return self._squeezed(self._counts[type(self)._kind] * 1.0)

    def _get_config(self) -> dict[str, Any]:
        return super()._get_config() | {"thresholds": self.init_thresholds}


class TruePositives(_Count):
    """Outputs above the threshold, or each of several (see `Precision`), where the target is 1."""

    _kind: Cell = "true_positives"
    _direction = "up"


class FalsePositives(_Count):
    """Outputs above the threshold where the target is 0; see `TruePositives`."""

    _kind: Cell = "false_positives"
    _direction = "down"


class TrueNegatives(_Count):
    """Outputs at most the threshold where the target is 0; see `TruePositives`."""

    _kind: Cell = "true_negatives"
    _direction = "up"


class FalseNegatives(_Count):
    """Outputs at most the threshold where the target is 1; see `TruePositives`."""

    _kind: Cell = "false_negatives"
    _direction = "down"


class _Ratio(_Confusion):
    """True positives over true positives plus another count."""

    _direction = "up"
    _other: Cell

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        limits = _limits(thresholds, 0.5 if top_k is None else _LOWEST)
        super().__init__(["true_positives", type(self)._other], limits, name, dtype, class_id, top_k)
        self.init_thresholds, self.thresholds = thresholds, self._limits.tolist()

    def result(self) -> Tensor:
        """Return the ratio, 0 for nothing; (thresholds,) for several."""
        right, other = self._counts.values()
        return self._squeezed(ops.divide_no_nan(right, right + other))

    def _get_config(self) -> dict[str, Any]:
        config = {"thresholds": self.init_thresholds, "top_k": self.top_k, "class_id": self.class_id}
        return super()._get_config() | config


class Precision(_Ratio):
    """True positives over all predicted positives; 0 for nothing, (thresholds,) for several thresholds.

    Args:
        thresholds: outputs above are positive; one or several, in [0, 1]; None for 0.5, or with `top_k` for none.
        top_k: only the k highest outputs of a sample may be positive.
        class_id: the only output that counts; None for all.
        name, dtype: see `Metric`.
    """

    _other: Cell = "false_positives"


class Recall(_Ratio):
    """True positives over all positives; see `Precision`."""

    _other: Cell = "false_negatives"


_CELLS: tuple[Cell, ...] = ("true_positives", "true_negatives", "false_positives", "false_negatives")
_CURVES = ("PR", "ROC", "PRGAIN")
_SUMMATIONS = ("interpolation", "majoring", "minoring")


def _one_of(kind: str, value: Any, words: Sequence[str]) -> str:
    """Return one of Keras' words of AUC, in any case."""
    for word in words:
        if value in (word, word.lower(), word.capitalize()):
            return word
    raise ConfigError(f'Invalid AUC {kind} value: "{value}". Expected values are {list(words)}')


def _column(weights: Any, like: Tensor) -> Tensor:
    """Return weights with as many axes as the weighted values."""
    column = ops.cast(weights, like.dtype)
    return ops.reshape(column, (*column.shape, *(1,) * (like.ndim - column.ndim)))


class AUC(_Confusion):
    """The area under the ROC or the precision-recall curve, by the trapezoidal rule over thresholds.

    Args:
        num_thresholds: at least 2, evenly spaced in [0, 1].
        thresholds: these beside 0 and 1, instead of even ones.
        multi_label: average the areas of the labels, the columns of targets and outputs (rows, labels); by default all
            numbers together are a single label's.
        num_labels: for `multi_label`; by default as many as the first batch has.
        label_weights: (labels,) weights of the labels' areas in the mean, or without `multi_label` of the numbers.
        curve: "ROC", "PR" for precision and recall, or "PRGAIN" for their gains.
        summation_method: "interpolation"; "minoring" for the lower of two neighbours, "majoring" for the higher.
        name, dtype: see `Metric`.
        from_logits: outputs are logits.

    Source: J. Davis and M. Goadrich, "The relationship between precision-recall and ROC curves", ICML 2006, for "PR";
    P. Flach and M. Kull, "Precision-recall-gain curves", NeurIPS 2015, for "PRGAIN".
    """

    _direction = "up"

    def __init__(
        self,
        num_thresholds: int | None = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        dtype: str | None = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Any = None,
        from_logits: bool = False,
    ) -> None:
        if not multi_label and num_labels:
            raise ConfigError("`num_labels` is needed only when `multi_label` is True.")
        if thresholds is None and (num_thresholds is None or num_thresholds < 2):
            raise ConfigError(
                f"Argument `num_thresholds` must be an integer > 1. Received: num_thresholds={num_thresholds}"
            )
        self.curve = _one_of("curve", curve, _CURVES)
        self.summation_method = _one_of("summation method", summation_method, _SUMMATIONS)
        inner_limits = [] if thresholds is None else sorted(_limits(thresholds))
        inner = inner_limits if num_thresholds is None else np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        inner = inner if thresholds is None else inner_limits
        num_thresholds = len(inner) + 2
        super().__init__([] if multi_label else _CELLS, [-1e-7, *inner, 1 + 1e-7], name, dtype)
        self.num_thresholds, self.from_logits = num_thresholds, from_logits
        self._inner_limits = None if thresholds is None else inner_limits
        self.multi_label, self.num_labels = bool(multi_label), num_labels
        self.label_weights = None if label_weights is None else np.asarray(label_weights, np.float64)
        if multi_label and num_labels:
            self._count_labels(num_labels)

    def _count_labels(self, labels: int) -> None:
        """Make counts for each label."""
        self._counts = {kind: self.add_variable((len(self._limits), labels), name=kind) for kind in _CELLS}

    @property
    def thresholds(self) -> list[float]:
        """All thresholds, the first below 0 and the last above 1."""
        limits: list[float] = self._limits.tolist()
        return limits

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch, like `Precision`."""
        y_pred = ops.sigmoid(y_pred) if self.from_logits else y_pred
        if self.multi_label:
            shape = ops.shape(y_pred)
            if len(shape) != 2:
                raise ConfigError(
                    f"`y_pred` must have rank 2 when `multi_label=True`. Found rank {len(shape)}. Full shape received "
                    f"for `y_pred`: {without_rows(shape)}"
                )
            if not self._counts:
                self._count_labels(int(shape[1]))
        elif self.label_weights is not None:
            weights = ops.ones_like(wide(y_pred)) * self.label_weights
            sample_weight = weights if sample_weight is None else weights * _column(sample_weight, weights)
        super().update_state(y_true, y_pred, sample_weight)

    def result(self) -> Tensor:
        """Return the area, for several labels the mean."""
        if not self._counts:
            raise ConfigError(f"metric {self.name!r}: no result before the first batch")
        tp, tn, fp, fn = (self._counts[kind].value for kind in _CELLS)
        if (self.curve, self.summation_method) == ("PR", "interpolation"):
            areas = self._between_precision_and_recall(tp, fp, fn)
        else:
            x, y = self._coordinates(tp, tn, fp, fn)
            before, after = y[:-1], y[1:]
            if self.summation_method == "interpolation":
                heights = (before + after) * 0.5
            else:
                heights = (ops.minimum if self.summation_method == "minoring" else ops.maximum)(before, after)
            areas = (x[:-1] - x[1:]) * heights
        if not self.multi_label:
            return ops.sum(areas)
        of_labels = ops.sum(areas, 0)
        if self.label_weights is None:
            return ops.mean(of_labels)
        return ops.divide_no_nan(ops.sum(of_labels * self.label_weights), float(self.label_weights.sum()))

    def _coordinates(self, tp: Tensor, tn: Tensor, fp: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and y of the curve at the thresholds."""
        recall = ops.divide_no_nan(tp, tp + fn)
        if self.curve == "ROC":
            return ops.divide_no_nan(fp, fp + tn), recall
        if self.curve == "PR":
            return recall, ops.divide_no_nan(tp, tp + fp)
        odds = ops.divide_no_nan(tp + fn, tn + fp)
        nothing = ops.equal(tp, 0)
        recall_gain = ops.where(nothing, 0.0, 1 - odds * ops.divide_no_nan(fn, tp))
        precision_gain = ops.where(nothing, 1.0, 1 - odds * ops.divide_no_nan(fp, tp))
        return ops.maximum(recall_gain, 0), precision_gain

    def _between_precision_and_recall(self, tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
        """Interpolate: between two thresholds true positives grow linearly with all positives."""
        positives = tp + fp
        step, grown = tp[:-1] - tp[1:], positives[:-1] - positives[1:]
        slope = ops.divide_no_nan(step, ops.maximum(grown, 0))
        intercept = tp[1:] - slope * positives[1:]
        both_positive = ops.logical_and(positives[:-1] > 0, positives[1:] > 0)
        growth = ops.where(both_positive, ops.divide_no_nan(positives[:-1], ops.maximum(positives[1:], 0)), 1)
        area = slope * (step + intercept * ops.log(growth))
        return ops.divide_no_nan(area, ops.maximum(tp[1:] + fn[1:], 0))

    def _get_config(self) -> dict[str, Any]:
        config = {
            "num_thresholds": self.num_thresholds,
            "curve": self.curve,
            "summation_method": self.summation_method,
            "multi_label": self.multi_label,
            "num_labels": self.num_labels,
            "label_weights": None if self.label_weights is None else self.label_weights.tolist(),
            "from_logits": self.from_logits,
        }
        return (
            super()._get_config() | config | ({} if self._inner_limits is None else {"thresholds": self._inner_limits})
        )


class _AtLeast(_Confusion):
    """The best rate among thresholds where another rate is high enough; 0 if there is none."""

    _direction = "up"
    # The name of the minimum's argument, and the counts of the constrained and of the reported rate.
    _least: str
    _constraint: tuple[Cell, Cell]
    _best: tuple[Cell, Cell]

    def __init__(
        self,
        least: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        if not 0 <= least <= 1:
            raise ConfigError(f"Argument `{self._least}` must be in the range [0, 1]. Received: {self._least}={least}")
        if num_thresholds <= 0:
            raise ConfigError(
                f"Argument `num_thresholds` must be an integer > 0. Received: num_thresholds={num_thresholds}"
            )
        # The first is below an output of 0.
        inner = np.arange(1, num_thresholds) / max(num_thresholds - 1, 1)
        limits = [-1e-7, *inner] if num_thresholds > 1 else [0.5]
        kinds = dict.fromkeys((*self._constraint, *self._best))
        super().__init__(list(kinds), limits, name, dtype, class_id)
        self.value, self.num_thresholds = float(least), int(num_thresholds)
        setattr(self, self._least, self.value)  # under Keras' name

    def _rate(self, right: Cell, other: Cell) -> Tensor:
        count = self._counts[right].value
        return ops.divide_no_nan(count, count + self._counts[other].value)

    def result(self) -> Tensor:
        enough = self._rate(*self._constraint) >= self.value
        return ops.max(ops.where(enough, self._rate(*self._best), 0.0))

    def _get_config(self) -> dict[str, Any]:
        config = {"num_thresholds": self.num_thresholds, "class_id": self.class_id, self._least: self.value}
        return super()._get_config() | config


_SENSITIVITY: tuple[Cell, Cell] = ("true_positives", "false_negatives")
_SPECIFICITY: tuple[Cell, Cell] = ("true_negatives", "false_positives")
_PRECISION: tuple[Cell, Cell] = ("true_positives", "false_positives")


class SensitivityAtSpecificity(_AtLeast):
    """The best sensitivity (recall) at thresholds where the specificity is at least `specificity`, 0 to 1.

    The thresholds are `num_thresholds` even ones in [0, 1], 0.5 for 1; `class_id` selects an output, None all.
    """

    _least, _constraint, _best = "specificity", _SPECIFICITY, _SENSITIVITY

    def __init__(
        self,
        specificity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(specificity, num_thresholds, class_id, name, dtype)


class SpecificityAtSensitivity(_AtLeast):
    """The best specificity at thresholds with at least this sensitivity (recall); see `SensitivityAtSpecificity`."""

    _least, _constraint, _best = "sensitivity", _SENSITIVITY, _SPECIFICITY

    def __init__(
        self,
        sensitivity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(sensitivity, num_thresholds, class_id, name, dtype)


class PrecisionAtRecall(_AtLeast):
    """The best precision at thresholds with at least this recall; see `SensitivityAtSpecificity`."""

    _least, _constraint, _best = "recall", _SENSITIVITY, _PRECISION

    def __init__(
        self,
        recall: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(recall, num_thresholds, class_id, name, dtype)


class RecallAtPrecision(_AtLeast):
    """The best recall at thresholds with at least this precision; see `SensitivityAtSpecificity`."""

    _least, _constraint, _best = "precision", _PRECISION, _SENSITIVITY

    def __init__(
        self,
        precision: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(precision, num_thresholds, class_id, name, dtype)
