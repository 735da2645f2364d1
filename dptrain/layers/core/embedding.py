"""Embedding: looks up integers in a table."""

from typing import Any

import numpy as np

from dptrain import constraints, initializers, ops, regularizers
from dptrain.layers.arguments import positive
from dptrain.layers.base import ConstraintArgument, InitializerArgument, Layer, RegularizerArgument
from dptrain.layers.existing_rows import require_rows
from dptrain.ops.indexing import take_rows
from dptrain.program.tensor import Tensor


class Embedding(Layer):
    """y[..., :] = embeddings[x[...]], for integers 0 to input_dim - 1.

    Args:
        input_dim: rows of the table.
        output_dim: length of its rows.
        mask_zero: 0 marks steps that do not count, which later layers leave out.
        weights: the table, an array, or a list of it.
        lora_rank, lora_alpha, quantization_config: must be None.
    """

    _unwritten = ("weights", "lora_rank", "lora_alpha")
    _always_written = ("activity_regularizer",)

    _takes_ids = True

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: InitializerArgument = "uniform",
        embeddings_regularizer: RegularizerArgument = None,
        embeddings_constraint: ConstraintArgument = None,
        mask_zero: bool = False,
        weights: Any = None,
        lora_rank: None = None,
        lora_alpha: None = None,
        quantization_config: None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.autocast = False  # half precision would round ids
        self._refuse(lora_rank=lora_rank, lora_alpha=lora_alpha, quantization_config=quantization_config)
        self.input_dim, self.output_dim = positive("input_dim", input_dim), positive("output_dim", output_dim)
        self.mask_zero = self.supports_masking = bool(mask_zero)
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        self.embeddings_regularizer = regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = constraints.get(embeddings_constraint)
        if weights is not None:
            self.build()
            self.set_weights(weights if isinstance(weights, list) else [weights])

    def build(self, input_shape: Any = None) -> None:
        """Make the table."""
        self.embeddings = self.add_weight(
            (self.input_dim, self.output_dim),
            self.embeddings_initializer,
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
            autocast=False,  # convert rows, not the whole table
            name="embeddings",
        )

    def compute_mask(self, inputs: Any, mask: Any = None) -> Tensor | None:
        """Return which ids are not 0, with `mask_zero`; else None."""
        return ops.not_equal(inputs, 0) if self.mask_zero else None

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, including the lengths of the table."""
        return {"input_dim": self.input_dim, **super()._get_own_config()}

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, ..., output_dim); DataError if an id is not a row of the table."""
        places = inputs if inputs.dtype.kind in "iu" else ops.cast(inputs, np.int32)
        require_rows(self._display_name, self.input_dim, places)
        return ops.cast(take_rows(self.embeddings, places), self.compute_dtype)
