"""Metrics of right answers as functions: (rows, ...) of 1 where an answer is right, else 0."""

from typing import Any

from dptrain import ops
from dptrain.losses.functions import pair
from dptrain.ops.cross_entropy import as_labels, softmax_logits
from dptrain.program.tensor import Tensor, as_tensors


def _as(answers: Tensor, output: Tensor) -> Tensor:
    """Return whether answers are right in the outputs' floating-point type, in which they meet their weights."""
    return ops.cast(answers, output.dtype if output.dtype.kind in "fV" else "float32")


def accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return whether each output equals the target."""
    target, output = pair(y_true, y_pred)
    return _as(ops.equal(target, output), output)


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> Tensor:
    """Return whether each output is above the threshold just where the target is 1."""
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
    """Return whether fewer than k outputs are above that where the highest target is."""
    return sparse_top_k_categorical_accuracy(ops.argmax(y_true, -1), y_pred, k)


def sparse_top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> Tensor:
    """Return whether fewer than k outputs are above that at the label."""
    labels, output = as_tensors([y_true, y_pred])
    return _as(ops.in_top_k(as_labels(labels, output), output, k), output)
