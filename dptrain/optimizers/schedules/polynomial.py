"""Polynomial decay."""

import math
from dataclasses import dataclass

from dptrain.optimizers.schedules.base import LearningRateSchedule, check_steps


@dataclass(eq=False)
class PolynomialDecay(LearningRateSchedule):
    """rate(step) = (initial_learning_rate - end_learning_rate) (1 - step / decay_steps)^power + end_learning_rate.

    Args:
        initial_learning_rate: at step 0.
        decay_steps: steps to the end; above 0.
        end_learning_rate: at the end, and after it.
        power: of the polynomial.
        cycle: at the end decay_steps becomes the next multiple of itself, so that the rate rises again, to less.
        name: of the schedule.

    Raises:
        ConfigError: decay_steps is not above 0.
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    name: str = "PolynomialDecay"

    def __post_init__(self) -> None:
        check_steps("decay_steps", self.decay_steps)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        length = self.decay_steps * (max(1, math.ceil(step / self.decay_steps)) if self.cycle else 1)
        left = 1 - min(step, length) / length
        return float((self.initial_learning_rate - self.end_learning_rate) * left**self.power + self.end_learning_rate)
