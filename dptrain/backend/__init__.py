"""Backends execute ops: `numpy` anywhere, `cuda` on an NVIDIA GPU."""

import importlib.util
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from dptrain.backend.base import Backend
from dptrain.backend.cuda.gpu.selection import has_driver
from dptrain.backend.cuda.libraries.providers import PROVIDERS
from dptrain.errors import ConfigError, DeviceError
from dptrain.mixed_precision import DTypePolicy
from dptrain.program.passes import PRECISIONS
from dptrain.registry.names import not_there
from dptrain.runtime.extras import pip_install

__all__ = ["Backend", "DeviceAssignment", "create", "describe", "tries_gpu"]

# Keras' names in `keras.backend`, and the modules, above this one, that have them.
_KERAS = {
    **dict.fromkeys(("backend", "epsilon", "floatx", "image_data_format"), "config"),
    **dict.fromkeys(("set_epsilon", "set_floatx", "set_image_data_format"), "config"),
    **dict.fromkeys(("clear_session", "is_keras_tensor"), "utils"),
    **dict.fromkeys(("is_float_dtype", "is_int_dtype", "result_type", "standardize_dtype"), "program.types"),
}

if TYPE_CHECKING:
    from dptrain.program.schedule.description import Description
    from dptrain.program.sharding.mesh import PlacedProgram

if not TYPE_CHECKING:  # a type checker would accept any name
    _missing = not_there("backend", list(_KERAS))  # Keras' other names are unknown to users

    def __getattr__(name: str) -> Any:
        return getattr(import_module(f"dptrain.{_KERAS[name]}"), name) if name in _KERAS else _missing(name)


@dataclass(frozen=True)
class DeviceAssignment:
    """Where a process runs, and the GPU assigned to it.

    Attributes:
        host: the node's name, for messages.
        gpu: index of its GPU among those that CUDA shows.
        trouble: why no GPU was assigned.
        sharers: ranks of the node that share that GPU.
    """

    host: str = "localhost"
    gpu: int = 0
    trouble: str | None = None
    sharers: int = 1


def describe(device: Literal["cpu", "cuda"], program: "PlacedProgram", rows: int, **options: Any) -> "Description":
    """Return what a device executes of a rank's program with so many rows; needs no device. `options` are a GPU's."""
    module = import_module(f"dptrain.backend.{device}.description")
    description: Description = module.describe(program, rows, **options)
    return description


def create(
    device: str,
    dtype: str,
    threads: int,
    jit_compile: Literal["auto"] | bool = "auto",
    *,
    place: DeviceAssignment | None = None,
    gpu_select: str = "mask",
    precision: str = "float32",
    gemm: str = "dptrain",
    conv: str = "dptrain",
    cuda_graph: bool = True,
) -> Backend:
    """Return the backend of a device.

    Args:
        device: "cpu", "cuda", or "auto" for a GPU if one is usable, else the CPU.
        dtype: a policy of `dptrain.mixed_precision`; a GPU has no "float64".
        threads: CPU threads of elementwise work.
        jit_compile: whether the CPU runs compiled programs; "auto" if there is a C++ compiler.
        place: where this process runs; by default alone on its node.
        gpu_select: "mask" makes the rank's GPU the only visible one, "index" leaves the mask alone.
        precision: of a GPU's matrix products: "float32", or "tf32" on tensor cores.
        gemm: who computes a GPU's matrix products: "dptrain", "cublaslt", or "auto" for the faster by measurement.
        conv: who computes its convolutions: "dptrain", "cudnn", or "auto".
        cuda_graph: whether a GPU replays steps as CUDA graphs.

    Raises:
        ConfigError: an unknown or contradictory setting.
        DeviceError: the device is unusable.
    """
    policy = DTypePolicy(dtype)
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {device!r}: expected 'auto', 'cpu' or 'cuda'")
    if gpu_select not in ("mask", "index"):
        raise ConfigError(f"gpu_select = {gpu_select!r}: expected 'mask' or 'index'")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision = {precision!r}: expected 'float32' or 'tf32'")
    for kind, name in (("gemm", gemm), ("conv", conv)):
        known = PROVIDERS[kind]  # type: ignore[index]
        if name not in known:
            raise ConfigError(f"{kind} = {name!r}: expected {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
    without = ""
    if tries_gpu(device, dtype):
        try:
            return _cuda(policy, place or DeviceAssignment(), gpu_select, precision, (gemm, conv), cuda_graph)
        except DeviceError as error:
            if device == "cuda":
                raise DeviceError(f"--device cuda: {error}") from error
            without = f" (no GPU: {error})"
    elif device == "auto" and policy._data_dtype == "float32" and has_driver():
        without = f" (an NVIDIA driver is installed, but not PyCUDA: {pip_install('cuda')} to use the GPU)"
    # Options that only a GPU can honour are refused, not ignored.
    if precision != "float32":
        raise ConfigError(
            f"precision = {precision!r} needs a GPU, but this is the CPU{without}; use --precision float32"
        )
    for kind, name in (("gemm", gemm), ("conv", conv)):
        if name not in ("dptrain", "auto"):  # "auto" takes what is available
            raise ConfigError(f"{kind} = {name!r} needs a GPU, but this is the CPU{without}; use --{kind} dptrain")
    from dptrain.backend.cpu.backend import CpuBackend

    backend = CpuBackend(policy._data_dtype, threads, jit_compile, policy.name)
    backend.description += without
    return backend


def tries_gpu(device: str, dtype: str) -> bool:
    """Whether `create` looks for a GPU: if it must, or if it may and PyCUDA is installed."""
    can = device == "auto" and DTypePolicy(dtype)._data_dtype == "float32"
    return device == "cuda" or (can and _installed("pycuda"))


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that is None in sys.modules cannot be imported
        return False


def _cuda(
    policy: DTypePolicy,
    place: DeviceAssignment,
    gpu_select: str,
    precision: str,
    providers: tuple[str, str],
    cuda_graph: bool,
) -> Backend:
    if place.trouble is not None:
        raise DeviceError(place.trouble)
    from dptrain.backend.cuda.backend import CudaBackend

    gemm, conv = providers
    own = place.gpu, gpu_select, place.host, precision, gemm, place.sharers
    backend = CudaBackend(policy._data_dtype, *own, policy.name, conv)
    backend.graph = cuda_graph
    return backend
