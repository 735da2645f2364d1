"""Adam."""

import math
from typing import Any

from dptrain.optimizers.base import Optimizer, Update, check_range
from dptrain.optimizers.schedules import LearningRateSchedule


class Adam(Optimizer):
    """Adaptive moments; the formula and its source are at `Backend.adam`.

    AMSGrad divides by the root of the highest v so far: S. Reddi, S. Kale and S. Kumar, "On the convergence of Adam and
    beyond", ICLR 2018.

    Args:
        learning_rate: 0 or above, or a schedule.
        beta_1: decay of the first moment, 0 to below 1.
        beta_2: decay of the second moment, 0 to below 1.
        epsilon: added to the root of the second moment before its bias is corrected (PyTorch adds it after).
        amsgrad: as above.
        options: by keyword, of `Optimizer`: weight_decay, clipnorm, name and so on.

    Raises:
        ConfigError: an argument is out of range, or not supported.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = check_range("beta_1", beta_1, least=0.0, below=1.0)
        self.beta_2 = check_range("beta_2", beta_2, least=0.0, below=1.0)
        self.epsilon = check_range("epsilon", epsilon, above=0.0)
        self.amsgrad = bool(amsgrad)
        self.slots = ("momentum", "velocity", "velocity_hat") if self.amsgrad else ("momentum", "velocity")
        self.divides = not self.amsgrad

    def update_step(self, update: Update) -> None:
        """One fused op, but for AMSGrad; alpha = learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t)."""
        ops, p_P, g_P, t = update.ops, update.params, update.grads, update.iteration
        m_P, v_P = update.slots["momentum"], update.slots["velocity"]
        alpha = update.learning_rate * math.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        if not self.amsgrad:
            ops.adam(p_P, g_P, m_P, v_P, update.divisor, alpha, self.beta_1, self.beta_2, self.epsilon)
            return
        highest_P = update.slots["velocity_hat"]
        ops.axpby(1 - self.beta_1, g_P, self.beta_1, m_P, m_P)
        ops.multiply(g_P, g_P, g_P)
        ops.axpby(1 - self.beta_2, g_P, self.beta_2, v_P, v_P)
        ops.maximum(highest_P, v_P, highest_P)
        ops.sqrt(highest_P, g_P)
        ops.affine(g_P, 1, self.epsilon, g_P)
        ops.divide(m_P, g_P, g_P)
        ops.axpby(-alpha, g_P, 1, p_P, p_P)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        own = {"beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon, "amsgrad": self.amsgrad}
        return {**super().get_config(), **own}
