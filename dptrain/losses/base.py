"""What a loss is: a number for each sample and its gradient; weights, sums and the divisor are one place's, here."""

from abc import abstractmethod
from typing import Any

from dptrain.backend.base import DIVISOR, LOSS, ROWS, Backend, Buffer, RowSum
from dptrain.errors import ConfigError
from dptrain.metrics import Batch, Mean
from dptrain.registry.names import snake_case
from dptrain.registry.serialization import Configurable

REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")


class Loss(Configurable):
    """A number for each sample of a batch, of which the weighted sum over a divisor is minimised.

    With l the samples' losses and w their weights, a global batch has the loss sum_i w_i l_i / divisor. As by Keras the
    divisor is the number of samples (not the sum of weights) for reduction "sum_over_batch_size" and "mean", the sum of
    weights for "mean_with_sample_weight", and 1 for "sum". Samples that are ignored count in none.

    Args:
        name: as Keras names it; by default the class's name in snake case.
        reduction: one of these.
        dtype: None; losses have the backend's dtype.

    Attributes:
        fused_activation: an activation that the loss computes itself, more exactly, where the model ends in it.
        takes_labels: targets are integer labels, one a sample; otherwise values of the output's shape; None: anything.
        from_logits: the model's outputs are what `fused_activation` would be applied to.
        ignored: a label whose samples are left out, or None.
        fused_metric: a metric that `write` can find the values of in the same pass.

    Raises:
        ConfigError: an argument is not supported.
    """

    fused_activation: str | None = None
    takes_labels: bool | None = False
    from_logits = False
    ignored: int | None = None
    fused_metric: type[Mean] | None = None

    def __init__(
        self,
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: str | None = None,
    ) -> None:
        if reduction is None or reduction == "none":
            raise ConfigError(f"not supported: reduction={reduction!r}; a loss to train with is one number")
        if reduction not in REDUCTIONS:
            raise ConfigError(
                f"Invalid value for argument `reduction`. Expected one of {set(REDUCTIONS)}. Received: "
                f"reduction={reduction}"
            )
        if dtype is not None:
            raise ConfigError(f"not supported: dtype={dtype!r} of a loss; see the dtype of compile()")
        self.reduction = reduction
        self.name = snake_case(type(self).__name__) if name is None else name

    @abstractmethod
    def write(
        self,
        ops: Backend,
        batch: Batch,
        logits: bool,
        dy: Buffer | None,
        values_B: Buffer,
        correct_B: Buffer | None,
    ) -> None:
        """Overwrite values by each sample's loss, and dy, if given, by its gradient in y_pred times batch.weights.

        Args:
            ops: the device.
            batch: outputs and targets.
            logits: y_pred is what `fused_activation` would be applied to.
            dy: (rows, *output_shape), may share y_pred's memory.
            values_B: (rows,).
            correct_B: (rows,) for the values of `fused_metric`, or None; losses without one get None.
        """

    def compute(
        self,
        ops: Backend,
        batch: Batch,
        logits: bool,
        dy: Buffer | None,
        tail: Buffer,
        metric_sum: RowSum | None = None,
    ) -> None:
        """Write the batch's loss, divisor and number of rows into a tail of zeros, and the gradient into dy.

        Args:
            ops: the device.
            batch: what `write` takes.
            logits: the same.
            dy: the same.
            tail: begins with divisor, rows and loss (see `Backend.add_totals`).
            metric_sum: what to sum of the values of `fused_metric`, which `write` then writes.
        """
        values_B = batch.scratch("values of the loss")
        self.write(ops, batch, logits, dy, values_B, None if metric_sum is None else metric_sum.values)
        divisor, weight = tail[DIVISOR : DIVISOR + 1], None
        weighted = self.reduction == "mean_with_sample_weight" and batch.weights is not None
        if self.reduction != "sum" and self.ignored is None and not weighted:
            ops.fill(tail[:LOSS], batch.rows)
        else:
            ops.fill(tail[ROWS:LOSS], batch.rows)
            if self.reduction != "sum" and self.ignored is not None:
                valid_B = batch.scratch("rows that are not ignored")
                ops.labels_other_than(batch.target, self.ignored, valid_B)
                ops.sum_rows(RowSum(valid_B, batch.weights if weighted else None, divisor))
            elif weighted:
                weight = divisor
        sums = [RowSum(values_B, batch.weights, tail[LOSS : LOSS + 1], weight)]
        ops.sum_rows(*sums, *([] if metric_sum is None else [metric_sum]))

    @property
    def depends_on_batches(self) -> bool:
        """Whether an epoch's loss, Keras' mean over batches, depends on how its samples are cut into batches."""
        return self.reduction in ("sum", "mean_with_sample_weight") or self.ignored is not None

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras' `get_config` names them."""
        return {"name": self.name, "reduction": self.reduction}


def smoothing(label_smoothing: float) -> float:
    """Return a label smoothing.

    Raises:
        ConfigError: it is not in [0, 1].
    """
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing = {label_smoothing}: expected a number in [0, 1]")
    return float(label_smoothing)


def last_axis(axis: int) -> None:
    """Refuse another axis than the last.

    Raises:
        ConfigError: it is another.
    """
    if axis != -1:
        raise ConfigError(f"not supported: axis={axis}; expected -1")
