"""Cross-entropies between classes that exclude each other.

Where the model ends in softmax, that is computed together with the loss, from the logits and without overflow. Keras on
PyTorch takes the logarithm of the softmax clipped to [1e-7, 1 - 1e-7] instead: losses differ by less than 1e-6 but for
probabilities outside, where ours goes on to rise and to have a gradient. Outputs of another origin are taken for
probabilities (from_logits=False), divided by their sum and clipped just as by Keras.
"""

from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError
from dptrain.losses.base import Loss, last_axis, smoothing
from dptrain.metrics import Batch, SparseCategoricalAccuracy


class SparseCategoricalCrossentropy(Loss):
    """-log of the probability that the model gives to the label; labels are integers, 0 to classes - 1.

    Args:
        from_logits: the model's outputs are logits, else probabilities.
        ignore_class: samples of this label have no loss and do not count in the divisor; any integer.
        reduction: as `Loss`.
        axis: of classes, -1.
        name: as `Loss`.
        dtype: as `Loss`.

    Raises:
        ConfigError: an argument is not supported.
    """

    takes_labels = True
    fused_activation = "softmax"
    fused_metric = SparseCategoricalAccuracy

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        last_axis(axis)
        if ignore_class is not None and (isinstance(ignore_class, bool) or not isinstance(ignore_class, int)):
            raise ConfigError(f"ignore_class = {ignore_class!r}: expected an integer or None")
        self.from_logits, self.ignored = from_logits, ignore_class

    def write(
        self, ops: Backend, batch: Batch, logits: bool, dy: Buffer | None, values_B: Buffer, correct_B: Buffer | None
    ) -> None:
        """One op; of logits, whose highest is at the label is known on the way."""
        y, labels, weights = batch.y_pred, batch.target, batch.weights
        if logits:
            ops.softmax_cross_entropy(y, labels, weights, self.ignored, dy, values_B, correct_B)
            return
        if correct_B is not None:
            ops.top1_correct(y, labels, correct_B)
        ops.probability_cross_entropy(y, labels, 1.0, 0.0, self.ignored, weights, dy, values_B)

    def config(self) -> dict[str, Any]:
        """Return name, reduction, from_logits and ignore_class."""
        return super().config() | {"from_logits": self.from_logits, "ignore_class": self.ignored}


class CategoricalCrossentropy(Loss):
    """-sum over classes of target times log probability; targets are one-hot or probabilities, (rows, classes).

    Args:
        from_logits: the model's outputs are logits, else probabilities.
        label_smoothing: the part of a target that is spread over all classes, in [0, 1].
        axis: of classes, -1.
        reduction: as `Loss`.
        name: as `Loss`.
        dtype: as `Loss`.

    Raises:
        ConfigError: an argument is out of range or not supported.
    """

    fused_activation = "softmax"

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "categorical_crossentropy",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        last_axis(axis)
        self.from_logits, self.label_smoothing = from_logits, smoothing(label_smoothing)

    def write(
        self, ops: Backend, batch: Batch, logits: bool, dy: Buffer | None, values_B: Buffer, correct_B: Buffer | None
    ) -> None:
        """One op."""
        y, target, weights = batch.y_pred, batch.target, batch.weights
        keep, shift = 1 - self.label_smoothing, self.label_smoothing / y.shape[-1]
        if logits:
            ops.dense_cross_entropy(y, target, keep, shift, weights, dy, values_B)
        else:
            ops.probability_cross_entropy(y, target, keep, shift, None, weights, dy, values_B)

    def config(self) -> dict[str, Any]:
        """Return name, reduction, from_logits, label_smoothing and axis."""
        given = {"from_logits": self.from_logits, "label_smoothing": self.label_smoothing, "axis": -1}
        return super().config() | given
