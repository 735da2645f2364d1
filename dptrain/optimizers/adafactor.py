"""Adafactor."""

from collections.abc import Iterable
from typing import Any

from dptrain.ops import expand_dims, maximum, mean, minimum, power, sqrt, square
from dptrain.optimizers.base import Optimizer, as_dtype, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Adafactor(Optimizer):
    """Adam's second moment as the product of a row and a column, and steps relative to the size of the weights.

        r = b r + (1 - b) mean over columns of (g^2 + epsilon_1), c likewise over rows, v = r c / mean of r
        u = g / sqrt(v);  p -= max(epsilon_2, rms(p)) rho u / max(1, rms(u) / clip_threshold)

    In update t = 1, 2, ... b = 1 - t^beta_2_decay and rho = min(learning_rate, 1 / sqrt(t)). Vectors have v alone.

    Source: N. Shazeer and M. Stern, "Adafactor", ICML 2018.

    Args:
        learning_rate, options: see `Optimizer`.
        beta_2_decay: below 0.
        epsilon_1: added to squared gradients.
        epsilon_2: least size that steps are relative to.
        clip_threshold: above which updates are scaled down.
        relative_step: for Keras' configurations only; steps are limited to 1 / sqrt(t) either way.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        beta_2_decay: float = -0.8,
        epsilon_1: float = 1e-30,
        epsilon_2: float = 1e-3,
        clip_threshold: float = 1.0,
        relative_step: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_2_decay = check_range("beta_2_decay", beta_2_decay)
        self.epsilon_1 = check_range("epsilon_1", epsilon_1, least=0.0)
        self.epsilon_2 = check_range("epsilon_2", epsilon_2, least=0.0)
        self.clip_threshold = check_range("clip_threshold", clip_threshold, above=0.0)
        self.relative_step = bool(relative_step)

    def build(self, variables: Iterable[Variable]) -> None:
        """Create means of rows and columns, and second moments; for vectors, as in Keras, two numbers that stay 0."""
        variables = list(variables)
        super().build(variables)
        for variable in variables:
            slots = self._slots[variable]
            if "velocity" in slots:
                continue
            is_vector = len(variable.shape) < 2
            shapes = ((), ()) if is_vector else (variable.shape[:-1], (*variable.shape[:-2], variable.shape[-1]))
            for name, shape in zip("rc", shapes, strict=True):
                slots[name] = self.add_variable(shape, dtype=variable.dtype, name=variable.name)
            self.add_optimizer_variables([variable], "velocity")

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots, dtype = self._slots_of(variable), variable.dtype
        decay = self._number(self._decay, learning_rate, dtype)
        step = self._number(self._rho, learning_rate, dtype) * maximum(_size(variable.value), self.epsilon_2)
        squares = square(gradient) + self.epsilon_1
        v = slots["velocity"]
        if len(variable.shape) < 2:
            v.assign(v * decay + squares * (1 - decay))
        else:
            r, c = slots["r"], slots["c"]
            r.assign(r * decay + mean(squares, -1) * (1 - decay))
            c.assign(c * decay + mean(squares, -2) * (1 - decay))
            v.assign(expand_dims(r / mean(r, -1, keepdims=True), -1) * expand_dims(c, -2))
        update = gradient / sqrt(v)
        variable.assign_sub(update * (step / maximum(_size(update) / self.clip_threshold, 1.0)))

    def _decay(self, learning_rate: Tensor) -> Tensor:
        return 1 - power(float64(self.iterations + 1), self.beta_2_decay)

    def _rho(self, learning_rate: Tensor) -> Tensor:
        return minimum(learning_rate, 1 / sqrt(float64(self.iterations + 1)))


def _size(x: Tensor) -> Tensor:
    """Return the root mean square."""
    return as_dtype(sqrt(mean(square(x))), x.dtype)
