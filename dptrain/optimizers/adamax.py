"""Adamax."""

from collections.abc import Iterable
from typing import Any

from dptrain.ops import absolute, maximum, power
from dptrain.optimizers.base import Optimizer, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Adamax(Optimizer):
    """Adam with the greatest gradient in place of the root of a mean square.

        m = beta_1 m + (1 - beta_1) g
        u = max(beta_2 u, |g|)
        p -= learning_rate / (1 - beta_1^t) m / (u + epsilon)

    Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, section 7.1.

    Args:
        learning_rate: 0 or above, or a schedule.
        beta_1: decay of the first moment, 0 to below 1.
        beta_2: decay of the greatest gradient, 0 to below 1.
        epsilon: added to the divisor.
        options: by keyword, of `Optimizer`: weight_decay, clipnorm, name and so on.

    Raises:
        ConfigError: an argument is out of range, or not supported.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = check_range("beta_1", beta_1, least=0.0, below=1.0)
        self.beta_2 = check_range("beta_2", beta_2, least=0.0, below=1.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the moment and the greatest gradient."""
        variables = list(variables)
        super().build(variables)
        self.add_optimizer_variables(variables, ("momentum", "norm"))

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """As above."""
        slots = self.slots_of(variable)
        m, u = slots["momentum"], slots["norm"]
        m.assign_add((gradient - m) * (1 - self.beta_1))
        u.assign(maximum(u * self.beta_2, absolute(gradient)))
        variable.assign_sub(m * self.number(self._alpha, learning_rate, variable.dtype) / (u + self.epsilon))

    def _alpha(self, learning_rate: Tensor) -> Tensor:
        return learning_rate / (1 - power(self.beta_1, float64(self.iterations + 1)))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), "beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}
