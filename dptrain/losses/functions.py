"""Losses as functions: y_true and y_pred, both (rows, ..., values), give (rows, ...): a number for each vector."""

import math
from typing import Any

from dptrain import ops
from dptrain.ops.nn.cross_entropy import EPSILON, as_labels
from dptrain.program.shapes import is_one
from dptrain.program.tensor import Tensor, as_tensors, in_double
from dptrain.runtime.types import is_floating


def same_rank(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of the same rank, after dropping a trailing axis of length 1 of the longer one."""
    if first.ndim == second.ndim + 1 and _is_column(first):
        return (first, ops.expand_dims(second, -1)) if second.ndim == 1 else (ops.squeeze(first, -1), second)
    if second.ndim == first.ndim + 1:
        return same_rank(second, first)[::-1] if _is_column(second) else (first, second)
    return first, second


def _is_column(x: Tensor) -> bool:
    return is_one(x.shape[-1])


def pair(y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    """Return both as tensors of y_pred's floating-point type (float32 for integers) and the same rank."""
    target, output = as_tensors([in_double(y_true), y_pred])
    output = output if is_floating(output.dtype) else ops.cast(output, "float32")
    return same_rank(target if target.dtype == output.dtype else ops.cast(target, output.dtype), output)


def mean_squared_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of (y_pred - y_true)^2."""
    target, output = pair(y_true, y_pred)
    return ops.mean(ops.square(output - target), -1)


def mean_absolute_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of |y_pred - y_true|, whose gradient is 0 where they are equal."""
    target, output = pair(y_true, y_pred)
    return ops.mean(ops.absolute(output - target), -1)


def mean_absolute_percentage_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return 100 times the mean of |y_pred - y_true| / max(|y_true|, 1e-7)."""
    target, output = pair(y_true, y_pred)
    return 100 * ops.mean(ops.absolute((target - output) / ops.maximum(ops.absolute(target), EPSILON)), -1)


def mean_squared_logarithmic_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of (log(1 + y_true) - log(1 + y_pred))^2, of values kept at 1e-7 or above."""
    target, output = (ops.log(ops.maximum(x, EPSILON) + 1) for x in pair(y_true, y_pred))
    return ops.mean(ops.square(target - output), -1)


def huber(y_true: Any, y_pred: Any, delta: float = 1.0) -> Tensor:
    """Return the mean of e^2 / 2 where |e| <= delta, else delta |e| - delta^2 / 2, with e = y_pred - y_true.

    Source: P. Huber, "Robust estimation of a location parameter", Annals of Mathematical Statistics 35 (1964).
    """
    target, output = pair(y_true, y_pred)
    error = output - target
    size = ops.absolute(error)
    return ops.mean(ops.where(size <= delta, 0.5 * ops.square(error), delta * size - 0.5 * delta**2), -1)


def log_cosh(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of log(cosh(y_pred - y_true))."""
    target, output = pair(y_true, y_pred)
    size = ops.absolute(output - target)
    return ops.mean(size + ops.softplus(-2.0 * size) - math.log(2), -1)


def cosine_similarity(y_true: Any, y_pred: Any, axis: int = -1) -> Tensor:
    """Return minus the cosine of the angle between y_true and y_pred; 0 where either is 0."""
    target, output = (x / ops.sqrt(ops.maximum(_squares(x, axis), EPSILON**2)) for x in pair(y_true, y_pred))
    return -ops.sum(target * output, axis)


def _squares(x: Tensor, axis: int) -> Tensor:
    return ops.sum(ops.square(x), axis, keepdims=True)


def _signs(y_true: Tensor) -> Tensor:
    """Return classes -1 and 1: the targets themselves, unless all are 0 or 1."""
    binary = ops.logical_or(ops.equal(y_true, 0), ops.equal(y_true, 1))
    return ops.where(ops.equal(ops.min(ops.cast(binary, y_true.dtype), initial=1), 1), 2 * y_true - 1, y_true)


def hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of max(1 - y_true y_pred, 0); targets are -1 and 1, or 0 and 1."""
    target, output = pair(y_true, y_pred)
    return ops.mean(ops.maximum(1 - _signs(target) * output, 0), -1)


def squared_hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of max(1 - y_true y_pred, 0)^2; targets as in `hinge`."""
    target, output = pair(y_true, y_pred)
    return ops.mean(ops.square(ops.maximum(1 - _signs(target) * output, 0)), -1)


def categorical_hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Return max(1 + greatest output of a wrong class - that of the right class, 0); targets are one-hot."""
    target, output = pair(y_true, y_pred)
    right, wrong = ops.sum(target * output, -1), ops.max((1 - target) * output, -1)
    return ops.maximum(wrong - right + 1, 0)


def kl_divergence(y_true: Any, y_pred: Any) -> Tensor:
    """Return the sum of y_true log(y_true / y_pred), of values kept in [1e-7, 1]."""
    target, output = (ops.clip(x, EPSILON, 1) for x in pair(y_true, y_pred))
    return ops.sum(target * ops.log(target / output), -1)


def poisson(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of y_pred - y_true log(y_pred + 1e-7)."""
    target, output = pair(y_true, y_pred)
    return ops.mean(output - target * ops.log(output + EPSILON), -1)


def categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0, axis: int = -1
) -> Tensor:
    """Return -sum over classes of target times log probability; see `ops.categorical_crossentropy`.

    `label_smoothing` is the part of a target that is spread over all classes.
    """
    target, output = pair(y_true, y_pred)
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / int(output.shape[axis])
    return ops.categorical_crossentropy(target, output, from_logits, axis)


def sparse_categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, ignore_class: int | None = None, axis: int = -1
) -> Tensor:
    """Return -log of the label's probability; see `ops.sparse_categorical_crossentropy`.

    `y_true` are labels (rows, ...) or (rows, ..., 1); those equal to `ignore_class` have the loss 0.
    """
    labels, output = as_tensors([y_true, y_pred])
    if ignore_class is None:
        return ops.sparse_categorical_crossentropy(labels, output, from_logits, axis)
    labels = as_labels(labels, output)
    counts = ops.not_equal(labels, ignore_class)  # the ignored one may be no class, such as -1
    losses = ops.sparse_categorical_crossentropy(ops.where(counts, labels, 0), output, from_logits, axis)
    return ops.where(counts, losses, 0)


def binary_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0, axis: int = -1
) -> Tensor:
    """Return the mean over `axis` of -target log p - (1 - target) log(1 - p); see `ops.binary_crossentropy`.

    Targets are from 0 to 1; `label_smoothing` is the part of them that becomes 1/2.
    """
    target, output = pair(y_true, y_pred)
    if label_smoothing:
        target = target * (1 - label_smoothing) + 0.5 * label_smoothing
    return ops.mean(ops.binary_crossentropy(target, output, from_logits), axis)
