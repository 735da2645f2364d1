"""Fashion-MNIST: articles of clothing, H. Xiao et al., 2017; under Keras' name."""

from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.data.loading import Array, load
from dptrain.registry.names import not_there

__all__ = ["load_data"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("datasets.fashion_mnist", __all__)


def load_data(path: str | Path | None = None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return `(x_train, y_train), (x_test, y_test)`: images (60000, 28, 28) and (10000, 28, 28), labels, all uint8.

    Fetched at the first call and kept in the cache; collective under mpirun, where a node holds one copy.

    Args:
        path: the folder with the four files, where they are on this machine already (Keras: a file name in its cache).

    Raises:
        AgreedError: it cannot be fetched or read.
    """
    return load("fashion-mnist", data_dir=path)
