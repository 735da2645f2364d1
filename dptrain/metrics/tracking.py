"""What training steps of your own keep: sums on the device, read when somebody looks.

Whatever is tracked is made of sums over the samples of all ranks, so that a mean is that of the whole global batch, and
over an epoch that of all its samples, however they were cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError


class Tracker(ABC):
    """Some sums, and the number made of them.

    Args:
        name: its key in logs.

    Attributes:
        size: how many sums.
    """

    size = 2

    def __init__(self, name: str) -> None:
        self.name = name
        self._tally: Tally | None = None
        self._place = 0

    @abstractmethod
    def value(self, sums: npt.NDArray[np.float64]) -> float:
        """Return the number, from (size,) sums that have been read."""

    def result(self) -> "Reading":
        """Return the number, not read yet: `float(...)` reads it, which makes the host wait for the device."""
        return Reading(self)

    def bind(self, tally: "Tally", place: int) -> None:
        """Keep the sums there from now on."""
        self._tally, self._place = tally, place

    def _tally_or_fail(self) -> "Tally":
        if self._tally is None:
            raise ConfigError(
                f"{type(self).__name__} {self.name!r} belongs to no model that is being trained: make it an attribute "
                "of the model before the first fit, and use it in train_step or test_step"
            )
        return self._tally


class MeanTracker(Tracker):
    """The mean of what it is given, over the samples of all ranks, since the epoch or evaluation began.

    What Keras' `metrics.Mean` is in a `train_step`. Make it an attribute of the model
    (`self.penalty = dp.metrics.MeanTracker("penalty")`) before the model is first trained.

    Args:
        name: its key in logs.
    """

    def __init__(self, name: str = "mean") -> None:
        super().__init__(name)

    def update_state(self, values: Buffer, rows: float | None = None) -> None:
        """Add the values of this rank's samples. The host does not wait for the device.

        Args:
            values: buffer of the backend's dtype, of any shape, whose elements are summed; or one element of float64.
            rows: what they count for; by default their number. A loss, which is one element, the sum over the
                batch, counts for `data.rows`.

        Raises:
            ConfigError: the model does not know of this mean.
        """
        tally = self._tally_or_fail()
        tally.add(self._place, values)
        tally.count(self._place + 1, float(values.size if rows is None else rows))

    def value(self, sums: npt.NDArray[np.float64]) -> float:
        """Return the mean; NaN of nothing."""
        return float(sums[0] / sums[1]) if sums[1] else float("nan")


class Reading:
    """A number that has not been read from the device yet.

    Args:
        tracker: whose.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def of(self, totals: npt.NDArray[np.float64]) -> float:
        """Return the value in totals that have been read."""
        place = self._tracker._place
        return self._tracker.value(totals[place : place + self._tracker.size])

    def __float__(self) -> float:
        """Read it."""
        tally = self._tracker._tally_or_fail()
        return self.of(tally.backend.download(tally.totals))


class Tally:
    """The sums of several trackers in one message.

    Args:
        backend: the device.
        trackers: what to keep.

    Attributes:
        backend: the device.
        step: all sums of the step at hand, float64, on this rank.
        totals: the same over all steps since `reset`; summed over the ranks where `step` was before `end_step`.
    """

    def __init__(self, backend: Backend, trackers: Sequence[Tracker]) -> None:
        self.backend = backend
        self._trackers = tuple(trackers)
        *self._places, size = accumulate((one.size for one in trackers), initial=0)
        self.step: Buffer = backend.zeros((size,), np.float64, "sums of metrics")
        self.totals: Buffer = backend.zeros((size,), np.float64, "sums of metrics")
        self._counts = [0.0] * size

    def bind(self) -> None:
        """Let the trackers write here from now on: a model may be trained alone and as a part of another."""
        for place, tracker in zip(self._places, self._trackers, strict=True):
            tracker.bind(self, place)

    def add(self, place: int, values: Buffer) -> None:
        """Add all elements of `values`, of the backend's dtype or one of float64, to a sum."""
        total = self.step[place : place + 1]
        if values.dtype == self.backend.dtype:
            self.backend.sum(values, total)
        else:
            self.backend.add(values, total)

    def add_each(self, place: int, values: Buffer) -> None:
        """Add the elements of `values`, of the backend's dtype, to as many sums."""
        self.backend.add(values, self.step[place : place + len(values)])

    def count(self, place: int, count: float) -> None:
        """Add what the host knows to a sum that nothing else is added to."""
        self._counts[place] += count
        self.backend.fill(self.step[place : place + 1], self._counts[place])

    def end_step(self) -> None:
        """Add the step to the totals, and begin a new one."""
        self.backend.add(self.step, self.totals)
        self.backend.fill(self.step, 0)
        self._counts = [0.0] * len(self._counts)

    def reset(self) -> None:
        """Begin new totals."""
        self.backend.fill(self.totals, 0)
