"""ReversibleEmbedding: an Embedding that also maps back to scores of its rows."""

from typing import Any

from dptrain import ops
from dptrain.layers.base import ConstraintArgument, InitializerArgument, RegularizerArgument
from dptrain.layers.core.embedding import Embedding
from dptrain.program.tensor import Tensor, Variable


class ReversibleEmbedding(Embedding):
    """y[..., :] = embeddings[x[...]], or in reverse y = x embeddings^T; for other arguments see `Embedding`.

    Source: O. Press and L. Wolf, "Using the output embedding to improve language models", EACL 2017.

    Args:
        tie_weights: both directions share the table; else the reverse has its own weight.
        reverse_dtype: in which the reverse is computed; by default the layer's.
        logit_soft_cap: the reverse returns tanh(y / logit_soft_cap) * logit_soft_cap; None for y.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        tie_weights: bool = True,
        embeddings_initializer: InitializerArgument = "uniform",
        embeddings_regularizer: RegularizerArgument = None,
        embeddings_constraint: ConstraintArgument = None,
        mask_zero: bool = False,
        reverse_dtype: str | None = None,
        logit_soft_cap: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *(input_dim, output_dim, embeddings_initializer, embeddings_regularizer, embeddings_constraint, mask_zero),
            **options,
        )
        self.tie_weights, self.reverse_dtype, self.logit_soft_cap = bool(tie_weights), reverse_dtype, logit_soft_cap

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, including those of `Embedding`."""
        return super()._get_own_config() | {"output_dim": self.output_dim, "quantization_config": None}

    def build(self, input_shape: Any = None) -> None:
        """Make the table, and the weight of the reverse if it has one."""
        super().build(input_shape)
        self.reverse_embeddings: Variable | None = None
        if not self.tie_weights:
            self.reverse_embeddings = self.add_weight(
                (self.output_dim, self.input_dim), self.embeddings_initializer, name="reverse_embeddings"
            )

    def call(self, inputs: Tensor, reverse: bool = False) -> Tensor:
        """Return (rows, ..., output_dim) of ids, see `Embedding`; in reverse (rows, ..., input_dim) of vectors."""
        if not reverse:
            rows = super().call(inputs)
            rows._keras_mask = super().compute_mask(inputs)
            return rows
        kernel = ops.transpose(self.embeddings) if self.reverse_embeddings is None else self.reverse_embeddings.value
        dtype = self.reverse_dtype or self.compute_dtype
        logits = ops.matmul(ops.cast(inputs, dtype), ops.cast(kernel, dtype))
        if self.logit_soft_cap is not None:
            logits = ops.tanh(logits / self.logit_soft_cap) * self.logit_soft_cap
        return logits

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """Return None: `call` attaches the mask of ids, and the reverse has none."""

    def compute_output_shape(self, input_shape: Any, reverse: bool = False) -> tuple[int | None, ...]:
        """Return the shape of the rows; in reverse that of the scores."""
        return (*input_shape[:-1], self.input_dim) if reverse else (*input_shape, self.output_dim)
