"""Attention by scaled dot products."""

import math
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import repeat
from dptrain.ops.common import limits
from dptrain.ops.elementwise import cast, floating, tanh, where
from dptrain.ops.linear_algebra import batch_matmul
from dptrain.ops.manipulation import transpose
from dptrain.ops.reduction import softmax
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.program.types import is_half

# What Keras puts for scores that take no part: this part of the greatest number.
_LEFT_OUT = -0.7


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Tensor:
    """Return softmax(scale query key^T + bias) value, head by head.

    Scores and softmax of half precision are computed in float32.

    Args:
        query: (batch, targets, heads, length).
        key: (batch, sources, key heads, length); fewer heads than the query's are shared by consecutive ones of these.
        value: (batch, sources, key heads, value length).
        bias: added to the scores, (batch, heads, targets, sources) or what can be broadcast to it.
        mask: as bias; where it is false, a source takes no part. Where it is false for all sources, all count alike.
        scale: of the scores; by default 1 / sqrt(length).
        is_causal: a source behind a target's place takes no part.
        flash_attention: makes no difference to the result.
        attn_logits_soft_cap: scores become soft_cap * tanh(scores / soft_cap), before bias and mask; None for none.

    Returns:
        (batch, targets, heads, value length).

    Raises:
        ConfigError: shapes that do not go together.

    Source: A. Vaswani et al., "Attention is all you need", NeurIPS 2017.
    """
    q, k, v = (floating(tensor) for tensor in as_tensors([query, key, value]))
    _check(q, k, v)
    queries_per_key = int(q.shape[2]) // int(k.shape[2])
    if queries_per_key != 1:
        k, v = (repeat(tensor, queries_per_key, 2) for tensor in (k, v))
    q, k, v = (transpose(tensor, (0, 2, 1, 3)) for tensor in (q, k, v))
    weights = _weights(q, k, bias, mask, scale, is_causal, attn_logits_soft_cap)
    return transpose(batch_matmul(cast(weights, v.dtype), v), (0, 2, 1, 3))


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the shapes of an attention.

    Raises:
        ConfigError: they do not go together.
    """
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ConfigError(
            f"`dot_product_attention` only supports 4D inputs. Received: query.shape={q.shape}, key.shape={k.shape}, "
            f"value.shape={v.shape}."
        )
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ConfigError(
            f"dot_product_attention: query, key and value of shapes {q.shape}, {k.shape}, {v.shape} do not go together"
        )


def _weights(
    q: Tensor, k: Tensor, bias: Any, mask: Any, scale: float | None, is_causal: bool, soft_cap: float | None
) -> Tensor:
    """Return how much each source counts for each target, (batch, heads, targets, sources)."""
    if is_half(q.dtype):
        q, k = cast(q, "float32"), cast(k, "float32")
    factor = 1 / math.sqrt(int(q.shape[-1])) if scale is None else scale
    scores = batch_matmul(q, transpose(k, (0, 1, 3, 2))) * factor
    if soft_cap is not None:
        scores = tanh(scores / soft_cap) * soft_cap
    if bias is not None:
        scores = scores + cast(bias, scores.dtype)
    masks = [] if mask is None else [cast(mask, "bool")]
    if is_causal:
        masks += as_tensors([np.tri(int(q.shape[2]), int(k.shape[2]), dtype=np.bool_)])
    for takes_part in masks:
        scores = where(takes_part, scores, _LEFT_OUT * float(limits(scores.dtype).max))
    return softmax(scores)
