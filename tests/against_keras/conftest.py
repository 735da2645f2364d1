"""The same training by Keras 3, in float64 on PyTorch or JAX: what dptrain must give to 1e-5.

Needs the extra `peers` (Keras and PyTorch, several hundred megabytes); without it these modules skip. With
KERAS_BACKEND=jax, JAX takes PyTorch's place, and tests that differentiate with PyTorch skip.
"""

import importlib.util
import os
from pathlib import Path
from typing import NoReturn

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("JAX_ENABLE_X64", "1")


def missing() -> str:
    """Return why Keras cannot be compared with, or an empty string."""
    chosen = os.environ["KERAS_BACKEND"]
    if chosen not in ("torch", "jax"):
        return f"Keras runs on {chosen}: set KERAS_BACKEND=torch or jax"
    absent = [module for module in ("keras", chosen) if importlib.util.find_spec(module) is None]
    return f"{absent[0]} is not installed: pip install 'dptrain[peers]'" if absent else ""


class _Skipped(pytest.Module):
    """A module whose tests are not even collected: there are two thousand of them."""

    def collect(self) -> NoReturn:
        raise pytest.skip.Exception(missing(), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip modules as a whole where Keras is missing."""
    return _Skipped.from_parent(parent, path=module_path) if missing() else None


@pytest.fixture(scope="session")
def keras():
    """Keras, computing in float64 on one thread."""
    chosen = os.environ["KERAS_BACKEND"]
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Keras imports
        import keras
    if chosen == "torch":
        import torch

        torch.set_num_threads(1)
    keras.config.set_floatx("float64")
    # On PyTorch Keras' type promotion makes float64 float32, and matrix products with it.
    from keras.src.backend.common import dtypes

    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    return keras


@pytest.fixture
def torch_keras(keras):
    """Keras on PyTorch."""
    if keras.backend.backend() != "torch":
        pytest.skip("differentiates with PyTorch")
    return keras
