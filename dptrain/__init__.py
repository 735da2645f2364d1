"""dptrain: data-parallel training of neural networks with MPI, in Keras' words.

Importing it touches no GPU and no MPI.
"""

from typing import TYPE_CHECKING

from dptrain.runtime.failure import install_excepthook
from dptrain.runtime.launcher import prepare_blas_before_numpy

prepare_blas_before_numpy()
install_excepthook()

from dptrain import (  # noqa: E402
    activations,
    callbacks,
    datasets,
    initializers,
    layers,
    losses,
    metrics,
    models,
    ops,
    optimizers,
    regularizers,
    saving,
    testing,
    utils,
)
from dptrain.layers import Input  # noqa: E402
from dptrain.models import from_keras  # noqa: E402
from dptrain.registry.names import not_there  # noqa: E402
from dptrain.sequential import Sequential  # noqa: E402
from dptrain.sweeps.api import sweep  # noqa: E402
from dptrain.utils import rank, world_size  # noqa: E402
from dptrain.version import __version__  # noqa: E402

__all__ = [
    "Input",
    "Sequential",
    "__version__",
    "activations",
    "callbacks",
    "datasets",
    "from_keras",
    "initializers",
    "layers",
    "losses",
    "metrics",
    "models",
    "ops",
    "optimizers",
    "rank",
    "regularizers",
    "saving",
    "sweep",
    "testing",
    "utils",
    "world_size",
]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("dptrain", __all__)
