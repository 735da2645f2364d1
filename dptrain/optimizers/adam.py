"""Adam."""

import math
from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.optimizers.base import Optimizer, check_range


class Adam(Optimizer):
    """Adaptive moments; the formula and its source are at `Backend.adam`.

    Args:
        learning_rate: above 0.
        beta_1: decay of the first moment, 0 to below 1.
        beta_2: decay of the second moment, 0 to below 1.
        epsilon: added to the root of the second moment before its bias is corrected (PyTorch adds it after).

    Raises:
        ConfigError: an argument is out of range.
    """

    slots = ("momentum", "velocity")

    def __init__(
        self, learning_rate: float = 0.001, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7
    ) -> None:
        super().__init__(learning_rate)
        self.beta_1 = check_range("beta_1", beta_1, least=0.0, below=1.0)
        self.beta_2 = check_range("beta_2", beta_2, least=0.0, below=1.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)

    def apply(
        self, ops: Backend, params_P: Buffer, grads_P: Buffer, slots: dict[str, Buffer], weight: Buffer, iteration: int
    ) -> None:
        """One fused op; alpha = learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t)."""
        alpha = self.learning_rate * math.sqrt(1 - self.beta_2**iteration) / (1 - self.beta_1**iteration)
        ops.adam(
            params_P,
            grads_P,
            slots["momentum"],
            slots["velocity"],
            weight,
            alpha,
            self.beta_1,
            self.beta_2,
            self.epsilon,
        )

    def config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            "learning_rate": self.learning_rate,
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
        }
