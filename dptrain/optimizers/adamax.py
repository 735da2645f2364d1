"""Adamax."""

from dptrain.ops import absolute, maximum, power
from dptrain.optimizers.adam import Moments
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Adamax(Moments):
    """Adam with the greatest gradient in place of the root of a mean square; arguments as in `Moments`.

        m = beta_1 m + (1 - beta_1) g
        u = max(beta_2 u, |g|)
        p -= learning_rate / (1 - beta_1^t) m / (u + epsilon)

    Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, section 7.1.
    """

    _moments = ("momentum", "norm")

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots = self._slots_of(variable)
        m, u = slots["momentum"], slots["norm"]
        m.assign_add((gradient - m) * (1 - self.beta_1))
        u.assign(maximum(u * self.beta_2, absolute(gradient)))
        variable.assign_sub(m * self._number(self._alpha, learning_rate, variable.dtype) / (u + self.epsilon))

    def _alpha(self, learning_rate: Tensor) -> Tensor:
        return learning_rate / (1 - power(self.beta_1, float64(self.iterations + 1)))
