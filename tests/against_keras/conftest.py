"""The same training by Keras 3, in float64 on the PyTorch backend: what dptrain must give to 1e-5.

Needs the extra `peers` (Keras and PyTorch, several hundred megabytes); without it these tests skip.
"""

import importlib.util
import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def keras():
    """Keras, computing in float64 on one thread."""
    for package in ("keras", "torch"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'dptrain[peers]'")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Keras imports
        import keras
        import torch
    if keras.backend.backend() != "torch":
        pytest.skip(f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=torch")
    torch.set_num_threads(1)
    keras.config.set_floatx("float64")
    # On PyTorch Keras' type promotion makes float64 float32, and matrix products with it.
    from keras.src.backend.common import dtypes

    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    return keras
