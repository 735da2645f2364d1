"""Dropout: in training, zeroes each element with a probability and scales the others up."""

from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.ops import random
from dptrain.program.tensor import Tensor
from dptrain.random import Purpose, own_seed


class Dropout(Layer):
    """y = x * mask in training, y = x otherwise; the mask is 0 with probability `rate`, else 1 / (1 - rate).

    Source: N. Srivastava et al., "Dropout", JMLR 15, 2014, scaled in training ("inverted"), as Keras. The mask is a
    function of (seed, number of masks before, place in the global batch): the same on any number of ranks.

    Args:
        rate: fraction of elements to drop, 0 to 1.
        noise_shape: only None.
        seed: of the masks; None for the model's.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range or not supported.
    """

    def __init__(self, rate: float, noise_shape: None = None, seed: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if not 0 <= rate <= 1:
            raise ConfigError(
                "Invalid value received for argument `rate`. Expected a float value between 0 and 1. "
                f"Received: rate={rate}"
            )
        self.refuse(noise_shape=noise_shape)
        self.rate, self.seed, self.built = float(rate), own_seed(seed), True
        if 0 < self.rate < 1:
            self.seed_generator = self.add_seed_generator(Purpose.DROPOUT, seed)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the input, in training masked."""
        if not training or self.rate == 0:
            return inputs
        if self.rate == 1:
            return ops.zeros_like(inputs)
        return random.dropout(inputs, self.rate, seed=self.seed_generator)
