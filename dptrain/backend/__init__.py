"""Backends: what executes ops. `numpy` runs everywhere, `cuda` on an NVIDIA GPU."""

import importlib.util
from dataclasses import dataclass

from dptrain.backend.base import Backend
from dptrain.backend.gemm import PRECISIONS, PROVIDERS
from dptrain.backend.loops import Loops, NumpyLoops
from dptrain.errors import ConfigError, DeviceError

__all__ = ["Backend", "Place", "create"]


@dataclass(frozen=True)
class Place:
    """Where a process runs, which decides the GPU that it gets.

    Attributes:
        local_rank: this process among those of its node.
        local_size: processes of this node.
        host: the node's name, for messages.
    """

    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"


def create(
    device: str,
    dtype: str,
    threads: int,
    loops: str = "auto",
    *,
    place: Place | None = None,
    share_gpu: bool = False,
    precision: str = "float32",
    gemm: str = "dptrain",
) -> Backend:
    """Return the backend of a device.

    Args:
        device: "cpu", "cuda", or "auto" for a GPU where one can be used, else the CPU.
        dtype: "float32", or "float64" on the CPU.
        threads: CPU threads of elementwise work.
        loops: "numpy", "numba", or "auto" for Numba's where it is installed: the CPU's inner loops.
        place: where this process runs; by default alone on its node.
        share_gpu: several ranks may use one GPU.
        precision: of a GPU's matrix products: "float32", or "tf32" on tensor cores.
        gemm: who computes a GPU's matrix products: "dptrain" or "cublaslt".

    Raises:
        ConfigError: a word is unknown, or they do not go together.
        DeviceError: the device cannot be used.
    """
    if dtype not in ("float32", "float64"):
        raise ConfigError(f"dtype = {dtype!r}: expected 'float32' or 'float64'")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {device!r}: expected 'auto', 'cpu' or 'cuda'")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision = {precision!r}: expected 'float32' or 'tf32'")
    if gemm not in PROVIDERS:
        raise ConfigError(f"gemm = {gemm!r}: expected 'dptrain' or 'cublaslt'")
    without = ""
    # Without PyCUDA nobody expects a GPU to be used; with it, why none is used must be said.
    if device == "cuda" or (device == "auto" and dtype == "float32" and importlib.util.find_spec("pycuda")):
        try:
            return _cuda(dtype, place or Place(), share_gpu, precision, gemm)
        except DeviceError as error:
            if device == "cuda":
                raise DeviceError(f"--device cuda: {error}") from error
            without = f" (no GPU: {error})"
    # What only a GPU can do is not left out in silence.
    if precision != "float32":
        raise ConfigError(f"precision = {precision!r} needs a GPU, this is the CPU{without}; use --precision float32")
    if gemm != "dptrain":
        raise ConfigError(f"gemm = {gemm!r} needs a GPU, this is the CPU{without}; use --gemm dptrain")
    from dptrain.backend.numpy import NumpyBackend

    backend = NumpyBackend(dtype, threads, best_loops(loops))
    backend.description += without
    return backend


def _cuda(dtype: str, place: Place, share_gpu: bool, precision: str, gemm: str) -> Backend:
    from dptrain.backend.cuda import CudaBackend

    return CudaBackend(dtype, place.local_rank, place.local_size, share_gpu, place.host, precision, gemm)


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
