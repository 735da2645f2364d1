"""RMSprop."""

from collections.abc import Iterable
from typing import Any

from dptrain.ops import sqrt
from dptrain.optimizers.base import Optimizer, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class RMSprop(Optimizer):
    """Gradients divided by the root of their running mean square.

        v = rho v + (1 - rho) g^2
        p -= learning_rate g / sqrt(v + epsilon)

    Centered, the squared running mean of the gradients is subtracted under the root; with momentum,
    m = momentum m + learning_rate g / sqrt(...), p -= m.

    Source: T. Tieleman and G. Hinton, "Lecture 6.5", Coursera 2012, as in Keras.

    Args:
        learning_rate, options: see `Optimizer`.
        rho: decay of the mean square, and of the mean, 0 to below 1.
        momentum: 0 or above.
        epsilon: added under the root.
        centered: subtract the squared mean of the gradients.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho = check_range("rho", rho, least=0.0, below=1.0)
        self.momentum = check_range("momentum", momentum, least=0.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)
        self.centered = bool(centered)

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the mean squares, and momentums and means if needed."""
        variables = list(variables)
        super().build(variables)
        for slot, is_needed in (
            ("velocity", True),
            ("momentum", self.momentum > 0),
            ("average_gradient", self.centered),
        ):
            if is_needed:
                self.add_optimizer_variables(variables, slot)

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots = self._slots_of(variable)
        v = slots["velocity"]
        v.assign_add((gradient * gradient - v) * (1 - self.rho))
        below = v + self.epsilon
        if self.centered:
            mean = slots["average_gradient"]
            mean.assign_add((gradient - mean) * (1 - self.rho))
            below = v - mean * mean + self.epsilon
        step = gradient / sqrt(below) * self._number(float64, learning_rate, variable.dtype)
        if self.momentum > 0:
            slots["momentum"].assign(slots["momentum"] * self.momentum + step)
            step = slots["momentum"].value
        variable.assign_sub(step)
