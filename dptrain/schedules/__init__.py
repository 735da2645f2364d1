"""Learning-rate schedules, pure functions of the step. A new one is one file here and one line in this one."""

from collections.abc import Mapping
from typing import Any

from dptrain.registry import described, made, serialized
from dptrain.schedules.base import LearningRateSchedule
from dptrain.schedules.cosine import CosineDecay
from dptrain.schedules.cosine_restarts import CosineDecayRestarts
from dptrain.schedules.exponential import ExponentialDecay
from dptrain.schedules.inverse_time import InverseTimeDecay
from dptrain.schedules.piecewise_constant import PiecewiseConstantDecay
from dptrain.schedules.polynomial import PolynomialDecay

# By Keras' class names.
SCHEDULES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        CosineDecay,
        CosineDecayRestarts,
        ExponentialDecay,
        InverseTimeDecay,
        PiecewiseConstantDecay,
        PolynomialDecay,
    )
}

__all__ = [
    "SCHEDULES",
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
    "deserialize",
    "serialize",
]


def serialize(learning_rate_schedule: LearningRateSchedule) -> dict[str, Any]:
    """Return the schedule as Keras writes it: module, class name and arguments."""
    return serialized(learning_rate_schedule, "keras.optimizers.schedules", SCHEDULES.values())


def deserialize(
    config: Mapping[str, Any], custom_objects: Mapping[str, type[Any]] | None = None
) -> LearningRateSchedule:
    """Return the schedule that `serialize`, or Keras', described.

    Args:
        config: with "class_name" and "config".
        custom_objects: further classes by name.

    Raises:
        ConfigError: no schedule has that name, or the arguments are not its own.
    """
    kind, arguments = described("learning rate schedule", config, {**SCHEDULES, **(custom_objects or {})})
    schedule: LearningRateSchedule = made(kind.from_config, arguments)
    return schedule
