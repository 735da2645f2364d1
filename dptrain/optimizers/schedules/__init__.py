"""Learning-rate schedules, pure functions of the step. A new one is one file here and one line in this one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dptrain.optimizers.schedules.base import LearningRateSchedule
from dptrain.optimizers.schedules.cosine import CosineDecay
from dptrain.optimizers.schedules.cosine_restarts import CosineDecayRestarts
from dptrain.optimizers.schedules.exponential import ExponentialDecay
from dptrain.optimizers.schedules.inverse_time import InverseTimeDecay
from dptrain.optimizers.schedules.piecewise_constant import PiecewiseConstantDecay
from dptrain.optimizers.schedules.polynomial import PolynomialDecay
from dptrain.registry import serialization
from dptrain.registry.names import not_there

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

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("optimizers.schedules", __all__)


def serialize(learning_rate_schedule: LearningRateSchedule) -> dict[str, Any]:
    """Return the schedule as Keras writes it: module, class name and arguments."""
    return serialization.to_dict("keras.optimizers.schedules", learning_rate_schedule, SCHEDULES.values())


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
    classes = SCHEDULES | dict(custom_objects or {})
    schedule: LearningRateSchedule = serialization.made("learning rate schedule", config, classes)
    return schedule
