"""Sparse training: weights of small magnitude become zero while a model trains, and stay zero.

The words are those of TensorFlow Model Optimization:

    dptrain.pruning.prune_low_magnitude(model, dptrain.pruning.PolynomialDecay(0.0, 0.9, 0, 1000))
    model.fit(x, y)
"""

from typing import TYPE_CHECKING

from dptrain.pruning.marking import Pruning, prune_low_magnitude, sparsity, strip_pruning
from dptrain.pruning.schedules import ConstantSparsity, PolynomialDecay, PruningSchedule
from dptrain.pruning.update_step import UpdatePruningStep
from dptrain.registry.names import not_there

__all__ = [
    "ConstantSparsity",
    "PolynomialDecay",
    "Pruning",
    "PruningSchedule",
    "UpdatePruningStep",
    "prune_low_magnitude",
    "sparsity",
    "strip_pruning",
]

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = not_there("pruning", __all__)
