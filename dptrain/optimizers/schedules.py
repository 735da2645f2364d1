"""Where Keras keeps the learning-rate schedules: those of `dptrain.schedules`."""

from typing import TYPE_CHECKING

from dptrain.registry import not_there
from dptrain.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
    deserialize,
    serialize,
)

__all__ = [
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
