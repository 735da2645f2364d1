"""The same training by Keras 3, in float64 on PyTorch or JAX: what dptrain must give to 1e-5.

Needs the extra `peers` (Keras and PyTorch, several hundred megabytes); without it these tests skip. With
KERAS_BACKEND=jax, JAX takes PyTorch's place, and tests that differentiate with PyTorch skip.
"""

import importlib.util
import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("JAX_ENABLE_X64", "1")


@pytest.fixture(scope="session")
def keras():
    """Keras, computing in float64 on one thread."""
    chosen = os.environ["KERAS_BACKEND"]
    for package in ("keras", chosen):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'dptrain[peers]'")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Keras imports
        import keras
    if chosen == "torch":
        import torch

        torch.set_num_threads(1)
    elif chosen != "jax":
        pytest.skip(f"Keras runs on {chosen}: set KERAS_BACKEND=torch or jax")
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
