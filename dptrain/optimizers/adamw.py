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
        beta_1: this one and all that follow are at `Adam` and `Optimizer`.

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
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            amsgrad,
            weight_decay,
            clipnorm,
            clipvalue,
            global_clipnorm,
            use_ema,
            ema_momentum,
            ema_overwrite_frequency,
            loss_scale_factor,
            gradient_accumulation_steps,
            name,
            **kwargs,
        )
        if self.weight_decay is None:
            raise ConfigError("Argument `weight_decay` must be a float. Received: weight_decay=None")
