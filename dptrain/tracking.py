"""Means that a training step of your own keeps: sums on the device, read when somebody looks.

A mean is a sum and a count. Both are sums over the samples of all ranks, so that the mean is that of the whole global
batch, and over an epoch that of all its samples, however they were cut.
"""

from collections.abc import Sequence

import numpy as np

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError


class Mean:
    """The mean of what it is given, over the samples of all ranks, since the epoch or evaluation began.

    Make it an attribute of the model (`self.penalty = dp.metrics.Mean("penalty")`) before the model is first trained.

    Args:
        name: its key in logs.
    """

    def __init__(self, name: str = "mean") -> None:
        self.name = name
        self._tally: Tally | None = None
        self._place = 0

    def update_state(self, values: Buffer, rows: float | None = None) -> None:
        """Add the values of this rank's samples. The host does not wait for the device.

        Args:
            values: buffer of the backend's dtype, of any shape; its elements are summed.
            rows: what they count for; by default their number. A loss, which is one element, the sum over the
                batch, counts for `data.rows`.

        Raises:
            ConfigError: the model does not know of this mean.
        """
        self._tally_or_fail().add(self._place, values, float(values.size if rows is None else rows))

    def result(self) -> "Reading":
        """Return the mean, not read yet: `float(...)` reads it, which makes the host wait for the device."""
        return Reading(self)

    def _tally_or_fail(self) -> "Tally":
        if self._tally is None:
            raise ConfigError(
                f"Mean {self.name!r} belongs to no model that is being trained: make it an attribute of the model "
                "before the first fit, and use it in train_step or test_step"
            )
        return self._tally


class Reading:
    """A mean that has not been read from the device yet.

    Args:
        mean: the mean.
    """

    def __init__(self, mean: Mean) -> None:
        self._mean = mean

    def of(self, totals: np.ndarray) -> float:
        """Return the value in totals that have been read."""
        place = 2 * self._mean._place
        total, count = totals[place : place + 2]
        return float(total / count) if count else float("nan")

    def __float__(self) -> float:
        """Read it."""
        tally = self._mean._tally_or_fail()
        return self.of(tally.backend.download(tally.totals))


class Tally:
    """The sums and counts of several means in one message.

    Args:
        backend: the device.
        means: what to keep.

    Attributes:
        backend: the device.
        step: (2 means,) float64, [sum, count] of each in the step at hand, on this rank.
        totals: the same over all steps since `reset`; summed over the ranks where `step` was before `end_step`.
    """

    def __init__(self, backend: Backend, means: Sequence[Mean]) -> None:
        self.backend = backend
        self.step: Buffer = backend.zeros((2 * len(means),), np.float64, "sums of metrics")
        self.totals: Buffer = backend.zeros((2 * len(means),), np.float64, "sums of metrics")
        self._means = tuple(means)
        self._counts = [0.0] * len(means)

    def bind(self) -> None:
        """Let the means write here from now on: a model may be trained alone and as a part of another."""
        for place, mean in enumerate(self._means):
            mean._tally, mean._place = self, place

    def add(self, place: int, values: Buffer, count: float) -> None:
        """Add the sum of `values`, and `count`, to a mean."""
        self.backend.sum(values, self.step[2 * place : 2 * place + 1])
        self.count(place, count)

    def count(self, place: int, count: float) -> None:
        """Add to a mean's count."""
        self._counts[place] += count
        self.backend.fill(self.step[2 * place + 1 : 2 * place + 2], self._counts[place])

    def end_step(self) -> None:
        """Add the step to the totals, and begin a new one."""
        self.backend.add(self.step, self.totals)
        self.backend.fill(self.step, 0)
        self._counts = [0.0] * len(self._counts)

    def reset(self) -> None:
        """Begin new totals."""
        self.backend.fill(self.totals, 0)
