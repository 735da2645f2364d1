"""Rescaling: a fixed affine map, usually of pixels."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.program.tensor import Tensor
from dptrain.registry.serialization import custom_object_scope
from dptrain.runtime.image_format import image_data_format


class Rescaling(Layer):
    """y = x * scale + offset; each is a number, such as 1 / 255, or a list with one for each index of the last axis.

    With `config.set_image_data_format("channels_first")` a list of scales is one for each index of the third to last.
    """

    _passes_masks = True

    def __init__(self, scale: float | Sequence[float], offset: float | Sequence[float] = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.scale, self.offset = _number_or_list(scale), _number_or_list(offset)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the input scaled, as floating-point numbers."""
        x = self._floating(inputs)
        scale, offset = (
            parameter if isinstance(parameter, float) else ops.cast(parameter, x.dtype)
            for parameter in (self.scale, self.offset)
        )
        if isinstance(scale, Tensor) and image_data_format() == "channels_first":
            scale = ops.reshape(scale, (-1, 1, 1))
        return x * scale + offset

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return the layer that `config` describes; `custom_objects` as in Keras, for subclasses."""
        with custom_object_scope(custom_objects):
            return super().from_config(config)


def _number_or_list(value: Any) -> float | list[float]:
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        numbers = np.zeros((0, 0))
    if numbers.ndim > 1 or isinstance(value, str):
        raise ConfigError(f"not supported: Rescaling by {value!r}; expected a number, or one for each channel")
    scaled: float | list[float] = numbers.tolist()
    return scaled
