"""RMSprop."""

from typing import Any

from dptrain.optimizers.base import Optimizer, Update, check_range
from dptrain.optimizers.schedules import LearningRateSchedule


class RMSprop(Optimizer):
    """Gradients divided by the root of their running mean square; the formula is at `Backend.rmsprop`.

    Centered, the running mean of the gradients, squared, is subtracted under the root; with momentum,
    m = momentum m + learning_rate g / sqrt(...), p -= m.

    Source: T. Tieleman and G. Hinton, "Lecture 6.5", Coursera 2012, as Keras has it.

    Args:
        learning_rate: 0 or above, or a schedule.
        rho: decay of the mean square, and of the mean, 0 to below 1.
        momentum: 0 or above.
        epsilon: added under the root.
        centered: as above.
        options: by keyword, of `Optimizer`: weight_decay, clipnorm, name and so on.

    Raises:
        ConfigError: an argument is out of range, or not supported.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho = check_range("rho", rho, least=0.0, below=1.0)
        self.momentum = check_range("momentum", momentum, least=0.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)
        self.centered = bool(centered)
        optional = {"momentum": self.momentum > 0, "average_gradient": self.centered}
        self.slots = ("velocity", *(slot for slot, wanted in optional.items() if wanted))
        self.divides = len(self.slots) == 1
        self.scratch = 0 if self.divides else 1

    def update_step(self, update: Update) -> None:
        """One fused op, but for momentum and means."""
        ops, p_P, g_P, rate = update.ops, update.params, update.grads, update.learning_rate
        v_P = update.slots["velocity"]
        if self.divides:
            ops.rmsprop(p_P, g_P, v_P, update.divisor, rate, self.rho, self.epsilon)
            return
        (root_P,) = update.scratch
        ops.multiply(g_P, g_P, root_P)
        ops.axpby(1 - self.rho, root_P, self.rho, v_P, v_P)
        if self.centered:
            mean_P = update.slots["average_gradient"]
            ops.axpby(1 - self.rho, g_P, self.rho, mean_P, mean_P)
            ops.multiply(mean_P, mean_P, root_P)
            ops.axpby(1, v_P, -1, root_P, root_P)
            ops.affine(root_P, 1, self.epsilon, root_P)
        else:
            ops.affine(v_P, 1, self.epsilon, root_P)
        ops.sqrt(root_P, root_P)
        ops.divide(g_P, root_P, g_P)
        if self.momentum > 0:
            m_P = update.slots["momentum"]
            ops.axpby(rate, g_P, self.momentum, m_P, m_P)
            ops.axpby(-1, m_P, 1, p_P, p_P)
        else:
            ops.axpby(-rate, g_P, 1, p_P, p_P)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        own = {"rho": self.rho, "momentum": self.momentum, "epsilon": self.epsilon, "centered": self.centered}
        return {**super().get_config(), **own}
