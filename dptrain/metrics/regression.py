"""Metrics of how far outputs are from targets."""

from dptrain.backend.base import Backend, Buffer
from dptrain.metrics.base import Batch, Mean


class MeanSquaredError(Mean):
    """Mean over a sample's outputs of (y_pred - target)^2."""

    direction = "down"

    def __init__(self, name: str | None = "mean_squared_error", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """One op."""
        ops.pointwise_loss("squared", 0.0, *batch.flat, 1.0, 0.0, None, None, values_B)


class MeanAbsoluteError(Mean):
    """Mean over a sample's outputs of |y_pred - target|."""

    direction = "down"

    def __init__(self, name: str | None = "mean_absolute_error", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """One op."""
        ops.pointwise_loss("absolute", 0.0, *batch.flat, 1.0, 0.0, None, None, values_B)
