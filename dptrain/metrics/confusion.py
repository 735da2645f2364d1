"""Metrics made of true and false positives and negatives."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer, RowSum
from dptrain.errors import ConfigError
from dptrain.metrics.base import Batch, Metric, ratio


class _Ratio(Metric):
    """True positives over true positives and another count; the state is these two.

    Args:
        thresholds: outputs above it are taken for positive, in [0, 1]; None for 0.5.
        top_k: not supported.
        class_id: not supported.
        name: its key in logs.
        dtype: as `Metric`.

    Raises:
        ConfigError: an argument is out of range or not supported.
    """

    direction = "up"

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, dtype)
        for argument, value in (("top_k", top_k), ("class_id", class_id)):
            if value is not None:
                raise ConfigError(f"not supported: {argument}={value!r} of metric {type(self).__name__}")
        self.thresholds = thresholds
        given: list[Any] = [0.5] if thresholds is None else [thresholds]
        if isinstance(thresholds, list | tuple):
            given = list(thresholds)
        if len(given) != 1:
            raise ConfigError(f"not supported: thresholds={thresholds!r}, several in one metric; use one metric each")
        self._threshold = float(given[0])
        if not 0 <= self._threshold <= 1:
            raise ConfigError(f"Threshold values must be in [0, 1]. Received: {given}")

    @abstractmethod
    def _other(self, predicted_B: Buffer, missed_B: Buffer) -> Buffer:
        """Return the count that stands below the line beside the true positives."""

    def update(self, ops: Backend, batch: Batch, state: Buffer) -> None:
        """Count in each sample's outputs; a sample's weight counts for each of them."""
        both_B, predicted_B, missed_B = (batch.scratch(name) for name in ("both", "predicted", "missed"))
        ops.confusion(*batch.flat, self._threshold, both_B, predicted_B, missed_B)
        ops.sum_rows(
            RowSum(both_B, batch.weights, state[:1]),
            RowSum(self._other(predicted_B, missed_B), batch.weights, state[1:2]),
        )

    def result(self, state: npt.NDArray[np.float64], rows: float) -> float:
        """Return the ratio, 0 of nothing."""
        return ratio(state[0], state[0] + state[1])

    def config(self) -> dict[str, Any]:
        """Return name, dtype and thresholds; top_k and class_id are None."""
        return super().config() | {"thresholds": self.thresholds, "top_k": None, "class_id": None}


class Precision(_Ratio):
    """True positives over all that were taken for positive."""

    def _other(self, predicted_B: Buffer, missed_B: Buffer) -> Buffer:
        return predicted_B


class Recall(_Ratio):
    """True positives over all that are positive."""

    def _other(self, predicted_B: Buffer, missed_B: Buffer) -> Buffer:
        return missed_B
