"""Inverse time decay."""

from dataclasses import dataclass
from typing import Any

from dptrain.optimizers.schedules.base import LearningRateSchedule, check_steps, float64
from dptrain.program.tensor import Tensor


@dataclass(eq=False)
class InverseTimeDecay(LearningRateSchedule):
    """rate(step) = initial_learning_rate / (1 + decay_rate step / decay_steps).

    Args:
        initial_learning_rate: at step 0.
        decay_steps: steps after which decay_rate has been added to the divisor; above 0 (else ConfigError).
        decay_rate: see there.
        staircase: round step / decay_steps down.
        name: of the schedule.
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False
    name: str = "InverseTimeDecay"

    def __post_init__(self) -> None:
        check_steps("decay_steps", self.decay_steps)

    def __call__(self, step: Any) -> Tensor:
        """Return the learning rate of a step (float64)."""
        decays = float64(step) / self.decay_steps
        return self.initial_learning_rate / (1 + self.decay_rate * (decays // 1 if self.staircase else decays))
