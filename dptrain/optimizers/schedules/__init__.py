"""Learning-rate schedules, pure functions of the step. A new schedule is a file here and a line below."""

from typing import TYPE_CHECKING, Any

from dptrain.optimizers.schedules.base import LearningRateSchedule
from dptrain.optimizers.schedules.cosine import CosineDecay
from dptrain.optimizers.schedules.cosine_restarts import CosineDecayRestarts
from dptrain.optimizers.schedules.exponential import ExponentialDecay
from dptrain.optimizers.schedules.inverse_time import InverseTimeDecay
from dptrain.optimizers.schedules.piecewise_constant import PiecewiseConstantDecay
from dptrain.optimizers.schedules.polynomial import PolynomialDecay
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Registry

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

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("optimizers.schedules", __all__)

_registry: Registry[LearningRateSchedule] = Registry(
    "learning rate schedule", "keras.optimizers.schedules", LearningRateSchedule, SCHEDULES
)
serialize, deserialize = _registry.serialize, _registry.deserialize
