"""The metrics of `compile` in steps of a user's own."""

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Buffer
from dptrain.metrics import Batch, Measured
from dptrain.metrics.tracking import Tracker


class MetricTracker(Tracker):
    """The state of one compiled metric, and after it the number of rows.

    Args:
        measured: the metric.
    """

    def __init__(self, measured: Measured) -> None:
        super().__init__(measured.key)
        self.measured = measured
        self.size = measured.metric.size + 1

    def update(self, batch: Batch, state: Buffer) -> None:
        """Add a batch.

        Args:
            batch: outputs and targets, of at least one row.
            state: (metric's size,) of the backend's dtype, overwritten.
        """
        tally = self._tally_or_fail()
        tally.backend.fill(state, 0)
        self.measured.metric.update(tally.backend, batch, state)
        tally.add_each(self._place, state)
        tally.count(self._place + self.size - 1, batch.rows)

    def value(self, sums: npt.NDArray[np.float64]) -> float:
        """Return what the metric makes of its state."""
        return self.measured.metric.result(sums[:-1], float(sums[-1]))
