"""Adagrad."""

from collections.abc import Iterable
from typing import Any

from dptrain.initializers import Constant
from dptrain.ops import sqrt
from dptrain.optimizers.base import Optimizer, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Adagrad(Optimizer):
    """Gradients divided by the root of the sum of their squares: a += g^2, p -= learning_rate g / sqrt(a + epsilon).

    Source: J. Duchi, E. Hazan and Y. Singer, "Adaptive subgradient methods for online learning and stochastic
    optimization", JMLR 12 (2011).

    Args:
        learning_rate, options: see `Optimizer`; the paper's learning rate is 1.
        initial_accumulator_value: of a, 0 or above.
        epsilon: added under the root.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.initial_accumulator_value = check_range("initial_accumulator_value", initial_accumulator_value, least=0.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the sums of squares."""
        variables = list(variables)
        super().build(variables)
        self.add_optimizer_variables(variables, "accumulator", Constant(self.initial_accumulator_value))

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        a = self._slots_of(variable)["accumulator"]
        a.assign(a + gradient * gradient)
        rate = self._number(float64, learning_rate, variable.dtype)
        variable.assign_sub(gradient * rate / sqrt(a + self.epsilon))
