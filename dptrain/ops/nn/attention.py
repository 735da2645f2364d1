"""Attention by scaled dot products."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import repeat
from dptrain.ops.common import common_dtype, limits
from dptrain.ops.elementwise import cast, floating, tanh, where
from dptrain.ops.manipulation import reshape, transpose, transpose_to
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.products import batch_matmul
from dptrain.ops.reduction import softmax
from dptrain.ops.reduction import sum as sum_over
from dptrain.program.gradient import gradients
from dptrain.program.lowering import AttentionKernel, AttentionLowering, Forward
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import Op, not_placed, op
from dptrain.program.operand import OPERATORS
from dptrain.program.shapes import Shape, differ, is_one, size
from dptrain.program.tensor import Array, Tensor, as_tensors
from dptrain.runtime.types import is_narrow

# Keras' score for masked sources, as a part of the type's greatest number.
_MASKED_SCORE = -0.7
# Heads before positions, and back.
_HEADS_FIRST = (0, 2, 1, 3)

# Attention as one op, whose kernels have no matrix of scores. Inputs are query (batch, targets, heads, length),
# key (batch, sources, heads, length), value (batch, sources, heads, value length) and perhaps a mask of booleans, which
# is broadcast to (batch, heads, targets, sources). Ranks may divide batch and heads.


def _letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    """`aTbH,aSbH,aSbV,abTS->aTbV`."""
    return f"aTbH,aSbH,aSbV{_mask_letters(shapes[3:])}->aTbV"


def _mask_letters(shapes: Sequence[Shape]) -> str:
    return "".join(
        f",{''.join('1' if is_one(n) else letter for n, letter in zip(shape, 'abTS', strict=True))}" for shape in shapes
    )


def _powers_of(
    query: Array, key: Array, mask: Array | None, scale: float, is_causal: bool
) -> tuple[Array, Array, Array]:
    scores = np.matmul(query.transpose(_HEADS_FIRST), key.transpose(0, 2, 3, 1)) * np.asarray(scale, query.dtype)
    counts = np.ones((1, 1, 1, 1), np.bool_) if mask is None else mask
    if is_causal:
        counts = counts & np.tri(*scores.shape[2:], dtype=np.bool_)
    scores = np.where(counts, scores, np.asarray(_MASKED_SCORE * np.finfo(scores.dtype).max, scores.dtype))
    greatest = scores.max(-1, keepdims=True, initial=-np.inf)
    return np.exp(scores - greatest), greatest, counts


def _scores_of(query: Array, key: Array, mask: Array | None, scale: float, is_causal: bool) -> tuple[Array, Array]:
    """Return the softmax of the scores (batch, heads, targets, sources), and the mask of sources that count."""
    powers, _, counts = _powers_of(query, key, mask, scale, is_causal)
    return powers / powers.sum(-1, keepdims=True), counts


def _composed(inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    q, k, v = (transpose_to(tensor, axes=_HEADS_FIRST) for tensor in inputs[:3])
    mask = inputs[3] if len(inputs) > 3 else None
    weights = _weights(q, k, None, mask, attributes["scale"], attributes["is_causal"], None)
    return (transpose_to(batch_matmul(weights, v), axes=_HEADS_FIRST),)


def _composed_gradients(inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    dy, q, k, v = (transpose_to(tensor, axes=_HEADS_FIRST) for tensor in inputs[:4])
    mask, scale = (inputs[4] if len(inputs) > 4 else None), attributes["scale"]
    weights = _weights(q, k, None, mask, scale, attributes["is_causal"], None)
    slopes = batch_matmul(dy, transpose_to(v, axes=(0, 1, 3, 2)))
    slopes = weights * (slopes - sum_over(weights * slopes, -1, keepdims=True)) * scale
    for counts in _masks(q, k, mask, attributes["is_causal"]):
        slopes = where(counts, slopes, 0)
    dq = batch_matmul(slopes, k)
    dk, dv = (batch_matmul(transpose_to(a, axes=(0, 1, 3, 2)), b) for a, b in ((slopes, q), (weights, dy)))
    return tuple(transpose_to(tensor, axes=_HEADS_FIRST) for tensor in (dq, dk, dv))


def _operations_of(output: Tensor, first: int, *products: tuple[int, int]) -> int:
    """Count two operations per multiplication, of products over lengths of queries and of values for each value."""
    q, k, v = output.inputs[first : first + 3]
    of_queries, of_values = products[output.index]
    return 2 * size(q.shape[:3]) * int(k.shape[1]) * (of_queries * int(q.shape[3]) + of_values * int(v.shape[3]))


def _forward_on_gpu(inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return ATTEND_WITH_SUMS.values_of(inputs, dict(attributes))


def _on_gpu(inputs: Sequence[Tensor], attributes: Mapping[str, Any], forward: Forward) -> tuple[Tensor, ...]:
    return forward(inputs, attributes)[:1]


def _gradients_on_gpu(inputs: Sequence[Tensor], attributes: Mapping[str, Any], forward: Forward) -> tuple[Tensor, ...]:
    dy, q, k, v, *mask = inputs
    y, sums = forward([q, k, v, *mask], attributes)
    means = sum_over(cast(dy, y.dtype) * y, -1)
    return tuple(
        grad
        for kernel in (QUERY_GRADIENTS, KEY_GRADIENTS)
        for grad in kernel.values_of([dy, q, k, v, sums, means, *mask], dict(attributes))
    )


@op(
    shape=lambda query, key, value, *mask, scale, is_causal: (*query[:3], value[3]),
    letters=_letters,
    dtype=lambda query, key, value, *mask, scale, is_causal: common_dtype(query, key, value),
    lowering=AttentionLowering(_composed, False, _forward_on_gpu, _on_gpu),
    operations=lambda output: _operations_of(output, 0, (1, 1)),
)
def attend_heads(*inputs: Array, scale: float, is_causal: bool, out: Array) -> None:
    """Softmax(scale query key^T) value where the mask is true; if causal, no target sees a source after it."""
    query, key, value, *mask = inputs
    if not size(key.shape):
        out.fill(0)
        return
    weights, _ = _scores_of(query, key, mask[0] if mask else None, scale, is_causal)
    out[...] = np.matmul(weights, value.transpose(_HEADS_FIRST)).transpose(_HEADS_FIRST)


@attend_heads.onnx_lowering
def _attend_onnx(graph: OnnxGraph, output: Tensor, *inputs: Value) -> Value:
    q, k, v = (graph.computed(value, output.dtype) for value in inputs[:3])
    product = graph.node("MatMul", graph.transpose(q, _HEADS_FIRST), graph.transpose(k, (0, 2, 3, 1)))
    scores = graph.node("Mul", product, graph.constant(output.attributes["scale"], q.dtype))
    least = graph.constant(_MASKED_SCORE * float(limits(output.dtype).max), q.dtype)
    masks = list(inputs[3:])
    if output.attributes["is_causal"]:
        lengths = (int(tensor.shape[1]) for tensor in output.inputs[:2])
        masks.append(graph.constant(np.tri(*lengths, dtype=np.bool_)))
    for mask in masks:
        scores = graph.node("Where", mask, scores, least, dtype=q.dtype)
    weights = graph.node("Softmax", scores, axis=-1)
    return graph.transpose(graph.node("MatMul", weights, graph.transpose(v, _HEADS_FIRST)), _HEADS_FIRST)


def _attend_gradients(*inputs: Array, scale: float, is_causal: bool, out: list[Array | None]) -> None:
    """Gradients of `attend_heads` in query, key and value, from the gradient in its output."""
    dy, query, key, value, *mask = inputs
    if not (size(key.shape) and size(query.shape)):
        for grad in out:
            if grad is not None:
                grad.fill(0)
        return
    weights, counts = _scores_of(query, key, mask[0] if mask else None, scale, is_causal)
    d_heads, q, k, v = (tensor.transpose(_HEADS_FIRST) for tensor in (dy, query, key, value))
    slopes = np.matmul(d_heads, v.swapaxes(2, 3))
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdims=True)) * np.asarray(scale, slopes.dtype)
    slopes = np.where(counts, slopes, 0)
    factors = (slopes, k), (slopes.swapaxes(2, 3), q), (weights.swapaxes(2, 3), d_heads)
    for grad, (a, b) in zip(out, factors, strict=True):
        if grad is not None:
            grad[...] = np.matmul(a, b).transpose(_HEADS_FIRST)


ATTEND_GRADIENTS = Op(
    _attend_gradients,
    lambda dy, query, key, value, *mask, scale, is_causal: [query, key, value],  # type: ignore[arg-type]
    lambda shapes, out, attributes: f"aTbV,aTbH,aSbH,aSbV{_mask_letters(shapes[4:])}->aTbH,aSbH,aSbV",
    lambda dy, query, key, value, *mask, scale, is_causal: [query, key, value],
    linear="each",
    linear_in=(0,),
    lowering=AttentionLowering(_composed_gradients, True, _forward_on_gpu, _gradients_on_gpu),
    operations=lambda output: _operations_of(output, 1, (2, 1), (1, 0), (0, 1)),
    has_values=True,
)


# What attention is on a GPU: the output with sums, and the gradients in queries, and in keys and values, which compute
# scores anew. Sums are (batch, targets, heads, 2): a target's greatest score, and the sum of its powers.


def _in_float32(heads: Sequence[Array]) -> list[Array]:
    return [array.astype(np.promote_types(array.dtype, np.float32), copy=False) for array in heads]


def _attend_with_sums(*inputs: Array, scale: float, is_causal: bool, precision: str, out: list[Array | None]) -> None:
    heads, mask = _in_float32(inputs[:3]), inputs[3:]
    query, key, _ = heads
    powers, greatest, _ = _powers_of(query, key, mask[0] if mask else None, scale, is_causal)
    whole = powers.sum(-1, keepdims=True)
    if out[0] is not None:
        attend_heads.compute(*heads, *mask, scale=scale, is_causal=is_causal, out=out[0])
    if out[1] is not None:
        out[1][...] = np.concatenate([greatest, whole], -1).transpose(_HEADS_FIRST)


def _attend_query_gradients(*inputs: Array, scale: float, is_causal: bool, precision: str, out: Array) -> None:
    heads, mask = _in_float32(inputs[:4]), inputs[6:]
    _attend_gradients(*heads, *mask, scale=scale, is_causal=is_causal, out=[out, None, None])


def _attend_key_gradients(
    *inputs: Array, scale: float, is_causal: bool, precision: str, out: list[Array | None]
) -> None:
    heads, mask = _in_float32(inputs[:4]), inputs[6:]
    _attend_gradients(*heads, *mask, scale=scale, is_causal=is_causal, out=[None, *out])


ATTEND_WITH_SUMS = Op(
    _attend_with_sums,
    lambda query, key, value, *mask, **attributes: [(*query[:3], value[3]), (*query[:3], 2)],  # type: ignore[arg-type]
    not_placed,
    lambda query, key, value, *mask, **attributes: [np.promote_types(query, np.float32)] * 2,
    lowering=AttentionKernel("output"),
    operations=lambda output: _operations_of(output, 0, (1, 1), (0, 0)),
    has_values=True,
)
QUERY_GRADIENTS = Op(
    _attend_query_gradients,
    lambda dy, query, *others, **attributes: query,
    not_placed,
    lambda dy, query, *others, **attributes: np.promote_types(query, np.float32),
    lowering=AttentionKernel("queries"),
    operations=lambda output: _operations_of(output, 1, (2, 1)),
)
KEY_GRADIENTS = Op(
    _attend_key_gradients,
    lambda dy, query, key, value, *others, **attributes: [key, value],  # type: ignore[arg-type]
    not_placed,
    lambda dy, query, *others, **attributes: [np.promote_types(query, np.float32)] * 2,
    lowering=AttentionKernel("keys"),
    operations=lambda output: _operations_of(output, 1, (2, 1), (0, 1)),
    has_values=True,
)


@attend_heads.gradient
def _attend(y: Tensor, dy: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    grads = ATTEND_GRADIENTS.values(dy, *inputs, **y.attributes)
    return (*grads, *(None for _ in inputs[3:]))


@ATTEND_GRADIENTS.gradient
def _attend_second_gradients(
    values: Sequence[Tensor], d_values: Sequence[Tensor | None], *inputs: Tensor
) -> tuple[Tensor | None, ...]:
    # Inputs may depend on each other, as dy does on what it is a gradient of: copies are read by nothing else.
    copies = [OPERATORS["identity"](operand) for operand in inputs[:4]]
    first_grads = _composed_gradients([*copies, *inputs[4:]], values[0].attributes)
    parts = [sum_over(grad * d_grad) for grad, d_grad in zip(first_grads, d_values, strict=True) if d_grad is not None]
    return (*gradients(sum(parts[1:], parts[0]), copies), *(None for _ in inputs[4:]))


@operation
@for_open_shapes
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
    """Return softmax(scale query key^T + bias) value, head by head: (batch, targets, heads, value length).

    Scores and softmax of half precision are computed in float32.

    Args:
        query: (batch, targets, heads, length).
        key: (batch, sources, key heads, length); if there are fewer key heads, consecutive query heads share one.
        value: (batch, sources, key heads, value length).
        bias: added to the scores, (batch, heads, targets, sources) or broadcastable to it.
        mask: like bias; a source takes no part where it is false. If it is false for all sources, all count alike.
        scale: of the scores; by default 1 / sqrt(length).
        is_causal: hide sources after a target's position.
        flash_attention: avoid the matrix of scores; None and True alike do so where possible: without bias and soft
            cap, on a GPU for lengths up to 128.
        attn_logits_soft_cap: scores become soft_cap * tanh(scores / soft_cap) before bias and mask.

    Source: A. Vaswani et al., "Attention is all you need", NeurIPS 2017.
    """
    q, k, v = (floating(tensor) for tensor in as_tensors([query, key, value]))
    _check(q, k, v)
    queries_per_key = int(q.shape[2]) // int(k.shape[2])
    if queries_per_key != 1:
        k, v = (repeat(tensor, queries_per_key, 2) for tensor in (k, v))
    factor = 1 / math.sqrt(int(q.shape[-1])) if scale is None else float(scale)
    if flash_attention is not False and bias is None and attn_logits_soft_cap is None:
        masks = [] if mask is None else [_mask_4d(mask, q, k)]
        return attend_heads(q, k, v, *masks, scale=factor, is_causal=bool(is_causal))
    q, k, v = (transpose(tensor, _HEADS_FIRST) for tensor in (q, k, v))
    weights = _weights(q, k, bias, mask, factor, is_causal, attn_logits_soft_cap)
    return transpose(batch_matmul(cast(weights, v.dtype), v), _HEADS_FIRST)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ConfigError(
            f"`dot_product_attention` only supports 4D inputs. Received: query.shape={q.shape}, key.shape={k.shape}, "
            f"value.shape={v.shape}."
        )
    pairs = [*zip(k.shape[:3], v.shape[:3], strict=True), (q.shape[3], k.shape[3])]
    if any(differ(a, b) for a, b in pairs) or q.shape[2] % k.shape[2]:
        raise ConfigError(
            f"dot_product_attention: query, key and value of shapes {q.shape}, {k.shape}, {v.shape} are incompatible"
        )


def _mask_4d(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return a mask with four axes, each of the scores' length or 1."""
    mask_tensor = cast(mask, "bool")
    lengths = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if mask_tensor.ndim > 4 or any(
        not is_one(n) and differ(n, length)
        for n, length in zip(reversed(mask_tensor.shape), reversed(lengths), strict=False)
    ):
        raise ConfigError(f"dot_product_attention: a mask of shape {mask_tensor.shape} for scores of shape {lengths}")
    missing = (1,) * (4 - mask_tensor.ndim)
    return reshape(mask_tensor, (*missing, *mask_tensor.shape)) if missing else mask_tensor


def _weights(
    q: Tensor, k: Tensor, bias: Any, mask: Any, scale: float, is_causal: bool, soft_cap: float | None
) -> Tensor:
    """Return the attention weights (batch, heads, targets, sources)."""
    if is_narrow(q.dtype):
        q, k = cast(q, "float32"), cast(k, "float32")
    scores = batch_matmul(q, transpose(k, (0, 1, 3, 2))) * scale
    if soft_cap is not None:
        scores = tanh(scores / soft_cap) * soft_cap
    if bias is not None:
        scores = scores + cast(bias, scores.dtype)
    for takes_part in _masks(q, k, mask, is_causal):
        scores = where(takes_part, scores, _MASKED_SCORE * float(limits(scores.dtype).max))
    return softmax(scores)


def _masks(q: Tensor, k: Tensor, mask: Any, is_causal: bool) -> list[Tensor]:
    """Return all masks of scores for queries and keys (batch, heads, positions, length)."""
    masks = [] if mask is None else [cast(mask, "bool")]
    return masks + (list(as_tensors([np.tri(int(q.shape[2]), int(k.shape[2]), dtype=np.bool_)])) if is_causal else [])
