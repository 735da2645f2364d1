"""Adam."""

from collections.abc import Iterable
from typing import Any

from dptrain.ops import maximum, power, sqrt
from dptrain.optimizers.base import Optimizer, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Moments(Optimizer):
    """Base of Adam and its variants: two decaying moments of the gradients, in the slots `_moments`.

    Args:
        learning_rate, options: see `Optimizer`.
        beta_1, beta_2: decay of the first and second moment, 0 to below 1.
        epsilon: added to the divisor.
    """

    _moments = ("momentum", "velocity")

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
        """Create both moments."""
        variables = list(variables)
        super().build(variables)
        self.add_optimizer_variables(variables, self._moments)


class Adam(Moments):
    """Adaptive moments.

        m = beta_1 m + (1 - beta_1) g
        v = beta_2 v + (1 - beta_2) g^2
        p -= alpha m / (sqrt(v) + epsilon)

    In update t = 1, 2, ... alpha = learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t). AMSGrad divides by the root of
    the highest v so far.

    Sources: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, in the form before section
    2.1; S. Reddi, S. Kale and S. Kumar, "On the convergence of Adam and beyond", ICLR 2018.

    Args:
        learning_rate, beta_1, beta_2, options: see `Moments`.
        epsilon: added to sqrt(v) before its bias is corrected (PyTorch adds it after).
        amsgrad: divide by the root of the highest second moment so far.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **options)
        self.amsgrad = bool(amsgrad)

    def build(self, variables: Iterable[Variable]) -> None:
        """Create both moments, and the maximum of the second."""
        variables = list(variables)
        super().build(variables)
        if self.amsgrad:
            self.add_optimizer_variables(variables, "velocity_hat")

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots = self._slots_of(variable)
        m, v = slots["momentum"], slots["velocity"]
        # In this form the update's ops share their operands: they become one loop, in place.
        m.assign_add((gradient - m) * (1 - self.beta_1))
        v.assign_add((gradient * gradient - v) * (1 - self.beta_2))
        if self.amsgrad:
            slots["velocity_hat"].assign(maximum(slots["velocity_hat"], v))
            v = slots["velocity_hat"]
        alpha = self._number(self._alpha, learning_rate, variable.dtype)
        variable.assign_sub(m / (sqrt(v) + self.epsilon) * alpha)

    def _alpha(self, learning_rate: Tensor) -> Tensor:
        t = float64(self.iterations + 1)
        return learning_rate * sqrt(1 - power(self.beta_2, t)) / (1 - power(self.beta_1, t))
