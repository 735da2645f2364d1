"""Keras' floatx: the default floating-point type of this process."""

import numpy as np

_floatx = np.dtype(np.float32)


def floatx() -> np.dtype[np.floating]:
    """Return the default type."""
    return _floatx


def set_floatx(dtype: np.dtype[np.floating]) -> None:
    """Set the default type."""
    global _floatx
    _floatx = dtype
