"""Weights and whole models in files: safetensors, Keras' `.weights.h5` and `.keras`. No pickle anywhere.

Rank 0 reads and writes. Every rank takes part: rank 0's failure is every rank's, and what it read is broadcast. So
one process reads a file that is on one node only, ranks that see different files cannot come to differ, and N
readers do not load a shared file system.
"""

from typing import TYPE_CHECKING, Any

from dptrain.registry.names import not_there

if TYPE_CHECKING:
    from dptrain.sequential import Sequential

__all__ = ["load_model", "save_model"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("saving", __all__)


def load_model(filepath: Any, *arguments: Any, **options: Any) -> "Sequential":
    """Return the model in a `.keras` file; the same as `dptrain.models.load_model`."""
    from dptrain import models  # above this package

    return models.load_model(filepath, *arguments, **options)


def save_model(model: "Sequential", filepath: Any, overwrite: bool = True) -> None:
    """Write a model to a `.keras` file; the same as `model.save(filepath)`."""
    model.save(filepath, overwrite)
