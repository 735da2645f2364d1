"""Embedding: looks up integers in a table."""

from typing import Any

import numpy as np

from dptrain import constraints, initializers, ops, regularizers
from dptrain.layers.arguments import positive
from dptrain.layers.base import ConstraintArgument, InitializerArgument, RegularizerArgument
from dptrain.layers.existing_rows import require_rows
from dptrain.layers.lora import LoraLayer
from dptrain.ops.indexing import take_rows
from dptrain.program.tensor import Tensor, Variable


class Embedding(LoraLayer):
    """y[..., :] = embeddings[x[...]], for integers 0 to input_dim - 1.

    Args:
        input_dim: rows of the table.
        output_dim: length of its rows.
        mask_zero: 0 marks steps that do not count, which later layers leave out.
        weights: the table, an array, or a list of it.
        lora_rank, lora_alpha: begin with `enable_lora(lora_rank, lora_alpha)`.
        quantization_config: must be None.
    """

    _unwritten = ("weights", "lora_rank", "lora_alpha")
    _always_written = ("activity_regularizer",)

    _takes_ids = True

    _matrix_name = "embeddings"
    lora_embeddings_a: Variable
    lora_embeddings_b: Variable

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: InitializerArgument = "uniform",
        embeddings_regularizer: RegularizerArgument = None,
        embeddings_constraint: ConstraintArgument = None,
        mask_zero: bool = False,
        weights: Any = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        quantization_config: None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.autocast = False  # half precision would round ids
        self._set_lora(lora_rank, lora_alpha)
        self._refuse(quantization_config=quantization_config)
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
        self._embeddings = self.add_weight(
            (self.input_dim, self.output_dim),
            self.embeddings_initializer,
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
            autocast=False,  # convert rows, not the whole table
            name="embeddings",
        )
        self._build_lora()

    @property
    def embeddings(self) -> Any:
        """The table that the layer reads; a tensor with LoRA. AttributeError before the layer is built."""
        if "_embeddings" not in vars(self):
            raise AttributeError("You must build the layer before accessing `embeddings`.")
        return self._adapted() if self.lora_enabled else self._embeddings

    @embeddings.setter
    def embeddings(self, value: Any) -> None:
        self._embeddings = value

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
        rows = take_rows(self._base, places)
        if (factors := self._factors) is not None:
            rows = rows + self._widened(take_rows(factors[0], places), factors[1])
        return ops.cast(rows, self.compute_dtype)
