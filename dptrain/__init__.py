"""dptrain: data-parallel training of neural networks with MPI, in Keras' words.

Importing it touches no GPU and no MPI.
"""

from dptrain.failure import install_excepthook
from dptrain.launcher import prepare_blas_before_numpy

prepare_blas_before_numpy()
install_excepthook()

from dptrain import datasets, layers, losses, metrics, ops, optimizers, testing, utils  # noqa: E402
from dptrain.sequential import Sequential  # noqa: E402
from dptrain.train import callbacks  # noqa: E402
from dptrain.utils import rank, world_size  # noqa: E402
from dptrain.version import __version__  # noqa: E402

__all__ = [
    "Sequential",
    "__version__",
    "callbacks",
    "datasets",
    "layers",
    "losses",
    "metrics",
    "ops",
    "optimizers",
    "rank",
    "testing",
    "utils",
    "world_size",
]
