"""Launches users' kernels, and calls NumPy functions between two copies."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.backend.cuda.compile import compiled_own
from dptrain.backend.cuda.gpu.device import Gpu, cuda
from dptrain.backend.cuda.memory import DeviceArray
from dptrain.backend.custom import OwnKernel
from dptrain.errors import DeviceError

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend


class HostLaunch:
    """An op that the host computes in the middle of a step: it waits for the inputs, and writes the result."""

    def __init__(
        self, backend: "CudaBackend", compute: Callable[..., None], inputs: Sequence[DeviceArray], result: DeviceArray
    ) -> None:
        self._backend, self._compute, self._inputs, self._result = backend, compute, inputs, result

    def __call__(self) -> None:
        """Compute it, after all queued work."""
        result = np.empty(self._result.shape, self._result.dtype)
        with np.errstate(all="ignore"):
            self._compute(*map(self._backend.download, self._inputs), out=result)
        self._backend.write(self._result, result)


def own_launch(
    gpu: Gpu, stream: Any, kernel: OwnKernel, buffers: Sequence[DeviceArray], numbers: Mapping[str, Any]
) -> Callable[[], None]:
    """Return a function that queues a user's kernel on a stream; arguments as for `OwnKernel.launch`.

    Raises:
        ConfigError: the launch does not fit the kernel's argument types.
        DeviceError: nvcc refuses the source, the kernel does not load, or needs more shared memory than there is; when
            queued: it does not launch.
    """
    launch = kernel.launch(buffers, numbers)
    if 0 in launch.grid:
        return lambda: None
    prepared = _prepared(gpu, kernel)
    if not gpu.allow_shared(prepared, launch.shared):
        most = gpu.device.get_attribute(cuda.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        raise DeviceError(
            f"op {kernel.name!r}: kernel {kernel.kernel!r} needs {launch.shared:,} bytes of dynamic and "
            f"{prepared.shared_size_bytes:,} of static shared memory, but {gpu.name} allows {most:,} per block"
        )
    arguments = [argument.pointer if isinstance(argument, DeviceArray) else argument for argument in launch.arguments]

    def queue() -> None:
        try:
            prepared.prepared_async_call(launch.grid, launch.block, stream, *arguments, shared_size=launch.shared)
        except Exception as error:  # PyCUDA packs arguments with its own struct module and errors
            raise DeviceError(
                f"op {kernel.name!r}: kernel {kernel.kernel!r} cannot be launched on grid {launch.grid}, block "
                f"{launch.block}, arguments {kernel.arguments!r}: {error}"
            ) from error

    return queue


def _prepared(gpu: Gpu, kernel: OwnKernel) -> Any:
    """Return a user's prepared kernel, compiled and loaded if new; DeviceError if that fails."""
    cubin = compiled_own(kernel.name, kernel.source, gpu.architecture)
    try:
        function = gpu.module(cubin).get_function(kernel.kernel)
        function.prepare(kernel.arguments)
    except cuda.Error as error:
        raise DeviceError(
            f'op {kernel.name!r}: kernel {kernel.kernel!r} cannot be loaded ({error}); is there an extern "C" '
            "__global__ function of that name in its source?"
        ) from error
    return function
