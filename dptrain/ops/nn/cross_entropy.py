"""Cross-entropies, element by element or class by class.

The output of a softmax or sigmoid knows its input (`Tensor.logits`), so that its logarithm is exact; other
probabilities are clipped to [1e-7, 1 - 1e-7] as in Keras. Keras on PyTorch clips all: losses differ by less than 1e-6
except for probabilities outside that range, where ours still has a gradient.
"""

import math
from typing import Any

from dptrain.errors import ConfigError
from dptrain.ops.arrays import moveaxis
from dptrain.ops.elementwise import cast, clip, log, logical_and, logical_not, softplus, where
from dptrain.ops.indexing import one_hot, take_along_last
from dptrain.ops.manipulation import squeeze
from dptrain.ops.math.rounding import isnan
from dptrain.ops.operation_calls import operation
from dptrain.ops.reduction import log_softmax, max, sum
from dptrain.program.shapes import is_one, normalized_axes, without_rows
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import is_floating

EPSILON = 1e-7


def softmax_logits(y: Tensor) -> Tensor | None:
    """Return the input of the softmax that made y, or None."""
    return None if y.squashed_by == "sigmoid" else y.logits


def _log_probabilities(output: Tensor, from_logits: bool) -> Tensor:
    logits = output if from_logits else softmax_logits(output)
    if logits is not None:
        return log_softmax(logits)
    return log(clip(output / sum(output, -1, keepdims=True), EPSILON, 1 - EPSILON))


def _checked(target: Any, output: Any, axis: int = -1) -> tuple[Tensor, Tensor]:
    """Return targets and outputs with the axis of classes last."""
    y_true, y_pred = as_tensors([target, output])
    y_pred = y_pred if is_floating(y_pred.dtype) else cast(y_pred, "float32")
    (place,) = normalized_axes(axis, y_pred.ndim) if y_pred.ndim else (-1,)
    if place == y_pred.ndim - 1:
        return y_true, y_pred
    return moveaxis(y_true, place, -1) if y_true.ndim == y_pred.ndim else y_true, moveaxis(y_pred, place, -1)


def _require_same_shape(target: Tensor, output: Tensor) -> None:
    if target.shape != output.shape:
        raise ConfigError(
            "Arguments `target` and `output` must have the same shape. Received: "
            f"target.shape={without_rows(target.shape)}, output.shape={without_rows(output.shape)}"
        )


@operation
def categorical_crossentropy(target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Tensor:
    """Return -sum over classes of target times log probability.

    Args:
        target: (..., classes), one-hot or probabilities.
        output: of target's shape: probabilities, which are normalized, or with `from_logits` logits.
        from_logits: see `output`.
        axis: of classes.
    """
    y_true, y_pred = _checked(target, output, axis)
    _require_same_shape(y_true, y_pred)
    return -sum(cast(y_true, y_pred.dtype) * _log_probabilities(y_pred, from_logits), -1)


@operation
def sparse_categorical_crossentropy(target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Tensor:
    """Return -log of the label's probability.

    Args:
        target: (...) or (..., 1) labels, floats allowed; labels outside 0 to classes - 1 give 0.
        output, from_logits, axis: see `categorical_crossentropy`.
    """
    y_true, y_pred = _checked(target, output, axis)
    labels = as_labels(y_true, y_pred)
    if labels.shape != y_pred.shape[:-1]:
        raise ConfigError(
            "Arguments `target` and `output` must have the same shape up until the last dimension: "
            f"target.shape={without_rows(y_true.shape)}, output.shape={without_rows(y_pred.shape)}"
        )
    labels = cast(labels, "int64") if is_floating(labels.dtype) else labels
    return -take_along_last(_log_probabilities(y_pred, from_logits), labels)


@operation
def binary_crossentropy(target: Any, output: Any, from_logits: bool = False) -> Tensor:
    """Return -target log p - (1 - target) log(1 - p); `output` is p, or with `from_logits` the logits of p."""
    y_true, y_pred = _checked(target, output)
    _require_same_shape(y_true, y_pred)
    y_true = cast(y_true, y_pred.dtype)
    logits = y_pred if from_logits else y_pred.logits if y_pred.squashed_by == "sigmoid" else None
    if logits is not None:
        return y_true * softplus(-logits) + (1 - y_true) * softplus(logits)
    p = clip(y_pred, EPSILON, 1 - EPSILON)
    return -(y_true * log(p) + (1 - y_true) * log(1 - p))


def as_labels(y_true: Tensor, y_pred: Tensor) -> Tensor:
    """Return labels without a trailing axis of length 1."""
    column = y_true.ndim == y_pred.ndim and is_one(y_true.shape[-1])
    return squeeze(y_true, -1) if column else y_true


@operation
def in_top_k(targets: Any, predictions: Any, k: int) -> Tensor:
    """Return whether fewer than k predictions (..., classes) are above the target's; NaN there is the least of all.

    So is the prediction for targets outside 0 to classes - 1.
    """
    labels, scores = as_tensors([targets, predictions])
    chosen = one_hot(labels, int(scores.shape[-1]), dtype="bool")
    at_label = max(where(logical_and(chosen, logical_not(isnan(scores))), scores, -math.inf), -1, keepdims=True)
    return sum(cast(scores > at_label, "int64"), -1) < k
