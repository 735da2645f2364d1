"""Constant learning rates, one after the other."""

from collections.abc import Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.optimizers.schedules.base import LearningRateSchedule


class PiecewiseConstantDecay(LearningRateSchedule):
    """values[0] up to and with step boundaries[0], then values[1] up to and with boundaries[1], ...

    Args:
        boundaries: last steps of all values but the last, rising; of a fraction the integer part counts.
        values: learning rates, one more than boundaries.
        name: of the schedule.

    Raises:
        ConfigError: the lengths do not fit, or the boundaries do not rise.
    """

    def __init__(self, boundaries: Sequence[float], values: Sequence[float], name: str = "PiecewiseConstant") -> None:
        if len(boundaries) != len(values) - 1:
            raise ConfigError(
                "The length of boundaries should be 1 less than the length of values. Received: "
                f"boundaries={boundaries} of length {len(boundaries)}, and values={values} of length {len(values)}."
            )
        if list(boundaries) != sorted(boundaries):
            raise ConfigError(f"boundaries={boundaries}: expected rising steps")
        self.boundaries = boundaries
        self.values = values
        self.name = name

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        return float(self.values[sum(step > int(boundary) for boundary in self.boundaries)])

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"boundaries": self.boundaries, "values": self.values, "name": self.name}
