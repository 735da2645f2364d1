"""Attention without projections of query, key and value: by dot products, or by sums."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import InitializerArgument, Layer
from dptrain.layers.masks import require_mask
from dptrain.layers.regularization.dropout import rate_of
from dptrain.ops import random
from dptrain.program.tensor import Tensor, Variable
from dptrain.random import Purpose, own_seed

_SCORE_MODES = ("dot", "concat")
# Subtracted from the scores of masked sources, whose exponential is then 0.
_MASK_OFFSET, _MASK_OFFSET_FLOAT16 = 1e9, 65504.0


def causal_mask(targets: Any, sources: Any) -> Any:
    """Return (1, targets, sources): whether a source does not come after the target."""
    return np.tri(int(targets), int(sources), dtype=np.bool_)[None]


class Attention(Layer):
    """y = softmax(scores of query and key) value, with dot products by default (Luong's attention).

    Inputs are a list of query (rows, targets, length), value (rows, sources, length) and optionally key (rows, sources,
    length), by default the value; the output is (rows, targets, length of the value).

    Source: M.-T. Luong, H. Pham and C. Manning, "Effective approaches to attention-based neural machine translation",
    EMNLP 2015.

    Args:
        use_scale: whether a weight scales the scores.
        score_mode: "dot", or "concat" for the sum of tanh(query + key), times a weight.
        dropout: fraction of the softmax to drop in training, 0 to 1.
        seed: of the dropout masks.
    """

    def __init__(
        self,
        use_scale: bool = False,
        score_mode: str = "dot",
        dropout: float = 0.0,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if score_mode not in _SCORE_MODES:
            raise ConfigError(
                "Invalid value for argument score_mode. Expected one of {'dot', 'concat'}. "
                f"Received: score_mode={score_mode}"
            )
        self.use_scale, self.score_mode = bool(use_scale), score_mode
        self.dropout, self.seed = rate_of(dropout), own_seed(seed)
        self.scale: Variable | None = None
        self.concat_score_weight: Variable | None = None
        if self.dropout > 0:
            self.seed_generator = self._add_seed_generator(Purpose.DROPOUT, seed)

    def build(self, input_shape: Any) -> None:
        """Make the weights of the scores."""
        self._check_inputs(input_shape)
        if self.use_scale:
            self.scale = self.add_weight(self._scale_shape(input_shape), self._scale_initializer, name="scale")
        if self.score_mode == "concat":
            self.concat_score_weight = self.add_weight((), "ones", name="concat_score_weight")

    _scale_initializer: InitializerArgument = "ones"

    def _scale_shape(self, input_shape: Any) -> tuple[int, ...]:
        return ()

    def call(
        self,
        inputs: Sequence[Tensor],
        mask: Sequence[Any] | None = None,
        training: bool = False,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> Any:
        """Return the output, and with `return_attention_scores` the softmax of the scores (rows, targets, sources).

        Args:
            inputs: query, value and perhaps key.
            mask: of the query (rows, targets), False where the output is 0, and of the value (rows, sources), False for
                sources to ignore; None for neither.
            training: apply dropout.
            return_attention_scores: see above.
            use_causal_mask: ignore sources after the target.
        """
        self._check_inputs(inputs, mask)
        for name, tensor, tensor_mask in zip(("query", "value"), inputs, mask or (), strict=False):
            require_mask(self, tensor_mask, tensor.shape[:-1], f"{name} mask")
        query, value = (self._floating(tensor) for tensor in inputs[:2])
        key = self._floating(inputs[2]) if len(inputs) > 2 else value
        query_mask, value_mask = (
            ops.cast(tensor_mask, "bool") if tensor_mask is not None else None
            for tensor_mask in (mask or [None] * 2)[:2]
        )
        scores = self._calculate_scores(query, key)
        scores_mask = self._calculate_score_mask(scores, value_mask, use_causal_mask)
        output, weights = self._apply_scores(scores, value, scores_mask, training)
        if query_mask is not None:
            output = ops.where(ops.expand_dims(query_mask, -1), output, 0)
        return (output, weights) if return_attention_scores else output

    def _calculate_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return how well each source matches each target, (rows, targets, sources)."""
        if self.score_mode == "dot":
            scores = ops.matmul(query, ops.swapaxes(key, -2, -1))
            return scores if self.scale is None else scores * self.scale
        sums = ops.expand_dims(query, -2) + ops.expand_dims(key, -3)
        return self.concat_score_weight * ops.sum(ops.tanh(sums if self.scale is None else self.scale * sums), -1)

    def _calculate_score_mask(self, scores: Tensor, v_mask: Tensor | None, use_causal_mask: bool) -> Tensor | None:
        """Return which sources take part, broadcast to the scores; None for all."""
        mask = None if v_mask is None else ops.expand_dims(v_mask, -2)
        if not use_causal_mask:
            return mask
        causal = ops.convert_to_tensor(causal_mask(*scores.shape[-2:]))
        return causal if mask is None else ops.logical_and(mask, causal)

    def _apply_scores(
        self, scores: Tensor, value: Tensor, scores_mask: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        if scores_mask is not None:
            offset = _MASK_OFFSET_FLOAT16 if scores.dtype == np.float16 else _MASK_OFFSET
            scores = ops.where(scores_mask, scores, scores - offset)
        weights = ops.softmax(scores)
        if training and self.dropout > 0:
            weights = random.dropout(weights, self.dropout, seed=self.seed_generator)
        return ops.matmul(weights, value), weights

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the query's mask."""
        self._check_inputs(inputs, mask)
        return None if mask is None else mask[0]

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Return the query's shape with the value's last length."""
        return (*input_shape[0][:-1], input_shape[1][-1])

    def _check_inputs(self, inputs: Any, mask: Any = None) -> None:
        name = type(self).__name__
        if not isinstance(inputs, list):
            raise ConfigError(
                f"{name} layer must be called on a list of inputs, namely [query, value] or [query, value, key]. "
                f"Received: inputs={inputs}."
            )
        if not 2 <= len(inputs) <= 3:
            raise ConfigError(
                f"{name} layer accepts inputs list of length 2 or 3, namely [query, value] or [query, value, key]. "
                f"Received length: {len(inputs)}."
            )
        if mask is None:
            return
        if not isinstance(mask, list):
            raise ConfigError(
                f"{name} layer mask must be a list, namely [query_mask, value_mask]. Received: mask={mask}."
            )
        if not 2 <= len(mask) <= 3:
            raise ConfigError(
                f"{name} layer accepts mask list of length 2 or 3. Received: inputs={inputs}, mask={mask}."
            )


class AdditiveAttention(Attention):
    """y = softmax(sum of scale * tanh(query + key)) value (Bahdanau's attention); see `Attention`.

    `use_scale` makes the scale a weight of the query's length, otherwise it is 1.

    Source: D. Bahdanau, K. Cho and Y. Bengio, "Neural machine translation by jointly learning to align and translate",
    ICLR 2015.
    """

    _scale_initializer = "glorot_uniform"

    def __init__(self, use_scale: bool = True, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(use_scale=use_scale, dropout=dropout, **options)

    def _scale_shape(self, input_shape: Any) -> tuple[int, ...]:
        return (input_shape[0][-1],)

    def _calculate_scores(self, query: Tensor, key: Tensor) -> Tensor:
        sums = ops.tanh(ops.expand_dims(query, -2) + ops.expand_dims(key, -3))
        return ops.sum(sums if self.scale is None else self.scale * sums, -1)

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, including the seed."""
        return super()._get_own_config() | {"seed": self.seed}
