"""Piecewise constant learning rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dptrain.errors import ConfigError
from dptrain.ops import where
from dptrain.optimizers.schedules.base import LearningRateSchedule, float64
from dptrain.program.tensor import Tensor


@dataclass(eq=False)
class PiecewiseConstantDecay(LearningRateSchedule):
    """values[0] up to and including step boundaries[0], then values[1] up to boundaries[1], ...

    Args:
        boundaries: last steps of all values but the last, rising (else ConfigError), rounded down.
        values: learning rates, one more than boundaries.
        name: of the schedule.
    """

    boundaries: Sequence[float]
    values: Sequence[float]
    name: str = "PiecewiseConstant"

    def __post_init__(self) -> None:
        if len(self.boundaries) != len(self.values) - 1:
            raise ConfigError(
                "The length of boundaries should be 1 less than the length of values. Received: "
                f"boundaries={self.boundaries} of length {len(self.boundaries)}, and values={self.values} of length "
                f"{len(self.values)}."
            )
        if list(self.boundaries) != sorted(self.boundaries):
            raise ConfigError(f"boundaries={self.boundaries}: expected increasing steps")

    def __call__(self, step: Any) -> Tensor:
        """Return the learning rate of a step (float64)."""
        now, rate = float64(step), float64(self.values[0])
        for boundary, value in zip(self.boundaries, self.values[1:], strict=True):
            rate = where(now > int(boundary), float64(value), rate)
        return rate
