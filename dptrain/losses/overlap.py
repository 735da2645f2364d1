"""Losses as functions for unbalanced classes, for regions of images, and for noisy labels."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.losses.functions import pair
from dptrain.ops.nn.cross_entropy import EPSILON, as_labels
from dptrain.program.tensor import Tensor, as_tensors

Axes = int | Sequence[int] | None


def _power(x: Tensor, exponent: float) -> Tensor:
    """Return x to a power; below 1 its gradient at 0 is 0, not infinite.

    What x is a saturated sigmoid's or softmax' distance from 0 or 1 of has a gradient of 0 there, and so has its loss.
    """
    if exponent >= 1 or exponent == 0:
        return ops.power(x, exponent)
    is_positive = x > 0
    return ops.where(is_positive, ops.power(ops.where(is_positive, x, 1.0), exponent), 0.0)


def binary_focal_crossentropy(
    y_true: Any,
    y_pred: Any,
    apply_class_balancing: bool = False,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Return the mean of (1 - p_t)^gamma times the binary cross-entropy, p_t the probability of the right answer.

    Arguments as in `BinaryFocalCrossentropy`; targets are from 0 to 1.

    Source: T. Lin et al., "Focal loss for dense object detection", ICCV 2017.
    """
    target, output = pair(y_true, y_pred)
    if label_smoothing:
        target = target * (1 - label_smoothing) + 0.5 * label_smoothing
    output = ops.sigmoid(output) if from_logits else output
    entropy = ops.binary_crossentropy(target, output)
    right = target * output + (1 - target) * (1 - output)
    focal = _power(1 - right, gamma) * entropy
    if apply_class_balancing:
        focal = (target * alpha + (1 - target) * (1 - alpha)) * focal
    return ops.mean(focal, axis)


def categorical_focal_crossentropy(
    y_true: Any,
    y_pred: Any,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Return -sum over classes of alpha (1 - p)^gamma target log p; see `CategoricalFocalCrossentropy`."""
    target, output = pair(y_true, y_pred)
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / int(target.shape[-1])
    output = ops.softmax(output, axis) if from_logits else output
    p = ops.clip(output / ops.sum(output, axis, keepdims=True), EPSILON, 1 - EPSILON)
    return ops.sum(_power(1 - p, gamma) * alpha * -target * ops.log(p), axis)


def dice(y_true: Any, y_pred: Any, axis: Axes = None) -> Tensor:
    """Return 1 - 2 |both| / (|y_true| + |y_pred|), sizes of regions that are sums over axes, by default all.

    Source: F. Milletari et al., "V-Net", 3DV 2016.
    """
    target, output = pair(y_true, y_pred)
    both = ops.sum(target * output, axis)
    return 1 - 2 * both / (ops.sum(target, axis) + ops.sum(output, axis) + EPSILON)


def tversky(y_true: Any, y_pred: Any, alpha: float = 0.5, beta: float = 0.5, axis: Axes = None) -> Tensor:
    """Return 1 - |both| / (|both| + alpha |y_true alone| + beta |y_pred alone|), like `dice`.

    Source: S. Salehi et al., "Tversky loss function for image segmentation", MLMI 2017; alpha weighs what Keras' does.
    """
    target, output = pair(y_true, y_pred)
    both = ops.sum(target * output, axis)
    missed, false_positive = ops.sum((1 - output) * target, axis), ops.sum(output * (1 - target), axis)
    return 1 - both / (both + missed * alpha + false_positive * beta + EPSILON)


def categorical_generalized_cross_entropy(y_true: Any, y_pred: Any, q: float) -> Tensor:
    """Return (1 - p^q) / q, p the label's probability: less affected by wrong labels than the cross-entropy.

    Labels are (rows, ...) or (rows, ..., 1), probabilities (rows, ..., classes); q is between 0 (cross-entropy) and 1
    (absolute error).

    Source: Z. Zhang and M. Sabuncu, "Generalized cross entropy loss for training with noisy labels", NeurIPS 2018.
    """
    labels, output = as_tensors([y_true, y_pred])
    chosen = ops.one_hot(as_labels(labels, output), int(output.shape[-1]), dtype=output.dtype)
    return (1 - _power(ops.sum(output * chosen, -1), q)) / q
