"""RMSprop."""

from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.optimizers.base import Optimizer, check_range


class RMSprop(Optimizer):
    """Gradients divided by the root of their running mean square; the formula is at `Backend.rmsprop`.

    Source: T. Tieleman and G. Hinton, "Lecture 6.5", Coursera 2012, as Keras has it.

    Args:
        learning_rate: above 0.
        rho: decay of the mean square, 0 to below 1.
        epsilon: added under the root.

    Raises:
        ConfigError: an argument is out of range.
    """

    slots = ("velocity",)

    def __init__(self, learning_rate: float = 0.001, rho: float = 0.9, epsilon: float = 1e-7) -> None:
        super().__init__(learning_rate)
        self.rho = check_range("rho", rho, least=0.0, below=1.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)

    def apply(
        self, ops: Backend, params_P: Buffer, grads_P: Buffer, slots: dict[str, Buffer], weight: Buffer, iteration: int
    ) -> None:
        """One fused op."""
        ops.rmsprop(params_P, grads_P, slots["velocity"], weight, self.learning_rate, self.rho, self.epsilon)

    def config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"learning_rate": self.learning_rate, "rho": self.rho, "epsilon": self.epsilon}
