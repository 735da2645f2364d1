"""Intersection over union of predicted and true regions, by class."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.losses.base import weights_like, wide
from dptrain.metrics.base import Metric
from dptrain.ops.nn.cross_entropy import EPSILON
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor


class IoU(Metric):
    """Mean over classes of |both| / |either|, of the samples that have a class and those predicted to have it.

    Classes that occur neither in targets nor in outputs do not count.

    Args:
        num_classes: number of classes.
        target_class_ids: the classes to average over.
        name, dtype: see `Metric`.
        ignore_class: samples of this class do not count.
        sparse_y_true: targets are integer labels, else one-hot.
        sparse_y_pred: outputs are integer labels, else numbers for each class; the greatest counts.
        axis: of the classes, unless labels.
    """

    _direction = "up"
    # The class's constructor arguments.
    _arguments: tuple[str, ...] = (
        *("num_classes", "target_class_ids", "ignore_class", "sparse_y_true", "sparse_y_pred", "axis"),
    )

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str | None = None,
        dtype: str | None = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        super().__init__(dtype or "int32", name)
        self.num_classes, self.target_class_ids = int(num_classes), list(target_class_ids)
        if max(self.target_class_ids) >= self.num_classes:
            raise ConfigError(
                f"Target class id {max(self.target_class_ids)} is out of range, which is [0, {self.num_classes})."
            )
        self.ignore_class, self.axis = ignore_class, axis
        self.sparse_y_true, self.sparse_y_pred = bool(sparse_y_true), bool(sparse_y_pred)
        # Rows are true classes, columns predicted ones.
        self.total_cm = self.add_variable((self.num_classes, self.num_classes), name="total_confusion_matrix")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch: targets and as many outputs, and weights of the targets' shape, or None."""
        true, shape = self._labels(y_true, self.sparse_y_true)
        predicted, _ = self._labels(y_pred, self.sparse_y_pred)
        inside = ops.logical_and(self._is_class(true), self._is_class(predicted))
        if self.ignore_class is not None:
            inside = ops.logical_and(inside, ops.not_equal(true, self.ignore_class))
        counts = ops.cast(inside, np.float64)
        if sample_weight is not None:
            weights = weights_like(ops.reshape(counts, shape), sample_weight)
            counts = counts * ops.reshape(ops.broadcast_to(weights, shape), (-1,))
        rows = ops.one_hot(true, self.num_classes, dtype=np.float64) * ops.expand_dims(counts, -1)
        columns = ops.one_hot(predicted, self.num_classes, dtype=np.float64)
        self.total_cm.assign_add(ops.matmul(ops.transpose(rows), columns))

    def _labels(self, tensor: Any, sparse: bool) -> tuple[Tensor, Shape]:
        """Return integer labels as a vector, and their original shape."""
        values = wide(tensor)
        labels = values if sparse else ops.argmax(values, self.axis)
        return ops.reshape(ops.cast(labels, "int32"), (-1,)), labels.shape

    def _is_class(self, labels: Tensor) -> Tensor:
        return ops.logical_and(labels >= 0, labels < self.num_classes)

    def result(self) -> Tensor:
        """Return the mean."""
        diagonal = np.eye(self.num_classes)
        both = ops.sum(self.total_cm * diagonal, 1)
        either = ops.sum(self.total_cm, 0) + ops.sum(self.total_cm, 1) - both
        chosen = np.asarray(self.target_class_ids, np.int32)
        both, either = ops.take(both, chosen, 0), ops.take(either, chosen, 0)
        counts = either > 1e-9
        total = ops.sum(ops.where(counts, both / (either + EPSILON), 0.0))
        mean: Tensor = total / (ops.sum(ops.cast(counts, np.float64)) + EPSILON)
        return mean

    def _get_config(self) -> dict[str, Any]:
        return super()._get_config() | {name: getattr(self, name) for name in self._arguments}


class BinaryIoU(IoU):
    """`IoU` of classes 0 and 1, the latter where an output is at least `threshold`."""

    _arguments: tuple[str, ...] = ("target_class_ids", "threshold")

    def __init__(
        self,
        target_class_ids: Sequence[int] = (0, 1),
        threshold: float = 0.5,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(2, target_class_ids, name, dtype)
        self.threshold = threshold

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch; see `IoU.update_state`."""
        super().update_state(y_true, ops.cast(wide(y_pred) >= self.threshold, "int32"), sample_weight)


class MeanIoU(IoU):
    """`IoU` of all classes."""

    _arguments: tuple[str, ...] = ("num_classes", "ignore_class", "sparse_y_true", "sparse_y_pred", "axis")

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: str | None = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        arguments = (range(num_classes), name, dtype, ignore_class, sparse_y_true, sparse_y_pred, axis)
        super().__init__(num_classes, *arguments)


class OneHotIoU(IoU):
    """`IoU` of one-hot targets."""

    _arguments: tuple[str, ...] = ("num_classes", "target_class_ids", "ignore_class", "sparse_y_pred", "axis")

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str | None = None,
        dtype: str | None = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ) -> None:
        super().__init__(num_classes, target_class_ids, name, dtype, ignore_class, False, sparse_y_pred, axis)


class OneHotMeanIoU(MeanIoU):
    """`IoU` of all classes, with one-hot targets."""

    _arguments: tuple[str, ...] = ("num_classes", "ignore_class", "sparse_y_pred", "axis")

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: str | None = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ) -> None:
        super().__init__(num_classes, name, dtype, ignore_class, False, sparse_y_pred, axis)
