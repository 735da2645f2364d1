"""Distances and correlations of rows, and einops' `rearrange`."""

import math
import re
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.arrays import flip
from dptrain.ops.elementwise import floating, sqrt, square, where
from dptrain.ops.manipulation import expand_dims, reshape, transpose
from dptrain.ops.math.roots import root_of_squares
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.ops.operation_calls import operation
from dptrain.ops.padding import pad
from dptrain.ops.products import batch_matmul, matmul
from dptrain.ops.reduction import mean, sum
from dptrain.ops.signal import extract_sequences
from dptrain.program.tensor import Tensor, as_tensors


@operation
def cdist(x: Any, y: Any) -> Tensor:
    """Return distances of rows: (..., m, n) and (..., k, n) make (..., m, k); their gradient is 0 where they are 0."""
    a, b = (floating(tensor) for tensor in as_tensors([x, y]))
    if a.ndim < 2 or b.ndim < 2:
        raise ConfigError("`cdist` inputs must have rank >= 2")
    if int(a.shape[-1]) != int(b.shape[-1]):
        raise ConfigError("Last dimension of inputs to `cdist` must match")
    squares = sum(square(expand_dims(a, -2) - expand_dims(b, -3)), -1)
    return root_of_squares(squares)


@operation
def corrcoef(x: Any) -> Tensor:
    """Return the correlations of a matrix' rows: (m, n) makes (m, m), a vector 1; integers become float32."""
    tensor = floating(x)
    rows = tensor if tensor.ndim > 1 else expand_dims(tensor, 0)
    if rows.ndim != 2:
        raise ConfigError(f"corrcoef: shape {tensor.shape}; expected a vector or a matrix")
    centered = rows - mean(rows, -1, keepdims=True)
    products = batch_matmul(centered, transpose(centered))
    deviation = sqrt(sum(square(centered), -1, keepdims=True))
    correlations = products / deviation / transpose(deviation)
    correlations = where(correlations > 1, 1.0, where(correlations < -1, -1.0, correlations))
    return correlations if tensor.ndim > 1 else reshape(correlations, ())


@operation
@for_open_shapes
def correlate(x1: Any, x2: Any, mode: str = "valid") -> Tensor:
    """Return the cross-correlation of two vectors (m,) and (n,).

    `mode` is "valid" where the shorter lies within the longer, max(m, n) - min(m, n) + 1 sums; "same", max(m, n) of
    them; or "full", all m + n - 1.
    """
    a, b = as_tensors([x1, x2])
    if a.ndim != 1 or b.ndim != 1 or not int(a.shape[0]) or not int(b.shape[0]):
        raise ConfigError(f"correlate: shapes {a.shape} and {b.shape}; expected vectors with elements")
    if mode not in ("valid", "same", "full"):
        raise ConfigError(f"correlate: mode={mode!r}; expected 'valid', 'same' or 'full'")
    m, n = int(a.shape[0]), int(b.shape[0])
    a, b = floating(a), floating(b)
    swapped = m < n
    if swapped:
        a, b, m, n = b, a, n, m
    full = matmul(extract_sequences(pad(a, [(n - 1, n - 1)]), n, 1), b)
    full = flip(full, 0) if swapped else full
    if mode == "full":
        return full
    length = m if mode == "same" else m - n + 1
    start = (n - 1) // 2 if mode == "same" else n - 1
    if mode == "same" and swapped:  # NumPy's middle of an even length depends on the order of operands
        start = m + n - 1 - m - start
    return full[start : start + length]


@operation
def rearrange(tensor: Any, pattern: str, **axes_lengths: int) -> Tensor:
    """Permute, split and join axes, as einops does.

    Args:
        tensor: a tensor or an array.
        pattern: such as "b (h p) c -> b h (p c)": names of axes; parentheses split or join.
        axes_lengths: of split axes; all but one in each pair of parentheses.
    """
    (x,) = as_tensors([tensor])
    sides = re.split(r"\s*->\s*", pattern)
    if len(sides) != 2:
        raise ConfigError(f"rearrange: pattern {pattern!r}; expected 'axes -> axes'")
    source_groups, target_groups = (
        [re.findall(r"\w+", group) for group in re.findall(r"\w+|\(.*?\)", side)] for side in sides
    )
    names = [name for group in source_groups for name in group]
    target = [name for group in target_groups for name in group]
    if len(source_groups) != x.ndim or sorted(names) != sorted(target) or len(set(names)) < len(names):
        raise ConfigError(f"rearrange: pattern {pattern!r} for shape {x.shape}; expected each axis once on each side")
    lengths: dict[str, Any] = {}
    for group, length in zip(source_groups, x.shape, strict=True):
        given_lengths = [axes_lengths[name] for name in group if name in axes_lengths]
        open_names = [name for name in group if name not in axes_lengths]
        product = int(np.prod(given_lengths, dtype=np.int64))
        if (
            len(open_names) > 1
            or (given_lengths and int(length) % max(product, 1))
            or (not open_names and product != length)
        ):
            raise ConfigError(
                f"rearrange: ({' '.join(group)}) with {axes_lengths} does not multiply to a length of {int(length)}"
            )
        lengths |= {name: axes_lengths[name] for name in group if name in axes_lengths}
        lengths |= {name: length // product if given_lengths else length for name in open_names}
    x = reshape(x, tuple(lengths[name] for name in names))
    x = transpose(x, [names.index(name) for name in target])
    return reshape(x, tuple(math.prod((lengths[name] for name in group), start=1) for group in target_groups))
