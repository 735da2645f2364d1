"""dptrain: data-parallel training of neural networks with MPI, in Keras' words.

Importing it touches no GPU and no MPI. Its rooms are imported when they are first used, so that `python -m dptrain
--help` need not wait for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dptrain.registry.names import not_there
from dptrain.runtime.failure import install_excepthook
from dptrain.runtime.launcher import prepare_blas_before_numpy
from dptrain.runtime.watchdog import enlist
from dptrain.version import __version__

if TYPE_CHECKING:
    from dptrain import (
        activations,
        callbacks,
        datasets,
        errors,
        initializers,
        layers,
        losses,
        metrics,
        models,
        ops,
        optimizers,
        random,
        regularizers,
        saving,
        testing,
        utils,
    )
    from dptrain.layers import Input
    from dptrain.models import Model, Sequential, from_keras
    from dptrain.program.tape import GradientTape
    from dptrain.sweeps.api import sweep
    from dptrain.sweeps.ensemble import Ensemble
    from dptrain.utils import rank, world_size

prepare_blas_before_numpy()
install_excepthook()
enlist()

__all__ = [
    "Ensemble",
    "GradientTape",
    "Input",
    "Model",
    "Sequential",
    "__version__",
    "activations",
    "callbacks",
    "datasets",
    "errors",
    "from_keras",
    "initializers",
    "layers",
    "losses",
    "metrics",
    "models",
    "ops",
    "optimizers",
    "random",
    "rank",
    "regularizers",
    "saving",
    "sweep",
    "testing",
    "utils",
    "world_size",
]

# Names that are no modules, and where they are.
_FROM = {
    "Ensemble": "sweeps.ensemble",
    "GradientTape": "program.tape",
    "Input": "layers",
    "Model": "models",
    "Sequential": "models",
    "from_keras": "models",
    "rank": "utils",
    "sweep": "sweeps.api",
    "world_size": "utils",
}

if not TYPE_CHECKING:  # for which any name would do
    _missing = not_there("dptrain", __all__)

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            return _missing(name)
        module = import_module(f"dptrain.{_FROM.get(name, name)}")
        globals()[name] = value = getattr(module, name) if name in _FROM else module
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
