"""Nadam."""

from collections.abc import Iterable

import numpy as np

from dptrain.ops import power, sqrt
from dptrain.optimizers.adam import Moments
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Nadam(Moments):
    """Adam with Nesterov's momentum, whose decay warms up: u_t = beta_1 (1 - 0.5 0.96^t), U_t = u_1 u_2 ... u_t.

        m = beta_1 m + (1 - beta_1) g
        v = beta_2 v + (1 - beta_2) g^2
        p -= learning_rate (u_{t+1} m / (1 - U_{t+1}) + (1 - u_t) g / (1 - U_t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)

    Arguments as in `Moments`. Source: T. Dozat, "Incorporating Nesterov momentum into Adam", ICLR 2016 workshop.
    """

    _u_product: Variable | None = None

    def build(self, variables: Iterable[Variable]) -> None:
        """Create both moments, and U, which all variables share."""
        super().build(variables)
        if self._u_product is None:
            self._u_product = self.add_variable((), "ones", np.float64, name="u_product")

    def _update_all(self, grads: list[Tensor], variables: list[Variable], learning_rate: Tensor) -> None:
        """Update U first."""
        assert self._u_product is not None
        self._u_product.assign(self._u_product * self._u(1))
        super()._update_all(grads, variables, learning_rate)

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots, dtype = self._slots_of(variable), variable.dtype
        m, v = slots["momentum"], slots["velocity"]
        m.assign_add((gradient - m) * (1 - self.beta_1))
        v.assign_add((gradient * gradient - v) * (1 - self.beta_2))
        of_m = self._number(self._of_momentum, learning_rate, dtype)
        of_g = self._number(self._of_gradient, learning_rate, dtype)
        of_v = self._number(self._of_velocity, learning_rate, dtype)
        variable.assign_sub((m * of_m + gradient * of_g) / (sqrt(v * of_v) + self.epsilon))

    def _u(self, ahead: int) -> Tensor:
        return self.beta_1 * (1 - 0.5 * power(0.96, float64(self.iterations + ahead)))

    def _of_momentum(self, learning_rate: Tensor) -> Tensor:
        return learning_rate * self._u(2) / (1 - self._u_product * self._u(2))

    def _of_gradient(self, learning_rate: Tensor) -> Tensor:
        return learning_rate * (1 - self._u(1)) / (1 - float64(self._u_product))

    def _of_velocity(self, learning_rate: Tensor) -> Tensor:
        return 1 / (1 - power(self.beta_2, float64(self.iterations + 1)))
