"""dptrain: data-parallel training of neural networks with MPI and Keras' API.

Importing it touches no GPU and no MPI. Its modules are imported on first use, so that `python -m dptrain --help` is
fast.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dptrain.runtime import signals

if signals.starts_as_module(sys.argv, sys.orig_argv):
    signals.catch_early()  # before other imports: a scheduler may send SIGUSR1 at any time

from dptrain.registry.names import not_there
from dptrain.runtime.failure import install_excepthook
from dptrain.runtime.launch.launcher import prepare_blas_before_numpy
from dptrain.runtime.output.streams import hold_descriptors
from dptrain.runtime.watch.watchdog import enlist
from dptrain.version import __version__

if TYPE_CHECKING:
    from dptrain import (
        activations,
        applications,
        backend,
        callbacks,
        config,
        constraints,
        datasets,
        distillation,
        distribution,
        errors,
        initializers,
        layers,
        losses,
        metrics,
        mixed_precision,
        models,
        ops,
        optimizers,
        preprocessing,
        pruning,
        random,
        regularizers,
        saving,
        testing,
        tree,
        utils,
    )
    from dptrain.initializers import Initializer
    from dptrain.layers import Input, InputSpec, Layer
    from dptrain.layers.node import KerasTensor
    from dptrain.layers.weight import KerasVariable as Variable
    from dptrain.losses import Loss
    from dptrain.metrics import Metric
    from dptrain.mixed_precision import DTypePolicy
    from dptrain.models import Model, Sequential, from_keras
    from dptrain.models.function import Function
    from dptrain.ops.loops import remat
    from dptrain.optimizers import Optimizer
    from dptrain.program.tape import GradientTape
    from dptrain.regularizers import Regularizer
    from dptrain.sweeps.api import sweep
    from dptrain.sweeps.ensemble import Ensemble
    from dptrain.utils import rank, world_size

hold_descriptors()
prepare_blas_before_numpy()
install_excepthook()
enlist()

__all__ = [
    "DTypePolicy",
    "Ensemble",
    "Function",
    "GradientTape",
    "Initializer",
    "Input",
    "InputSpec",
    "KerasTensor",
    "Layer",
    "Loss",
    "Metric",
    "Model",
    "Optimizer",
    "Regularizer",
    "Sequential",
    "Variable",
    "__version__",
    "activations",
    "applications",
    "backend",
    "callbacks",
    "config",
    "constraints",
    "datasets",
    "distillation",
    "distribution",
    "dtype_policies",
    "errors",
    "from_keras",
    "initializers",
    "layers",
    "losses",
    "metrics",
    "mixed_precision",
    "models",
    "ops",
    "optimizers",
    "preprocessing",
    "pruning",
    "random",
    "rank",
    "regularizers",
    "remat",
    "saving",
    "sweep",
    "testing",
    "tree",
    "utils",
    "version",
    "world_size",
]

# Names that are not modules: the module that has them, and their name there if it differs.
_FROM = {
    "DTypePolicy": "mixed_precision",
    "Function": "models.function",
    "Initializer": "initializers",
    "InputSpec": "layers",
    "KerasTensor": "layers.node",
    "Layer": "layers",
    "Loss": "losses",
    "Metric": "metrics",
    "Optimizer": "optimizers",
    "Regularizer": "regularizers",
    "Variable": "layers.weight:KerasVariable",
    "Ensemble": "sweeps.ensemble",
    "GradientTape": "program.tape",
    "Input": "layers",
    "Model": "models",
    "Sequential": "models",
    "from_keras": "models",
    "rank": "utils",
    "remat": "ops.loops",
    "sweep": "sweeps.api",
    "world_size": "utils",
}


def version() -> str:
    """Return the version; `import dptrain.version` finds the module of this name."""
    return __version__


if not TYPE_CHECKING:  # type checkers would accept any name
    _missing = not_there("dptrain", __all__)

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            return _missing(name)
        place, _, attribute = _FROM.get(name, name).partition(":")
        module = import_module(f"dptrain.{place}")
        globals()[name] = value = getattr(module, attribute or name) if name in _FROM else module
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
