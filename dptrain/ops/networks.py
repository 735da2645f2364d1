"""Building blocks of layers: normalization, multi-hot vectors, top k."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.ops.elementwise import (
    cast,
    equal,
    floating,
    in_float32,
    logical_and,
    logical_not,
    logical_or,
    multiply,
    sqrt,
    square,
    where,
)
from dptrain.ops.indexing import one_hot
from dptrain.ops.manipulation import reshape, stack, zeros_like
from dptrain.ops.reduction import argmax, max, mean
from dptrain.ops.rounding import isnan
from dptrain.ops.sorting import along_last
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor, as_tensors

# Keras' `backend.epsilon()`.
_EPSILON = 1e-7


@in_float32
def layer_normalization(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    axis: int | Sequence[int] = -1,
    epsilon: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return x with mean 0 and variance 1 over axes, times gamma, plus beta.

    Args:
        x: a tensor or an array.
        gamma, beta: of the length of the axis, or broadcastable to x; 1 and 0 by default.
        axis: one axis or several.
        epsilon: added to the variance; 1e-7 by default.
        kwargs: `rms_scaling`: divide by the deviation alone, without the mean and beta.

    Source: J. Ba et al., "Layer normalization", 2016.
    """
    rms_scaling = kwargs.pop("rms_scaling", False)
    if kwargs:
        raise ConfigError(f"layer_normalization: unknown argument {next(iter(kwargs))!r}")
    tensor = floating(x)
    axes = normalized_axes(axis, tensor.ndim)
    centered = tensor - mean(tensor, axes, keepdims=True)
    variance = mean(square(centered), axes, keepdims=True)
    result = (tensor if rms_scaling else centered) / sqrt(variance + (_EPSILON if epsilon is None else epsilon))
    are_last = axes == tuple(range(tensor.ndim - len(axes), tensor.ndim))

    def along(vector: Any) -> Tensor:
        weights = cast(vector, tensor.dtype)
        is_broadcast = weights.ndim == tensor.ndim or (are_last and len(axes) in (1, weights.ndim))
        return weights if is_broadcast else _along(weights, tensor, axes)

    result = result if gamma is None else result * along(gamma)
    return result if beta is None or rms_scaling else result + along(beta)


def _along(vector: Any, x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return a vector in x's type and in a shape that broadcasts along axes of x."""
    lengths = [1 if n not in axes else -1 if len(axes) == 1 else length for n, length in enumerate(x.shape)]
    return reshape(cast(vector, x.dtype), lengths)


@in_float32
def rms_normalization(
    x: Any, scale: Any = None, axis: int | Sequence[int] = -1, epsilon: float | None = None
) -> Tensor:
    """Return x over its root mean square over axes, times scale (Zhang and Sennrich, NeurIPS 2019)."""
    tensor = floating(x)
    power = mean(square(tensor), axis, keepdims=True)
    result = tensor / sqrt(power + (_EPSILON if epsilon is None else epsilon))
    return result if scale is None else multiply(result, cast(scale, tensor.dtype))


@in_float32
def batch_normalization(
    x: Any, mean: Any, variance: Any, axis: int, offset: Any = None, scale: Any = None, epsilon: float = 1e-3
) -> Tensor:
    """Return (x - mean) / sqrt(variance + epsilon) * scale + offset; all four are vectors along an axis of x."""
    tensor = floating(x)
    axes = normalized_axes(axis, tensor.ndim)
    result = (tensor - _along(mean, tensor, axes)) / sqrt(_along(variance, tensor, axes) + epsilon)
    result = result if scale is None else result * _along(scale, tensor, axes)
    return result if offset is None else result + _along(offset, tensor, axes)


def multi_hot(
    inputs: Any,
    num_classes: int | None = None,
    axis: int = -1,
    dtype: npt.DTypeLike | None = None,
    sparse: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Return 1 for each class among a sample's labels, else 0, by default in float32.

    Args:
        inputs: (rows, labels) or (labels,); labels outside 0 to num_classes - 1 do not count.
        num_classes: required.
        axis: of classes in the result.
        dtype: of the result.
        sparse, kwargs: not supported.
    """
    if num_classes is None or kwargs:
        raise ConfigError(f"multi_hot: num_classes={num_classes}{f', {kwargs}' if kwargs else ''}; expected a number")
    vectors = one_hot(inputs, num_classes, axis, dtype, sparse)
    return max(vectors, 1 if vectors.ndim > 2 else 0)


def top_k(x: Any, k: int, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k greatest elements along the last axis, always descending, and their indices (int32).

    Of equal elements the first comes first; NaN counts as the greatest. It takes k passes; k is a known number.
    """
    (tensor,) = as_tensors([x])
    length = int(tensor.shape[-1]) if tensor.ndim else 0
    if not 0 <= k <= length:
        raise ConfigError(f"top_k: k={k}; expected 0 to {length}, the length of the last axis")
    least = (
        -math.inf if tensor.dtype.kind in "fV" else int(np.iinfo(tensor.dtype).min) if tensor.dtype.kind != "b" else 0
    )
    chosen, places = zeros_like(tensor, "bool"), []
    for _ in range(k):
        remaining = where(chosen, least, tensor)
        greatest = max(remaining, -1, keepdims=True)
        candidates = logical_and(logical_or(equal(tensor, greatest), isnan(tensor)), logical_not(chosen))
        places.append(argmax(cast(candidates, "int32"), -1))
        chosen = logical_or(chosen, one_hot(places[-1], length, dtype="bool"))
    if not places:
        empty = tensor[..., :0]
        return empty, cast(empty, "int32")
    indices = stack(places, -1)
    return along_last(tensor, indices), cast(indices, "int32")
