"""Cross-entropies as metrics; as Keras' they are given the model's outputs and know nothing of its last activation."""

from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError
from dptrain.metrics.base import Batch, Mean


class SparseCategoricalCrossentropy(Mean):
    """-log of the probability at the label; see the loss of that name.

    Args:
        name: its key in logs.
        dtype: as `Metric`.
        from_logits: outputs are logits, else probabilities.
        ignore_class: not supported.
        axis: of classes, -1.

    Raises:
        ConfigError: an argument is not supported.
    """

    direction = "down"

    takes_labels = True

    def __init__(
        self,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: str | None = None,
        from_logits: bool = False,
        ignore_class: int | None = None,
        axis: int = -1,
    ) -> None:
        super().__init__(name, dtype)
        if ignore_class is not None or axis != -1:
            raise ConfigError(f"not supported: ignore_class={ignore_class}, axis={axis} of a metric")
        self.from_logits = from_logits

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """One op."""
        if self.from_logits:
            ops.softmax_cross_entropy(batch.y_pred, batch.target, None, None, None, values_B, None)
        else:
            ops.probability_cross_entropy(batch.y_pred, batch.target, 1.0, 0.0, None, None, None, values_B)

    def config(self) -> dict[str, Any]:
        """Return the arguments."""
        return super().config() | {"from_logits": self.from_logits, "ignore_class": None, "axis": -1}


class CategoricalCrossentropy(Mean):
    """-sum_c target log probability; see the loss of that name.

    Args:
        name: its key in logs.
        dtype: as `Metric`.
        from_logits: outputs are logits, else probabilities.
        label_smoothing: the part of a target that is spread over all classes.
        axis: of classes, -1.

    Raises:
        ConfigError: an argument is not supported.
    """

    direction = "down"

    def __init__(
        self,
        name: str | None = "categorical_crossentropy",
        dtype: str | None = None,
        from_logits: bool = False,
        label_smoothing: float = 0,
        axis: int = -1,
    ) -> None:
        super().__init__(name, dtype)
        if axis != -1:
            raise ConfigError(f"not supported: axis={axis}")
        self.from_logits, self.label_smoothing = from_logits, label_smoothing

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """One op."""
        keep, shift = 1 - self.label_smoothing, self.label_smoothing / batch.y_pred.shape[-1]
        if self.from_logits:
            ops.dense_cross_entropy(batch.y_pred, batch.target, keep, shift, None, None, values_B)
        else:
            ops.probability_cross_entropy(batch.y_pred, batch.target, keep, shift, None, None, None, values_B)

    def config(self) -> dict[str, Any]:
        """Return the arguments."""
        given = {"from_logits": self.from_logits, "label_smoothing": self.label_smoothing, "axis": -1}
        return super().config() | given


class BinaryCrossentropy(Mean):
    """Mean over a sample's outputs of -target log p - (1 - target) log(1 - p); see the loss of that name.

    Args:
        name: its key in logs.
        dtype: as `Metric`.
        from_logits: outputs are logits, else probabilities.
        label_smoothing: the part of a target that becomes 1/2.
    """

    direction = "down"

    def __init__(
        self,
        name: str | None = "binary_crossentropy",
        dtype: str | None = None,
        from_logits: bool = False,
        label_smoothing: float = 0,
    ) -> None:
        super().__init__(name, dtype)
        self.from_logits, self.label_smoothing = from_logits, label_smoothing

    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """One op."""
        kind = "binary_logits" if self.from_logits else "binary"
        keep, shift = 1 - self.label_smoothing, 0.5 * self.label_smoothing
        ops.pointwise_loss(kind, 0.0, *batch.flat, keep, shift, None, None, values_B)

    def config(self) -> dict[str, Any]:
        """Return the arguments."""
        return super().config() | {"from_logits": self.from_logits, "label_smoothing": self.label_smoothing}
