"""Stochastic gradient descent."""

from collections.abc import Iterable
from typing import Any

from dptrain.errors import ConfigError
from dptrain.optimizers.base import Optimizer, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class SGD(Optimizer):
    """Gradient descent, p -= learning_rate g, with optional momentum: m = momentum m - learning_rate g, p += m.

    Nesterov's momentum looks ahead: p += momentum m - learning_rate g.

    Args:
        learning_rate, options: see `Optimizer`.
        momentum: 0 to 1.
        nesterov: use Nesterov's momentum.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.momentum = check_range("momentum", momentum)
        if not 0 <= self.momentum <= 1:
            raise ConfigError(f"momentum = {momentum}: `momentum` must be a float between [0, 1].")
        self.nesterov = bool(nesterov)

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the momentum, if there is any."""
        variables = list(variables)
        super().build(variables)
        if self.momentum:
            self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        step = gradient * self._number(float64, learning_rate, variable.dtype)
        if not self.momentum:
            variable.assign_sub(step)
            return
        m = self._slots_of(variable)["momentum"]
        m.assign(m * self.momentum - step)
        variable.assign(variable + m * self.momentum - step if self.nesterov else variable + m)
