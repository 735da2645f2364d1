"""Cross-entropy between yes and no, of each output by itself."""

from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.losses.base import Loss, last_axis, smoothing
from dptrain.metrics import Batch


class BinaryCrossentropy(Loss):
    """Mean over a sample's outputs of -target log p - (1 - target) log(1 - p).

    Where the model ends in a sigmoid, that is computed together with the loss, from the logits; p of another origin is
    clipped to [1e-7, 1 - 1e-7] as by Keras. What differs from Keras on PyTorch is said in `categorical`.

    Args:
        from_logits: the model's outputs are logits, p = sigmoid(output), else p.
        label_smoothing: the part of a target that becomes 1/2, in [0, 1].
        axis: that the mean is over, -1.
        reduction: as `Loss`.
        name: as `Loss`.
        dtype: as `Loss`.

    Raises:
        ConfigError: an argument is out of range or not supported.
    """

    fused_activation = "sigmoid"

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "binary_crossentropy",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        last_axis(axis)
        self.from_logits, self.label_smoothing = from_logits, smoothing(label_smoothing)

    def write(
        self, ops: Backend, batch: Batch, logits: bool, dy: Buffer | None, values_B: Buffer, correct_B: Buffer | None
    ) -> None:
        """One op."""
        kind = "binary_logits" if logits else "binary"
        keep, shift = 1 - self.label_smoothing, 0.5 * self.label_smoothing
        dy = None if dy is None else dy.reshape(batch.rows, -1)
        ops.pointwise_loss(kind, 0.0, *batch.flat, keep, shift, batch.weights, dy, values_B)

    def config(self) -> dict[str, Any]:
        """Return name, reduction, from_logits, label_smoothing and axis."""
        given = {"from_logits": self.from_logits, "label_smoothing": self.label_smoothing, "axis": -1}
        return super().config() | given
