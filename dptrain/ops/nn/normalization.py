"""Normalization of layers, and moments."""

from collections.abc import Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.ops.common import limits
from dptrain.ops.elementwise import (
    cast,
    clip,
    floating,
    in_float32,
    multiply,
    sqrt,
    square,
)
from dptrain.ops.manipulation import reshape
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import mean
from dptrain.program.shapes import normalized_axes
from dptrain.program.tensor import Tensor
from dptrain.runtime.types import type_of

# Keras' `backend.epsilon()`.
_EPSILON = 1e-7


@operation
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


@operation
@in_float32
def rms_normalization(
    x: Any, scale: Any = None, axis: int | Sequence[int] = -1, epsilon: float | None = None
) -> Tensor:
    """Return x over its root mean square over axes, times scale (Zhang and Sennrich, NeurIPS 2019)."""
    tensor = floating(x)
    power = mean(square(tensor), axis, keepdims=True)
    result = tensor / sqrt(power + (_EPSILON if epsilon is None else epsilon))
    return result if scale is None else multiply(result, cast(scale, tensor.dtype))


@operation
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


@operation
def moments(
    x: Any, axes: int | Sequence[int], keepdims: bool = False, synchronized: bool = False
) -> tuple[Tensor, Tensor]:
    """Return mean and variance over axes; over the batch's rows always those of all ranks.

    Half precision is computed in float32 and clamped to the type's greatest number.
    """
    tensor = floating(x)
    wide = cast(tensor, type_of(tensor.dtype).compute)
    center = mean(wide, axes, keepdims=True)
    statistics = mean(wide, axes, keepdims), mean(square(wide - center), axes, keepdims)
    if wide is tensor:
        return statistics
    greatest = float(limits(tensor.dtype).max)
    return cast(clip(statistics[0], -greatest, greatest), tensor.dtype), cast(
        clip(statistics[1], 0, greatest), tensor.dtype
    )
