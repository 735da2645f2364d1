"""Noise in training: added, multiplied, or replacing elements; keyed like `Dropout`'s masks."""

import math
from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.layers.regularization.dropout import noise_shape_of, rate_of
from dptrain.ops import random
from dptrain.program.tensor import Tensor
from dptrain.random import Purpose, own_seed

# SELU's constants: G. Klambauer et al., "Self-normalizing neural networks", NeurIPS 2017.
_ALPHA, _SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


class GaussianNoise(Layer):
    """y = x + noise in training, normal with mean 0 and deviation `stddev`, 0 to 1; y = x otherwise."""

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, stddev: float, seed: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if not 0 <= stddev <= 1:
            raise ConfigError(
                "Invalid value received for argument `stddev`. Expected a float value between 0 and 1. "
                f"Received: stddev={stddev}"
            )
        self.stddev, self.seed = float(stddev), own_seed(seed)
        if self.stddev > 0:
            self.seed_generator = self._add_seed_generator(Purpose.NOISE, seed)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the input, in training with noise."""
        if not training or self.stddev == 0:
            return inputs
        x = self._floating(inputs)
        return x + random.normal(x.shape, 0.0, self.stddev, x.dtype, seed=self.seed_generator)


class GaussianDropout(Layer):
    """y = x * noise in training, normal with mean 1 and variance rate / (1 - rate); y = x otherwise.

    `rate` is that of a `Dropout` with the same variance, 0 to below 1.

    Source: N. Srivastava et al., "Dropout", JMLR 15, 2014, section 10.
    """

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, rate: float, seed: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.rate, self.seed = rate_of(rate), own_seed(seed)
        if self.rate == 1:
            raise ConfigError("rate = 1 of GaussianDropout: the noise would be infinite; expected a number below 1")
        if self.rate > 0:
            self.seed_generator = self._add_seed_generator(Purpose.NOISE, seed)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the input, in training times noise."""
        if not training or self.rate == 0:
            return inputs
        x = self._floating(inputs)
        deviation = math.sqrt(self.rate / (1 - self.rate))
        return x * random.normal(x.shape, 1.0, deviation, x.dtype, seed=self.seed_generator)


class AlphaDropout(Layer):
    """Dropout after SELU: sets elements to its least value, and keeps mean 0 and variance 1.

    `rate` is the fraction to drop, 0 to below 1; for `noise_shape` see `Dropout`.

    Source: G. Klambauer et al., "Self-normalizing neural networks", NeurIPS 2017.
    """

    _has_no_weights = True
    _passes_masks = True

    def __init__(
        self, rate: float, noise_shape: Sequence[int | None] | None = None, seed: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.rate, self.seed = rate_of(rate), own_seed(seed)
        if self.rate == 1:
            raise ConfigError("rate = 1 of AlphaDropout: nothing would be kept; expected a number below 1")
        self.noise_shape = noise_shape_of(noise_shape)
        if self.rate > 0:
            self.seed_generator = self._add_seed_generator(Purpose.DROPOUT, seed)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the input, in training masked."""
        if not training or self.rate == 0:
            return inputs
        x = self._floating(inputs)
        is_kept = random.keep_mask(x, self.rate, self.noise_shape, self.seed_generator)
        least = -_ALPHA * _SCALE
        factor = ((1 - self.rate) * (1 + self.rate * least**2)) ** -0.5
        y: Tensor = ops.where(is_kept, x, least) * factor - factor * least * self.rate
        return y
