"""Cosine decay with restarts."""

import math
from dataclasses import dataclass
from typing import Any

from dptrain.errors import ConfigError
from dptrain.ops import cos, log, power
from dptrain.optimizers.schedules.base import LearningRateSchedule, check_steps, float64
from dptrain.program.tensor import Tensor


@dataclass(eq=False)
class CosineDecayRestarts(LearningRateSchedule):
    """Half a cosine down to alpha times the learning rate, again and again: the i-th starts at m_mul^i times the rate.

    Source: I. Loshchilov and F. Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017.

    Args:
        initial_learning_rate: at step 0.
        first_decay_steps: steps of the first cosine; above 0 (else ConfigError).
        t_mul: the i-th cosine is t_mul^i times as long; at least 1 (else ConfigError, where Keras gives NaN).
        m_mul: the i-th cosine begins at m_mul^i times the initial learning rate.
        alpha: end of a cosine, as a fraction of the initial learning rate.
        name: of the schedule.
    """

    initial_learning_rate: float
    first_decay_steps: int
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0
    name: str = "SGDRDecay"

    def __post_init__(self) -> None:
        check_steps("first_decay_steps", self.first_decay_steps)
        if self.t_mul < 1:
            raise ConfigError(f"not supported: t_mul={self.t_mul} below 1: cosines would end after finitely many steps")

    def __call__(self, step: Any) -> Tensor:
        """Return the learning rate of a step (float64)."""
        t = float64(step) / self.first_decay_steps
        if self.t_mul == 1:
            restarts = t // 1
            t = t - restarts
        else:
            # 1e-9 exceeds the logarithms' rounding, which must not miss a restart.
            restarts = (log(1 - t * (1 - self.t_mul)) / math.log(self.t_mul) + 1e-9) // 1
            length = power(self.t_mul, restarts)
            t = (t - (1 - length) / (1 - self.t_mul)) / length
        cosine = 0.5 * power(self.m_mul, restarts) * (1 + cos(math.pi * t))
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)
