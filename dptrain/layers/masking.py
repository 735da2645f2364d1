"""Masking: time steps that do not count."""

from typing import Any

import numpy as np

from dptrain import ops
from dptrain.layers.base import Layer
from dptrain.program.tensor import Tensor


class Masking(Layer):
    """Masks the time steps whose features all have one value, and makes these 0; layers behind it leave them out.

    The mask, booleans (rows, time), goes with the tensor from layer to layer: recurrent and attention layers skip
    steps where it is False, and losses and metrics leave them out.

    Args:
        mask_value: the value.
        options: keyword arguments of `Layer`.
    """

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, mask_value: Any = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.mask_value = mask_value

    def compute_mask(self, inputs: Any, mask: Any = None) -> Tensor:
        """Return which steps have another value: booleans of the inputs' shape without the features."""
        return ops.any(self._counts(inputs), axis=-1)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the inputs, (rows, time, ..., features), with zeros for masked steps."""
        counts = ops.any(self._counts(inputs), axis=-1, keepdims=True)
        outputs: Tensor = ops.where(counts, inputs, 0)
        outputs._keras_mask = ops.squeeze(counts, axis=-1)
        return outputs

    def _counts(self, inputs: Any) -> Tensor:
        value = self.mask_value
        return ops.not_equal(inputs, value if np.isscalar(value) else ops.cast(value, inputs.dtype))
