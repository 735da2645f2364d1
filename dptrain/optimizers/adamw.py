"""AdamW."""

from typing import Any

from dptrain.errors import ConfigError
from dptrain.optimizers.adam import Adam
from dptrain.optimizers.schedules import LearningRateSchedule


class AdamW(Adam):
    """Adam with decoupled weight decay; other arguments as in `Adam`.

    Before every update parameters lose the fraction weight_decay times learning_rate of themselves.

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """

    def __init__(
        self,
        learning_rate: float | LearningRateSchedule = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay=weight_decay, **options)
        if self.weight_decay is None:
            raise ConfigError("Argument `weight_decay` must be a float. Received: weight_decay=None")
