"""Inverse time decay."""

import math
from typing import Any

from dptrain.optimizers.schedules.base import LearningRateSchedule, check_steps


class InverseTimeDecay(LearningRateSchedule):
    """rate(step) = initial_learning_rate / (1 + decay_rate step / decay_steps).

    Args:
        initial_learning_rate: at step 0.
        decay_steps: steps after which decay_rate is added to the divisor; above 0.
        decay_rate: see above.
        staircase: whether step / decay_steps is rounded down.
        name: of the schedule.

    Raises:
        ConfigError: decay_steps is not above 0.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
        name: str = "InverseTimeDecay",
    ) -> None:
        check_steps("decay_steps", decay_steps)
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = decay_steps
        self.decay_rate = decay_rate
        self.staircase = staircase
        self.name = name

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        decays = step / self.decay_steps
        return self.initial_learning_rate / (1 + self.decay_rate * (math.floor(decays) if self.staircase else decays))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "decay_steps": self.decay_steps,
            "decay_rate": self.decay_rate,
            "staircase": self.staircase,
            "name": self.name,
        }
