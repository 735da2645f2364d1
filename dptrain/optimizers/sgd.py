"""Stochastic gradient descent."""

from typing import Any

from dptrain.errors import ConfigError
from dptrain.optimizers.base import Optimizer, Update, check_range
from dptrain.optimizers.schedules import LearningRateSchedule


class SGD(Optimizer):
    """Gradient descent with optional momentum; the formula is at `Backend.sgd`.

    Nesterov's momentum looks ahead: m = momentum m - learning_rate g, p += momentum m - learning_rate g.

    Args:
        learning_rate: 0 or above, or a schedule.
        momentum: 0 to 1.
        nesterov: as above.
        options: by keyword, of `Optimizer`: weight_decay, clipnorm, name and so on.

    Raises:
        ConfigError: an argument is out of range, or not supported.
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
        self.slots = ("momentum",) if self.momentum else ()
        self.divides = not (self.momentum and self.nesterov)

    def update_step(self, update: Update) -> None:
        """One fused op, but for Nesterov's momentum."""
        ops, p_P, g_P, rate = update.ops, update.params, update.grads, update.learning_rate
        m_P = update.slots.get("momentum")
        if self.divides:
            ops.sgd(p_P, g_P, m_P, update.divisor, rate, self.momentum)
            return
        ops.axpby(self.momentum, m_P, -rate, g_P, m_P)
        ops.axpby(self.momentum, m_P, 1, p_P, p_P)
        ops.axpby(-rate, g_P, 1, p_P, p_P)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), "momentum": self.momentum, "nesterov": self.nesterov}
