"""Keras' floatx: the floating-point type of Python's numbers, and of what is made without one, in this process."""

import numpy as np

_floatx = np.dtype(np.float32)


def floatx() -> np.dtype[np.floating]:
    """Return the type."""
    return _floatx


def set_floatx(dtype: np.dtype[np.floating]) -> None:
    """Set the type."""
    global _floatx
    _floatx = dtype
