"""Lion."""

from collections.abc import Iterable
from typing import Any

from dptrain.errors import ConfigError
from dptrain.ops import sign
from dptrain.optimizers.base import Optimizer, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class Lion(Optimizer):
    """Steps of one size, in the direction of a mean's sign.

        p -= learning_rate sign(beta_1 m + (1 - beta_1) g)
        m = beta_2 m + (1 - beta_2) g

    Source: X. Chen and others, "Symbolic discovery of optimization algorithms", arXiv:2302.06675.

    Args:
        learning_rate, options: see `Optimizer`; a third to a tenth of AdamW's learning rate.
        beta_1: weight of the momentum in the direction, above 0 to 1.
        beta_2: decay of the momentum, 0 to below 1.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = check_range("beta_1", beta_1)
        if not 0 < self.beta_1 <= 1:
            raise ConfigError(
                "Argument `beta_1` must be in the [0, 1] range. Otherwise, the optimizer degenerates to SignSGD. "
                f"Received: beta_1={beta_1}."
            )
        self.beta_2 = check_range("beta_2", beta_2, least=0.0, below=1.0)

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the momentum."""
        variables = list(variables)
        super().build(variables)
        self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        m, rate = self._slots_of(variable)["momentum"], self._number(float64, learning_rate, variable.dtype)
        variable.assign_sub(sign(m + (gradient - m) * (1 - self.beta_1)) * rate)
        m.assign_add((gradient - m) * (1 - self.beta_2))
