"""Losses of how far outputs are from target values, (rows, *output_shape); means over a sample's outputs."""

from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError
from dptrain.losses.base import Loss
from dptrain.metrics import Batch


class _Pointwise(Loss):
    """A loss that is one of the errors of `Backend.pointwise_loss`."""

    kind: str
    delta = 0.0

    def write(
        self, ops: Backend, batch: Batch, logits: bool, dy: Buffer | None, values_B: Buffer, correct_B: Buffer | None
    ) -> None:
        """One op."""
        dy = None if dy is None else dy.reshape(batch.rows, -1)
        ops.pointwise_loss(self.kind, self.delta, *batch.flat, 1.0, 0.0, batch.weights, dy, values_B)


class MeanSquaredError(_Pointwise):
    """Mean of (y_pred - target)^2."""

    kind = "squared"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "mean_squared_error",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)


class MeanAbsoluteError(_Pointwise):
    """Mean of |y_pred - target|, whose gradient is 0 where they are equal."""

    kind = "absolute"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "mean_absolute_error",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)


class Huber(_Pointwise):
    """Mean of e^2 / 2 where |e| <= delta, else delta |e| - delta^2 / 2, of e = y_pred - target.

    Source: P. Huber, "Robust estimation of a location parameter", Annals of Mathematical Statistics 35 (1964).

    Args:
        delta: where the squared error becomes an absolute one, above 0.
        reduction: as `Loss`.
        name: as `Loss`.
        dtype: as `Loss`.

    Raises:
        ConfigError: delta is not above 0.
    """

    kind = "huber"

    def __init__(
        self,
        delta: float = 1.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "huber_loss",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        if not delta > 0:
            raise ConfigError(f"delta = {delta}: expected a number above 0")
        self.delta = float(delta)

    def config(self) -> dict[str, Any]:
        """Return name, reduction and delta (which Keras 3.15 takes, but forgets to write)."""
        return super().config() | {"delta": self.delta}
