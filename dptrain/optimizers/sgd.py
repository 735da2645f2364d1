"""Stochastic gradient descent."""

from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.optimizers.base import Optimizer, check_range


class SGD(Optimizer):
    """Gradient descent with optional momentum; the formula is at `Backend.sgd`.

    Args:
        learning_rate: above 0.
        momentum: 0 to below 1.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0) -> None:
        super().__init__(learning_rate)
        self.momentum = check_range("momentum", momentum, least=0.0, below=1.0)
        self.slots = ("momentum",) if self.momentum else ()

    def apply(
        self, ops: Backend, params_P: Buffer, grads_P: Buffer, slots: dict[str, Buffer], weight: Buffer, iteration: int
    ) -> None:
        """One fused op."""
        ops.sgd(params_P, grads_P, slots.get("momentum"), weight, self.learning_rate, self.momentum)

    def config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"learning_rate": self.learning_rate, "momentum": self.momentum}
