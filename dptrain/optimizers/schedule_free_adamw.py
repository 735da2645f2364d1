"""AdamW without a learning-rate schedule."""

from collections.abc import Iterable
from typing import Any

from dptrain.errors import ConfigError
from dptrain.ops import minimum, power, sqrt
from dptrain.optimizers.base import Optimizer, check_range
from dptrain.optimizers.schedules import LearningRateSchedule
from dptrain.optimizers.schedules.base import float64
from dptrain.program.tensor import Tensor, Variable


class ScheduleFreeAdamW(Optimizer):
    """AdamW without a schedule: RMSprop's steps from z, and weights p between z and the mean x of all z.

        v = beta_2 v + (1 - beta_2) g^2
        z -= rate g / (sqrt(v / (1 - beta_2^t)) + epsilon)
        x = (1 - 1 / t) x + z / t
        p = (1 - beta_1) z + beta_1 x

    In update t = 1, 2, ... the rate is learning_rate min(1, t / warmup_steps). x follows from p and z, and is not
    kept. At first both are p, as it is when the optimizer is built. As in Keras, a weight decay shrinks p, and models
    are evaluated with p.

    Source: A. Defazio et al., "The road less scheduled", NeurIPS 2024.

    Args:
        learning_rate, options: see `Optimizer`.
        beta_1: weight of the mean in p, 0 to below 1.
        beta_2: decay of the second moment, 0 to below 1.
        epsilon: added to the root of the second moment.
        warmup_steps: updates in which the rate grows to the learning rate; 0 for none.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.0025,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        warmup_steps: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = check_range("beta_1", beta_1, least=0.0, below=1.0)
        self.beta_2 = check_range("beta_2", beta_2, least=0.0, below=1.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ConfigError(f"warmup_steps = {warmup_steps!r}: expected an integer of at least 0")
        self.warmup_steps = warmup_steps

    def build(self, variables: Iterable[Variable]) -> None:
        """Create z, Keras' momentum, and the second moment."""
        variables = list(variables)
        super().build(variables)
        for variable in variables:
            slots = self._slots[variable]
            if "momentum" not in slots:
                first = "zeros" if self._drafts else variable._snapshot()
                slots["momentum"] = self.add_variable_from_reference(variable, "momentum", first)
            self.add_optimizer_variables([variable], "velocity")

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Apply the update rule."""
        slots, dtype = self._slots_of(variable), variable.dtype
        z, v = slots["momentum"], slots["velocity"]
        of_mean = self._number(self._of_mean, learning_rate, dtype)
        # beta_1 x before the update.
        mean = variable - z * (1 - self.beta_1)
        v.assign_add((gradient * gradient - v) * (1 - self.beta_2))
        divisor = sqrt(v / self._number(self._correction, learning_rate, dtype)) + self.epsilon
        z.assign_sub(gradient / divisor * self._number(self._step, learning_rate, dtype))
        variable.assign(mean * of_mean + z * self._number(self._of_z, learning_rate, dtype))

    def _step(self, learning_rate: Tensor) -> Tensor:
        if not self.warmup_steps:
            return learning_rate
        return learning_rate * minimum(float64(self.iterations + 1) / self.warmup_steps, 1.0)

    def _correction(self, learning_rate: Tensor) -> Tensor:
        return 1 - power(self.beta_2, float64(self.iterations + 1))

    def _of_mean(self, learning_rate: Tensor) -> Tensor:
        return 1 - 1 / float64(self.iterations + 1)

    def _of_z(self, learning_rate: Tensor) -> Tensor:
        return 1 - self.beta_1 * self._of_mean(learning_rate)
