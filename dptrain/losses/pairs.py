"""Losses of pairs: each sample of the global batch with all of them, on any number of ranks."""

from typing import Any

import numpy as np

from dptrain import ops
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import is_floating


def circle(
    y_true: Any,
    y_pred: Any,
    ref_labels: Any = None,
    ref_embeddings: Any = None,
    remove_diagonal: bool = True,
    gamma: float = 80,
    margin: float = 0.4,
) -> Tensor:
    """Return log(1 + sum_p e^a_p sum_n e^b_n) for each sample, p and n those that it is compared with.

    p are of the same label, n of others; without either the loss is 0. With d = max(1 - cosine, 0), the distance of two
    embeddings, and the margin m, a = gamma (d + m) (d - m) and b = gamma max(1 + m - d, 0) (1 - m - d).

    Source: Y. Sun et al., "Circle loss: a unified perspective of pair similarity optimization", CVPR 2020.

    Args:
        y_true: integer labels, (rows,) or (rows, 1).
        y_pred: embeddings of length 1, (rows, features), like those of `UnitNormalization`.
        ref_labels, ref_embeddings: those compared with, (references, features); by default y_true and y_pred of the
            whole batch.
        remove_diagonal: do not pair the n-th sample with the n-th reference, by default itself.
        gamma: factor of similarities.
        margin: m.
    """
    labels, output = as_tensors([y_true, y_pred])
    labels, output = _flat(labels), output if is_floating(output.dtype) else ops.cast(output, "float32")
    (others,) = as_tensors([output if ref_embeddings is None else ref_embeddings])
    their_labels = labels if ref_labels is None else _flat(ref_labels)
    distance = ops.maximum(1 - ops.matmul(output, ops.transpose(others)), 0)
    same = ops.equal(ops.expand_dims(labels, 1), their_labels)
    different = ops.logical_not(same)
    if remove_diagonal:
        itself = np.eye(int(output.shape[0]), int(others.shape[0]), dtype=np.bool_)
        same = ops.logical_and(same, np.logical_not(itself))
    near = gamma * (margin + distance) * (distance - margin)
    far = gamma * ops.maximum(1 + margin - distance, 0) * (1 - margin - distance)
    return ops.softplus(_logsumexp(same, near) + _logsumexp(different, far))


def _flat(labels: Any) -> Tensor:
    return ops.reshape(ops.cast(labels, "int64"), (-1,))


def _logsumexp(mask: Tensor, x: Tensor) -> Tensor:
    """Return log(sum(e^x)) of each row over the mask."""
    return ops.logsumexp(ops.where(mask, x, -np.inf), axis=1)
