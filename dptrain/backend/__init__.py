"""Backends: what executes ops. `numpy` runs everywhere; `cuda` is not part of this version."""

from dptrain.backend.base import Backend
from dptrain.backend.loops import Loops, NumpyLoops
from dptrain.errors import ConfigError, DeviceError

__all__ = ["Backend", "create"]


def create(device: str, dtype: str, threads: int, loops: str = "auto") -> Backend:
    """Return the backend of a device.

    Args:
        device: "cpu", "cuda", or "auto" for the best that there is.
        dtype: "float32", or "float64" on the CPU.
        threads: CPU threads of elementwise work.
        loops: "numpy", "numba", or "auto" for Numba's where it is installed: the CPU's inner loops.

    Raises:
        ConfigError: the device or dtype is unknown.
        DeviceError: the device cannot be used.
    """
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype = {dtype!r}: expected 'float32' or 'float64'")
    if device == "cuda":
        raise DeviceError("--device cuda: this version of dptrain has no CUDA backend yet; use --device cpu or auto")
    if device not in ("auto", "cpu"):
        raise ConfigError(f"device = {device!r}: expected 'auto', 'cpu' or 'cuda'")
    from dptrain.backend.numpy import NumpyBackend

    return NumpyBackend(dtype, threads, best_loops(loops))


def best_loops(choice: str = "auto") -> Loops:
    """Return the loops to use.

    Args:
        choice: "numpy", "numba", or "auto" for Numba's where it is installed.

    Raises:
        ConfigError: "numba" is asked for and not installed.
    """
    if choice == "numpy":
        return NumpyLoops()
    try:
        from dptrain.backend.loops_numba import NumbaLoops
    except ImportError as error:
        if choice == "numba":
            raise ConfigError("loops = 'numba': Numba is not installed; pip install 'dptrain[jit]'") from error
        return NumpyLoops()
    return NumbaLoops()
