"""Metrics as functions: correctness, (rows, ...) of 1 and 0, and correlations."""

from typing import Any

from dptrain import ops
from dptrain.losses.functions import pair
from dptrain.ops.nn.cross_entropy import as_labels, softmax_logits
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import is_floating


def _as(answers: Tensor, output: Tensor) -> Tensor:
    """Cast answers to the outputs' floating-point type, in which they meet their weights."""
    return ops.cast(answers, output.dtype if is_floating(output.dtype) else "float32")


def accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return whether each output equals the target."""
    target, output = pair(y_true, y_pred)
    return _as(ops.equal(target, output), output)


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> Tensor:
    """Return whether each output is above the threshold if, and only if, the target is 1."""
    target, output = pair(y_true, y_pred)
    return _as(ops.equal(target, ops.cast(output > threshold, target.dtype)), output)


def categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return whether the highest output, the first of equals, is where the highest target is."""
    return sparse_categorical_accuracy(ops.argmax(y_true, -1), y_pred)


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return whether the highest output, the first of equals, is at the label."""
    labels, output = as_tensors([y_true, y_pred])
    logits = softmax_logits(output)
    highest = ops.argmax(output if logits is None else logits, -1)
    return _as(ops.equal(as_labels(labels, output), highest), output)


def top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> Tensor:
    """Return whether fewer than k outputs are above the output at the highest target."""
    return sparse_top_k_categorical_accuracy(ops.argmax(y_true, -1), y_pred, k)


def sparse_top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5, from_sorted_ids: bool = False) -> Tensor:
    """Return whether fewer than k outputs are above that at the label; or whether it is among the first k ids."""
    labels, output = as_tensors([y_true, y_pred])
    if from_sorted_ids:
        ids = output[..., :k]
        matches = ops.equal(ops.expand_dims(as_labels(labels, output), -1), ops.cast(ids, "int32"))
        return ops.cast(ops.any(matches, -1), "float32")
    return _as(ops.in_top_k(as_labels(labels, output), output, k), output)


def pearson_correlation(y_true: Any, y_pred: Any, axis: int = -1) -> Tensor:
    """Return the correlation of targets and outputs along an axis, -1 to 1; NaN where either is constant."""
    target, output = pair(y_true, y_pred)
    target, output = (x - ops.mean(x, axis, keepdims=True) for x in (target, output))
    both = ops.mean(target * output, axis)
    return both / (ops.sqrt(ops.mean(ops.square(target), axis)) * ops.sqrt(ops.mean(ops.square(output), axis)))


def concordance_correlation(y_true: Any, y_pred: Any, axis: int = -1) -> Tensor:
    """Return the concordance of targets and outputs along an axis, -1 to 1; 1 only where they are equal.

    Source: L. Lin, "A concordance correlation coefficient to evaluate reproducibility", Biometrics 45 (1989).
    """
    target, output = pair(y_true, y_pred)
    apart = ops.mean(target, axis) - ops.mean(output, axis)
    centred = [x - ops.mean(x, axis, keepdims=True) for x in (target, output)]
    both = ops.mean(centred[0] * centred[1], axis)
    return 2 * both / (ops.var(target, axis) + ops.var(output, axis) + ops.square(apart) + 1e-7)
