"""LAMB."""

from dptrain.ops import power, sqrt, square, where
from dptrain.ops import sum as summed
from dptrain.optimizers.adam import Moments
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Lamb(Moments):
    """Adam with steps as long as the variable itself, times the learning rate; arguments as in `Moments`.

        u = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon);  p -= learning_rate |p| / |u| u

    Where p or u is 0 everywhere the factor |p| / |u| is 1.

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020.
    """

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots, dtype = self._slots_of(variable), variable.dtype
        m, v = slots["momentum"], slots["velocity"]
        m.assign_add((gradient - m) * (1 - self.beta_1))
        v.assign_add((gradient * gradient - v) * (1 - self.beta_2))
        of_m, of_v = (self._number(compute, learning_rate, dtype) for compute in (self._of_momentum, self._of_velocity))
        update = m * of_m / (sqrt(v * of_v) + self.epsilon)
        norm, its = sqrt(summed(square(variable.value))), sqrt(summed(square(update)))
        ratio = where(norm > 0, where(its > 0, norm / its, 1.0), 1.0)
        variable.assign_sub(update * (ratio * self._number(float64, learning_rate, dtype)))

    def _of_momentum(self, learning_rate: Tensor) -> Tensor:
        return 1 / (1 - power(self.beta_1, float64(self.iterations + 1)))

    def _of_velocity(self, learning_rate: Tensor) -> Tensor:
        return 1 / (1 - power(self.beta_2, float64(self.iterations + 1)))
