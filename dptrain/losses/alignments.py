"""Losses of sequences that differ in length from their targets."""

from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.tensor import Tensor, as_tensors


def ctc(y_true: Any, y_pred: Any) -> Tensor:
    """Return the negative log-probability (rows,) of each sequence of labels: `ops.ctc_loss`, with class 0 as blank.

    `y_true` are (rows, labels) integers, padded with 0; `y_pred` (rows, times, classes) scores before a softmax.
    """
    labels, scores = as_tensors([y_true, y_pred])
    if labels.ndim != 2:
        raise ConfigError(
            "Targets `y_true` are expected to be a tensor of shape `(batch_size, max_length)` in integer format. "
            f"Received: y_true.shape={labels.shape}"
        )
    if scores.ndim != 3:
        raise ConfigError(
            "Logits `y_pred` are expected to be a tensor of shape `(batch_size, max_length, num_classes)`. "
            f"Received: y_pred.shape={scores.shape}"
        )
    lengths = ops.cast(ops.sum(ops.not_equal(labels, 0), axis=-1), "int32")
    times = ops.full((scores.shape[0],), int(scores.shape[1]), "int32")
    return ops.ctc_loss(labels, scores, lengths, times)
