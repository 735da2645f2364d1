"""What a metric is: a vector of sums over samples on the device, and a number made of it on the host.

The vectors of all metrics are a part of the message that also carries the gradients, so that global values cost no
message of their own, and the sum over any number of ranks is exact: a metric may only ever add to its state.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer, RowSum
from dptrain.registry.names import snake_case
from dptrain.registry.serialization import Configurable


@dataclass(slots=True)  # made at every step: freezing it would cost more than the step's sums
class Batch:
    """The samples of a batch at hand, as losses and metrics see them.

    Attributes:
        y_pred: the model's outputs, (rows, *output_shape).
        target: (rows,) int64 labels or (rows, *output_shape) values.
        weights: (rows,) sample weights, or None where every sample counts as one.
        scratch: `scratch(name, shape, dtype)` returns memory of (rows, *shape), by default one number a row of the
            backend's dtype; what is in it holds until the next user of that name.
    """

    y_pred: Buffer
    target: Buffer
    weights: Buffer | None
    scratch: Callable[..., Buffer]

    @property
    def rows(self) -> int:
        """Number of samples."""
        return int(self.y_pred.shape[0])

    @property
    def flat(self) -> tuple[Buffer, Buffer]:
        """Outputs and target values, (rows, features) each."""
        return self.y_pred.reshape(self.rows, -1), self.target.reshape(self.rows, -1)


class Metric(Configurable):
    """A number about samples, made of sums over them.

    Args:
        name: its key in logs; by default the class's name in snake case, numbered, as by Keras.
        dtype: kept for Keras' configurations; sums over an epoch are made in float64.

    Attributes:
        size: elements of the state.
        takes_labels: targets are integer labels; otherwise values of the output's shape.
        takes_logits: outputs before a final softmax give the same result, so that none need be computed.
        direction: "up" or "down" where the metric gets better; None where nobody knows.
    """

    size = 2
    direction: str | None = None
    takes_labels = False
    takes_logits = False

    def __init__(self, name: str | None = None, dtype: str | None = None) -> None:
        self.name = _numbered(snake_case(type(self).__name__)) if name is None else name
        self.dtype = dtype or "float32"

    def takes_outputs_before(self, activation: str | None) -> bool:
        """Return whether the metric is right on outputs before that last activation, which a loss may leave out.

        Args:
            activation: of the last layer, where the loss computes it itself; None where outputs are complete.
        """
        return activation is None or (self.takes_logits and activation == "softmax")

    @abstractmethod
    def update(self, ops: Backend, batch: Batch, state: Buffer) -> None:
        """Add the batch's sums to the state, (size,) of the backend's dtype. Backend ops alone."""

    @abstractmethod
    def result(self, state: npt.NDArray[np.float64], rows: float) -> float:
        """Return the metric's value.

        Args:
            state: (size,) sums over an epoch's samples of all ranks.
            rows: their number.
        """

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras' `get_config` names them."""
        return {"name": self.name, "dtype": self.dtype}


class Mean(Metric):
    """The mean of one number a sample, weighted where there are weights; the state is [sum, sum of weights].

    A metric of this kind is a subclass that writes the number. (Keras' `Mean`, which is
    fed with values by hand, is `MeanTracker` here.)
    """

    size = 2

    @abstractmethod
    def values(self, ops: Backend, batch: Batch, values_B: Buffer) -> None:
        """Overwrite values, one a row."""

    def update(self, ops: Backend, batch: Batch, state: Buffer) -> None:
        """Sum the values."""
        values_B = batch.scratch("values of metrics")
        self.values(ops, batch, values_B)
        ops.sum_rows(self.row_sum(values_B, batch.weights, state))

    def row_sum(self, values_B: Buffer, weights_B: Buffer | None, state: Buffer) -> RowSum:
        """Return what is to be summed once the values are there."""
        return RowSum(values_B, weights_B, state[:1], state[1:2])

    def result(self, state: npt.NDArray[np.float64], rows: float) -> float:
        """Return the mean, 0 of nothing."""
        return ratio(state[0], state[1])


def ratio(part: float, whole: float) -> float:
    """Return part / whole, and 0 where whole is 0."""
    return float(part / whole) if whole else 0.0


# How many metrics have been given a name, by that name.
_taken: Counter[str] = Counter()


def _numbered(name: str) -> str:
    _taken[name] += 1
    return name if _taken[name] == 1 else f"{name}_{_taken[name] - 1}"
