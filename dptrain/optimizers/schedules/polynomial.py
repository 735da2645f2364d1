"""Polynomial decay."""

from dataclasses import dataclass
from typing import Any

from dptrain.ops import maximum, minimum, power
from dptrain.optimizers.schedules.base import LearningRateSchedule, check_steps, float64
from dptrain.program.tensor import Tensor


@dataclass(eq=False)
class PolynomialDecay(LearningRateSchedule):
    """rate(step) = (initial_learning_rate - end_learning_rate) (1 - step / decay_steps)^power + end_learning_rate.

    Args:
        initial_learning_rate: at step 0.
        decay_steps: steps to the end; above 0 (else ConfigError).
        end_learning_rate: at the end, and after it.
        power: of the polynomial.
        cycle: at the end decay_steps becomes its next multiple, so that the rate rises again, but to less.
        name: of the schedule.
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    name: str = "PolynomialDecay"

    def __post_init__(self) -> None:
        check_steps("decay_steps", self.decay_steps)

    def __call__(self, step: Any) -> Tensor:
        """Return the learning rate of a step (float64)."""
        now, length = float64(step), float64(self.decay_steps)
        if self.cycle:
            length = length * maximum(1, -(-now / self.decay_steps // 1))
        left = 1 - minimum(now, length) / length
        return (self.initial_learning_rate - self.end_learning_rate) * power(left, self.power) + self.end_learning_rate
