"""Polynomial decay."""

import math
from typing import Any

from dptrain.optimizers.schedules.base import LearningRateSchedule, check_steps


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

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        name: str = "PolynomialDecay",
    ) -> None:
        check_steps("decay_steps", decay_steps)
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = decay_steps
        self.end_learning_rate = end_learning_rate
        self.power = power
        self.cycle = cycle
        self.name = name

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        length = self.decay_steps * (max(1, math.ceil(step / self.decay_steps)) if self.cycle else 1)
        left = 1 - min(step, length) / length
        return float((self.initial_learning_rate - self.end_learning_rate) * left**self.power + self.end_learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "decay_steps": self.decay_steps,
            "end_learning_rate": self.end_learning_rate,
            "power": self.power,
            "cycle": self.cycle,
            "name": self.name,
        }
