"""Dropout: in training, zeroes elements with a probability and scales the others up."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.spatial import SpatialLayer
from dptrain.ops import random
from dptrain.program.tensor import Tensor
from dptrain.random import Purpose, own_seed


def rate_of(rate: float) -> float:
    """Check and return a rate from 0 to 1."""
    if not 0 <= rate <= 1:
        raise ConfigError(
            f"Invalid value received for argument `rate`. Expected a float value between 0 and 1. Received: rate={rate}"
        )
    return float(rate)


def noise_shape_of(noise_shape: Any) -> tuple[int | None, ...] | None:
    """Check and return a noise shape."""
    if noise_shape is None:
        return None
    if not isinstance(noise_shape, Sequence) or isinstance(noise_shape, str):
        raise ConfigError(
            "Invalid value received for argument `noise_shape`. Expected a tuple or list of integers. "
            f"Received: noise_shape={noise_shape}"
        )
    for n, length in enumerate(noise_shape):
        if length is None:
            continue
        if isinstance(length, bool) or not isinstance(length, int):
            raise ConfigError(
                "Invalid value received for argument `noise_shape`. Expected all elements to be integers or None. "
                f"Received at index {n}: {length!r}"
            )
        if length <= 0:
            raise ConfigError(
                "Invalid value received for argument `noise_shape`. Expected all dimensions to be positive integers "
                f"or None. Received at index {n}: {length}"
            )
    return tuple(noise_shape)


class Dropout(Layer):
    """y = x * mask in training, y = x otherwise; the mask is 0 with probability `rate`, else 1 / (1 - rate).

    Source: N. Srivastava et al., "Dropout", JMLR 15, 2014, scaled in training ("inverted"), like Keras. The mask is a
    function of (seed, number of earlier masks, place in the global batch): the same on any number of ranks.

    Args:
        rate: fraction of elements to drop, 0 to 1.
        noise_shape: of the mask, broadcast to the input: its lengths, 1, or None for the input's; None for all of
            these.
        seed: of the masks.
    """

    _has_no_weights = True
    _passes_masks = True

    def __init__(
        self,
        rate: float,
        noise_shape: Sequence[int | None] | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rate, self.seed = rate_of(rate), own_seed(seed)
        self.noise_shape = noise_shape_of(noise_shape)
        if 0 < self.rate < 1:
            self.seed_generator = self._add_seed_generator(Purpose.DROPOUT, seed)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the input, in training masked."""
        if not training or self.rate == 0:
            return inputs
        if self.rate == 1:
            return ops.zeros_like(inputs)
        return random.dropout(inputs, self.rate, self._noise_shape(), seed=self.seed_generator)

    def _noise_shape(self) -> Sequence[int | None] | None:
        return self.noise_shape


class _SpatialDropout(SpatialLayer, Dropout):
    """Drops whole channels of samples."""

    def __init__(self, rate: float, data_format: str | None, seed: int | None, **options: Any) -> None:
        super().__init__(rate, seed=seed, **options)
        self._set_format(data_format)
        self.input_spec = InputSpec(ndim=self.rank + 2)

    def _get_config(self) -> dict[str, Any]:
        return {key: value for key, value in super()._get_config().items() if key != "trainable"}

    def _noise_shape(self) -> Sequence[int | None]:
        return [1 if axis in self._space else None for axis in range(self.rank + 2)]


class SpatialDropout1D(_SpatialDropout):
    """`Dropout` of whole channels of sequences (rows, length, channels).

    Source: J. Tompson et al., "Efficient object localization using convolutional networks", CVPR 2015.
    """

    rank = 1

    def __init__(self, rate: float, seed: int | None = None, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(rate, None, seed, name=name, dtype=dtype)


class SpatialDropout2D(_SpatialDropout):
    """`Dropout` of whole channels of images (rows, height, width, channels); see `SpatialDropout1D`."""

    rank = 2

    def __init__(
        self,
        rate: float,
        data_format: str | None = None,
        seed: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(rate, data_format, seed, name=name, dtype=dtype)


class SpatialDropout3D(SpatialDropout2D):
    """`Dropout` of whole channels of volumes (rows, depth, height, width, channels); see `SpatialDropout2D`."""

    rank = 3
