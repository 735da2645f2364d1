"""Cosine decay with warmup."""

import math
from dataclasses import dataclass
from typing import Any

from dptrain.ops import cos, minimum, where
from dptrain.optimizers.schedules.base import LearningRateSchedule, check_steps, float64
from dptrain.program.tensor import Tensor


@dataclass(eq=False)
class CosineDecay(LearningRateSchedule):
    """Half a cosine from the initial learning rate to alpha times it, after an optional linear warmup.

    Sources: I. Loshchilov and F. Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017; for the
    warmup P. Goyal and others, "Accurate, large minibatch SGD", arXiv:1706.02677.

    Args:
        initial_learning_rate: at step 0.
        decay_steps: steps of the cosine without the warmup; above 0 (else ConfigError).
        alpha: final rate, as a fraction of where the cosine begins.
        name: of the schedule.
        warmup_target: where the warmup ends and the cosine begins; None for no warmup.
        warmup_steps: steps of the warmup.
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    name: str = "CosineDecay"
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_steps("decay_steps", self.decay_steps)

    def __call__(self, step: Any) -> Tensor:
        """Return the learning rate of a step (float64)."""
        t = float64(step)
        highest, initial = self.warmup_target, self.initial_learning_rate
        warming = t
        if highest is None:
            highest = initial
        else:
            t = t - self.warmup_steps
        cosine = 0.5 * (1 + cos(math.pi * (minimum(t, self.decay_steps) / self.decay_steps)))
        rate = highest * ((1 - self.alpha) * cosine + self.alpha)
        if self.warmup_target is None or not self.warmup_steps:
            return rate
        return where(t < 0, (highest - initial) * (warming / self.warmup_steps) + initial, rate)
