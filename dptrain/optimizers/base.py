"""What an optimizer is: a specification of its slots and of one update, written in backend ops."""

import math
from abc import ABC, abstractmethod
from typing import Any

from dptrain.backend.base import Backend, Buffer
from dptrain.errors import ConfigError


class Optimizer(ABC):
    """One rule that turns summed gradients into new parameters.

    Args:
        learning_rate: above 0.

    Attributes:
        slots: names of the flat buffers (like the parameters, zero at first) that the rule keeps from step to step.

    Raises:
        ConfigError: the learning rate is out of range.
    """

    slots: tuple[str, ...] = ()

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = check_range("learning_rate", learning_rate, above=0.0)

    @abstractmethod
    def apply(
        self, ops: Backend, params_P: Buffer, grads_P: Buffer, slots: dict[str, Buffer], weight: Buffer, iteration: int
    ) -> None:
        """Update the parameters and the slots in place.

        Args:
            ops: the backend.
            params_P: flat parameters.
            grads_P: flat sum of the gradients over the global batch; may be destroyed.
            slots: the buffers named by `slots`.
            weight: one element, the sum of the sample weights over the global batch, to divide the gradients by.
            iteration: 1 for the first update.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as Keras names them."""


def check_range(
    name: str, value: float, *, above: float | None = None, least: float | None = None, below: float = math.inf
) -> float:
    """Return `value` as a float.

    Raises:
        ConfigError: it is not finite or not in the range.
    """
    value = float(value)
    if (
        not math.isfinite(value)
        or value >= below
        or (above is not None and value <= above)
        or (least is not None and value < least)
    ):
        low = f"> {above:g}" if above is not None else f">= {least:g}" if least is not None else ""
        high = f"< {below:g}" if math.isfinite(below) else ""
        raise ConfigError(f"{name} = {value:g}: expected a number {' and '.join(part for part in (low, high) if part)}")
    return value
