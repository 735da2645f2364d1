"""AdamW."""

from typing import Any

from dptrain.errors import ConfigError
from dptrain.optimizers.adam import Adam
from dptrain.optimizers.schedules import LearningRateSchedule


class AdamW(Adam):
    """Adam with a weight decay that stands beside the gradient and not in it.

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019.

    Args:
        learning_rate: 0 or above, or a schedule.
        weight_decay: before every update parameters lose this times the learning rate of themselves.
        beta_1: this one and the next three are at `Adam`.
        options: by keyword, of `Optimizer`.

    Raises:
        ConfigError: an argument is out of range, or not supported.
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
