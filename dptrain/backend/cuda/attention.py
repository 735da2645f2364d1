"""Attention by kernels/attention.cuh: which shapes it computes, and in which tiles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dptrain.program.codegen.cpp import numel_text
from dptrain.program.lowering import AttentionKernel, lowering_of
from dptrain.program.shapes import Shape, is_one
from dptrain.program.tensor import Tensor
from dptrain.runtime.types import type_of

# Of a block.
ATTENTION_THREADS = 128
# Kept and passing rows of the output and of gradients, by the width that heads have room for, in float32 and on tensor
# cores. Every GPU gives a block so much shared memory; wider heads are composed of other ops.
_TILES = {32: ((64, 32), (32, 32)), 64: ((64, 32), (32, 32)), 128: ((64, 16), (32, 16))}
_HALF_TILES = {32: ((64, 64), (64, 32)), 64: ((64, 64), (64, 32)), 128: ((64, 64), (64, 16))}
# Bytes of shared memory that a kernel has without asking.
_STATIC = 48 * 1024


def attention_precision(operands: Sequence[Tensor], of_halves: str) -> str | None:
    """Return in which precision a kernel computes attention of these heads, or None; `of_halves` as for products."""
    dtype = operands[0].dtype
    if any(operand.dtype != dtype for operand in operands) or not all(
        isinstance(operand.shape[3], int) and 0 < operand.shape[3] <= max(_TILES) for operand in operands
    ):
        return None
    known = type_of(dtype)
    if not known.is_factor or known.compute != np.float32:
        return None
    return "half" if known.is_narrow and of_halves != "float32" else "float32"


@dataclass(frozen=True)
class AttentionCall:
    """A kernel's header, blocks (also at once), C++ of its shared memory, bytes beyond the static limit, and lines."""

    header: str
    blocks: int
    resident: int
    shared: str
    dynamic: int
    lines: list[str]


def attention_call(
    tensor: Tensor, pointers: list[str], values: list[str], scale: str, count: Callable[[Shape], int]
) -> AttentionCall:
    """Return a kernel's call, given names of inputs, of values ("nullptr" of unread ones) and of the scale."""
    lowering = lowering_of(tensor)
    assert isinstance(lowering, AttentionKernel)
    is_output, of_keys = lowering.makes == "output", lowering.makes == "keys"
    q, k, v = tensor.inputs[:3] if is_output else tensor.inputs[1:4]
    without_mask = 3 if is_output else 6
    room = next(width for width in _TILES if max(q.shape[3], v.shape[3]) <= width)
    halves = tensor.attributes["precision"] == "half"
    kept, passing = (_HALF_TILES if halves else _TILES)[room][0 if is_output else 1]
    floats = (kept + passing) * (1 if is_output else 2) * (room + 4) + kept * (passing + 4)
    dynamic = 4 * floats if not halves and 4 * floats > _STATIC else 0
    rows = count(((k if of_keys else q).shape[1],))
    masks, numbers = tensor.inputs[without_mask:], ["0"] * 4
    if masks:
        numbers = [
            "0" if is_one(n) else numel_text(masks[0].shape[axis + 1 :]) for axis, n in enumerate(masks[0].shape)
        ]
    sizes = [numel_text((n,)) for n in (q.shape[2], q.shape[1], k.shape[1], q.shape[3], v.shape[3])]
    fields = [
        *sizes,
        *(pointers[without_mask:] or ["nullptr"]),
        *numbers,
        scale,
        "true" if tensor.attributes["is_causal"] else "false",
    ]
    outs = [value if value != "nullptr" else "(float *)nullptr" for value in values]
    tile = f"{'HalfTile' if halves else 'FloatTile'}, {room}, {kept}, {passing}"
    name = f"attention<{tile}>" if is_output else f"attention_gradients<{'true' if of_keys else 'false'}, {tile}>"
    arguments = ", ".join([*pointers[:without_mask], *outs])
    return AttentionCall(
        f"attention{'_half' if halves else ''}.cuh",
        count((q.shape[0], q.shape[2])) * -(-rows // kept),
        2 if halves else 3,  # with more, some would spill
        f"ATTENTION{'_HALF' if halves else ''}{'' if is_output else '_GRADIENTS'}_SHARED({room}, {kept}, {passing})",
        dynamic,
        [f"const Attention of{{{', '.join(fields)}}};", f"{name}(shared, of, block, {arguments});"],
    )
