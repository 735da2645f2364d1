"""Adadelta."""

from collections.abc import Iterable
from typing import Any

from dptrain.ops import sqrt
from dptrain.optimizers.base import Optimizer, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Adadelta(Optimizer):
    """Steps in the parameters' units: running mean squares of gradients, a, and of steps, d.

        a = rho a + (1 - rho) g^2
        step = g sqrt(d + epsilon) / sqrt(a + epsilon)
        d = rho d + (1 - rho) step^2
        p -= learning_rate step

    Source: M. Zeiler, "ADADELTA: an adaptive learning rate method", arXiv:1212.5701.

    Args:
        learning_rate, options: see `Optimizer`; the paper's learning rate is 1.
        rho: decay of the mean squares, 0 to below 1.
        epsilon: added under the roots.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho = check_range("rho", rho, least=0.0, below=1.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)

    def build(self, variables: Iterable[Variable]) -> None:
        """Create both mean squares."""
        variables = list(variables)
        super().build(variables)
        self.add_optimizer_variables(variables, ("accumulated_grad", "accumulated_delta_var"))

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots, rho = self._slots_of(variable), self.rho
        a, d = slots["accumulated_grad"], slots["accumulated_delta_var"]
        a.assign_add((gradient * gradient - a) * (1 - rho))
        step = gradient * sqrt(d + self.epsilon) / sqrt(a + self.epsilon)
        d.assign_add((step * step - d) * (1 - rho))
        variable.assign_sub(step * self._number(float64, learning_rate, variable.dtype))
