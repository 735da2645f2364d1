"""LearningRateSchedule: the learning rate as a function of the step."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops import cast
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.registry.reads import Readable


class LearningRateSchedule(Readable):
    """The learning rate as a function of the step, for the `learning_rate` of an optimizer.

    A subclass writes `__call__`, in ops: it becomes part of the step's program. To be saved it also writes
    `get_config`, or is a dataclass whose fields are the constructor's arguments.
    """

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of step 0, 1, ..., a number or (from an optimizer) a float64 tensor.

        Every batch is a step, also with accumulated gradients.
        """
        raise NotImplementedError(
            f"Learning rate schedule '{type(self).__name__}' must override `__call__(self, step)`."
        )

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        if dataclasses.is_dataclass(self):
            return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        raise NotImplementedError(
            f"Learning rate schedule '{type(self).__name__}' must override `get_config()` in order to be serializable."
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a schedule from its `get_config`."""
        return cls(**config)


def check_steps(name: str, steps: float) -> None:
    """Refuse a length that is not above 0."""
    if steps <= 0:
        raise ConfigError(f"Argument `{name}` must be > 0. Received: {name}={steps}")


def float64(value: Any) -> Tensor:
    """Cast a number or a tensor to float64."""
    (tensor,) = as_tensors([np.float64(value) if isinstance(value, int | float) else value])
    return tensor if tensor.dtype == np.float64 else cast(tensor, np.float64)
