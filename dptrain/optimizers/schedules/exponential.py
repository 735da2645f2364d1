"""Exponential decay."""

from dataclasses import dataclass
from typing import Any

from dptrain.ops import power
from dptrain.optimizers.schedules.base import LearningRateSchedule, check_steps, float64
from dptrain.program.tensor import Tensor


@dataclass(eq=False)
class ExponentialDecay(LearningRateSchedule):
    """rate(step) = initial_learning_rate decay_rate^(step / decay_steps).

    Args:
        initial_learning_rate: at step 0.
        decay_steps: steps in which the rate decays once; above 0 (else ConfigError).
        decay_rate: the factor of a decay.
        staircase: round step / decay_steps down.
        name: of the schedule.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str = "ExponentialDecay"

    def __post_init__(self) -> None:
        check_steps("decay_steps", self.decay_steps)

    def __call__(self, step: Any) -> Tensor:
        """Return the learning rate of a step (float64)."""
        decays = float64(step) / self.decay_steps
        return self.initial_learning_rate * power(self.decay_rate, decays // 1 if self.staircase else decays)
