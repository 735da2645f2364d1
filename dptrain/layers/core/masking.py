"""Masking of time steps."""

from typing import Any

import numpy as np

from dptrain import ops
from dptrain.layers.base import Layer
from dptrain.program.tensor import Tensor


class Masking(Layer):
    """Masks time steps whose features all equal `mask_value`, and sets them to 0; later layers leave them out.

    The mask, booleans (rows, time), goes with the tensor from layer to layer: recurrent and attention layers skip steps
    where it is False, and losses and metrics leave them out.
    """

    _has_no_weights = True
    _passes_masks = True

    def __init__(self, mask_value: Any = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.mask_value = mask_value

    def compute_mask(self, inputs: Any, mask: Any = None) -> Tensor:
        """Return which steps have other values: booleans of the inputs' shape without the features."""
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
