"""Metrics that count right answers."""

from typing import Any

import numpy as np

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError
from dptrain.metrics.base import Batch, Mean


class Accuracy(Mean):
    """Mean over a sample's outputs of whether the output equals the target."""

    direction = "up"

    def __init__(self, name: str | None = "accuracy", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """Compare exactly."""
        ops.pointwise_loss("equal", 0.0, *batch.flat, 1.0, 0.0, None, None, values_B)


class BinaryAccuracy(Mean):
    """Mean over a sample's outputs of whether output > threshold just where the target is 1."""

    direction = "up"

    def __init__(self, name: str | None = "binary_accuracy", dtype: str | None = None, threshold: float = 0.5) -> None:
        super().__init__(name, dtype)
        self.threshold = threshold

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """Compare after cutting at the threshold."""
        ops.pointwise_loss("same_side", self.threshold, *batch.flat, 1.0, 0.0, None, None, values_B)

    def config(self) -> dict[str, Any]:
        """Return name, dtype and threshold."""
        return super().config() | {"threshold": self.threshold}


class SparseCategoricalAccuracy(Mean):
    """Fraction of samples whose highest output, the first of equals, is at the label."""

    direction = "up"

    takes_labels = True
    takes_logits = True

    def __init__(self, name: str | None = "sparse_categorical_accuracy", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """Compare the highest's place with the label."""
        ops.top1_correct(batch.y_pred, batch.target, values_B)


class CategoricalAccuracy(Mean):
    """Fraction of samples whose highest output is where the highest target value is."""

    direction = "up"

    takes_logits = True

    def __init__(self, name: str | None = "categorical_accuracy", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """Compare the highest's places."""
        ops.top1_correct(batch.y_pred, _labels(ops, batch), values_B)


class SparseTopKCategoricalAccuracy(Mean):
    """Fraction of samples that have fewer than k outputs above that at the label.

    Args:
        k: at least 1.
        name: its key in logs.
        dtype: as `Metric`.
        from_sorted_ids: not supported.

    Raises:
        ConfigError: k is out of range, or from_sorted_ids is asked for.
    """

    direction = "up"

    takes_labels = True

    def __init__(
        self,
        k: int = 5,
        name: str | None = "sparse_top_k_categorical_accuracy",
        dtype: str | None = None,
        from_sorted_ids: bool = False,
    ) -> None:
        super().__init__(name, dtype)
        self.k = _positive(k)
        if from_sorted_ids:
            raise ConfigError("not supported: from_sorted_ids=True")

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """Count the higher outputs."""
        ops.label_in_top(batch.y_pred, batch.target, self.k, values_B)

    def config(self) -> dict[str, Any]:
        """Return name, dtype and k."""
        return super().config() | {"k": self.k}


class TopKCategoricalAccuracy(Mean):
    """Fraction of samples that have fewer than k outputs above that where the highest target value is.

    Args:
        k: at least 1.
        name: its key in logs.
        dtype: as `Metric`.

    Raises:
        ConfigError: k is out of range.
    """

    direction = "up"

    def __init__(self, k: int = 5, name: str | None = "top_k_categorical_accuracy", dtype: str | None = None) -> None:
        super().__init__(name, dtype)
        self.k = _positive(k)

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """Count the higher outputs."""
        ops.label_in_top(batch.y_pred, _labels(ops, batch), self.k, values_B)

    def config(self) -> dict[str, Any]:
        """Return name, dtype and k."""
        return super().config() | {"k": self.k}


def _labels(ops: Backend, batch: Batch) -> Buffer:
    """Return the place of each target row's highest value, (rows,)."""
    labels_B = batch.scratch("labels", (), np.int64)
    ops.highest(batch.target, labels_B)
    return labels_B


def _positive(k: int) -> int:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigError(f"k = {k!r}: expected an integer >= 1")
    return k
