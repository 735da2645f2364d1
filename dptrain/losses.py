"""Losses: what is minimised, with no device code. A new loss is one class here and one line in the table."""

from abc import ABC, abstractmethod
from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.metrics import Metric, SparseCategoricalAccuracy
from dptrain.registry import lookup


class Loss(ABC):
    """A sum over samples; the mean over the global batch is taken where gradients are divided.

    Attributes:
        name: as Keras names it.
        fused_activation: an activation that the loss computes itself, more exactly, where the model ends in it.
        takes_labels: targets are integer labels, one a sample; otherwise values of the output's shape.
        counts: a metric that `compute` can sum in the same pass, with the same result as the metric's own `update`.
    """

    name: str
    fused_activation: str | None = None
    takes_labels = False
    counts: type[Metric] | None = None

    @abstractmethod
    def compute(
        self,
        ops: Backend,
        y_pred: Buffer,
        target: Buffer,
        dy: Buffer | None,
        loss_sum: Buffer,
        metric_sum: Buffer | None,
    ) -> None:
        """Add the batch's loss to loss_sum (one element) and overwrite dy, if given, by its gradient in y_pred.

        y_pred is the model's output, without its last activation where that is `fused_activation`. Where metric_sum
        (one element) is given, add the batch's sum of the metric `counts` to it; losses that count none get None.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them."""


class SparseCategoricalCrossentropy(Loss):
    """-log of the probability that the model gives to the label; labels are integers, 0 to classes - 1.

    Args:
        from_logits: the model's outputs are logits. If False they must be the model's own softmax (its last
            activation), which is then computed together with the loss; Keras would also accept probabilities of
            another origin, dptrain refuses them.
    """

    name = "sparse_categorical_crossentropy"
    takes_labels = True
    counts = SparseCategoricalAccuracy

    def __init__(self, from_logits: bool = False) -> None:
        self.from_logits = from_logits
        self.fused_activation = None if from_logits else "softmax"

    def compute(
        self,
        ops: Backend,
        y_pred: Buffer,
        target: Buffer,
        dy: Buffer | None,
        loss_sum: Buffer,
        metric_sum: Buffer | None,
    ) -> None:
        """One fused op on logits; whose highest is at the label is known on the way."""
        ops.softmax_cross_entropy(y_pred, target, dy, loss_sum, metric_sum)

    def config(self) -> dict[str, Any]:
        """Return from_logits."""
        return {"from_logits": self.from_logits}


class MeanSquaredError(Loss):
    """Mean over a sample's outputs of (y_pred - target)^2."""

    name = "mean_squared_error"

    def compute(
        self,
        ops: Backend,
        y_pred: Buffer,
        target: Buffer,
        dy: Buffer | None,
        loss_sum: Buffer,
        metric_sum: Buffer | None,
    ) -> None:
        """One fused op."""
        ops.squared_error(y_pred, target, dy, loss_sum)

    def config(self) -> dict[str, Any]:
        """No arguments."""
        return {}


# Names as Keras accepts them; the command line and the test matrix read this table.
LOSSES: dict[str, type[Loss]] = {
    "sparse_categorical_crossentropy": SparseCategoricalCrossentropy,
    "mean_squared_error": MeanSquaredError,
    "mse": MeanSquaredError,
}


def get(identifier: str | Loss) -> Loss:
    """Return the loss of that name with Keras' defaults, or the one given.

    Raises:
        ConfigError: no loss has that name.
    """
    return identifier if isinstance(identifier, Loss) else lookup("loss", identifier, LOSSES)()
