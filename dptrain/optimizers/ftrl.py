"""FTRL."""

from collections.abc import Iterable
from typing import Any

from dptrain.errors import ConfigError
from dptrain.initializers import Constant
from dptrain.ops import clip, power, square
from dptrain.optimizers.base import Optimizer, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Ftrl(Optimizer):
    """Follow the regularized leader: an L1 penalty sets weights to exactly 0.

        g' = g + 2 l2_shrinkage p;  n' = n + g^2;  z += g' - (n'^-k - n^-k) / learning_rate p
        p = (clip(z, -l1, l1) - z) / (n'^-k / learning_rate + 2 (l2 + beta / (2 learning_rate)))

    with k the `learning_rate_power`.

    Source: H. McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013.

    Args:
        learning_rate, options: see `Optimizer`.
        learning_rate_power: 0 or below; 0 for a constant learning rate.
        initial_accumulator_value: of n, 0 or above.
        l1_regularization_strength, l2_regularization_strength: 0 or above.
        l2_shrinkage_regularization_strength: 0 or above; a penalty on the size of steps.
        beta: the paper's.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        if learning_rate_power > 0:
            raise ConfigError(
                "`learning_rate_power` needs to be negative or zero. Received: "
                f"learning_rate_power={learning_rate_power}."
            )
        self.learning_rate_power = check_range("learning_rate_power", learning_rate_power)
        self.initial_accumulator_value = _not_negative("initial_accumulator_value", initial_accumulator_value)
        self.l1_regularization_strength = _not_negative("l1_regularization_strength", l1_regularization_strength)
        self.l2_regularization_strength = _not_negative("l2_regularization_strength", l2_regularization_strength)
        self.l2_shrinkage_regularization_strength = _not_negative(
            "l2_shrinkage_regularization_strength", l2_shrinkage_regularization_strength
        )
        self.beta = check_range("beta", beta)

    def build(self, variables: Iterable[Variable]) -> None:
        """Create n and z."""
        variables = list(variables)
        super().build(variables)
        for variable in variables:
            self.add_optimizer_variables([variable], "accumulator", Constant(self.initial_accumulator_value))
            self.add_optimizer_variables([variable], "linear")

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots = self._slots_of(variable)
        n, z = slots["accumulator"], slots["linear"]
        rate = self._number(float64, learning_rate, variable.dtype)
        total = n + square(gradient)
        old, new = power(n.value, -self.learning_rate_power), power(total, -self.learning_rate_power)
        shrunk = gradient + variable * (2 * self.l2_shrinkage_regularization_strength)
        z.assign_add(shrunk - (new - old) / rate * variable)
        below = new / rate + 2 * (self.l2_regularization_strength + self.beta / (rate * 2))
        l1 = self.l1_regularization_strength
        variable.assign((clip(z, -l1, l1) - z) / below)
        n.assign(total)


def _not_negative(name: str, value: float) -> float:
    if value < 0:
        raise ConfigError(f"`{name}` needs to be positive or zero. Received: {name}={value}.")
    return check_range(name, value)
