"""The GPU that this process works on: PyCUDA's driver, opening and closing. The only module that imports PyCUDA."""

import atexit
import contextlib
import ctypes
import os
import weakref
from dataclasses import dataclass, field
from typing import Any

from dptrain.backend.cuda.probe import device_uuid
from dptrain.backend.cuda.selection import masked, visible_device
from dptrain.errors import DeviceError

try:
    import pycuda.driver as cuda
except ModuleNotFoundError as error:
    raise DeviceError("PyCUDA is not installed: pip install 'dptrain[cuda]', or use --device cpu") from error
except ImportError as error:
    raise DeviceError(
        f"no NVIDIA driver: PyCUDA does not load ({error}); install the driver (nvidia-smi must work), "
        "or use --device cpu"
    ) from error

__all__ = ["Gpu", "cuda", "open_gpu"]


@dataclass(frozen=True, eq=False)
class Gpu:
    """The GPU that this process works on, and what its backends share there.

    Attributes:
        device: PyCUDA's.
        context: its primary context, current in this process's main thread.
        name: the product's.
        uuid: "GPU-..." as nvidia-smi prints it, or None where the driver does not tell.
        memory: bytes in all.
        architecture: such as "sm_90".
        backends: those that are to be closed before the GPU.
        loaded: kernels by name and the modules that they are in, by the precision of matrix products.
        samples: samples that backends share, by what tells the host's arrays apart.
    """

    device: Any
    context: Any
    name: str
    uuid: str | None
    memory: int
    architecture: str
    backends: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    loaded: dict[str, tuple[dict[str, Any], list[Any]]] = field(default_factory=dict)
    samples: "weakref.WeakValueDictionary[tuple[Any, ...], Any]" = field(default_factory=weakref.WeakValueDictionary)


# One process works on one GPU: opened at the first backend, closed at exit.
_gpu: Gpu | None = None


def open_gpu(number: int, select: str, host: str) -> Gpu:
    """Start the driver and make a GPU's primary context current.

    Args:
        number: of the GPU among those that CUDA shows this process.
        select: "mask" makes the GPU the only visible one, by setting CUDA_VISIBLE_DEVICES within a mask that already
            stands before the driver is initialised, so that no library of this process touches another; "index"
            leaves the mask as it is, which CUDA IPC needs in some MPI libraries.
        host: this node's name, for messages.

    Raises:
        DeviceError: no GPU answers.
    """
    global _gpu
    if _gpu is None:
        mask, said = os.environ.get("CUDA_VISIBLE_DEVICES"), masked()
        if select == "mask":
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(mask, number)
        try:
            cuda.init()
            # Under a mask one device is visible now, unless the user's own code had started the driver before.
            index = min(number, cuda.Device.count() - 1)
            device = cuda.Device(index)
            context = device.retain_primary_context()
            context.push()
        except cuda.Error as error:
            if mask is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = mask
            raise DeviceError(
                f"host {host}: no GPU answers{said} ({error}); see nvidia-smi, or use --device cpu"
            ) from error
        architecture = "sm_{}{}".format(*device.compute_capability())
        _gpu = Gpu(device, context, device.name(), _uuid(index), device.total_memory(), architecture)
        atexit.register(_close_gpu)
    return _gpu


def _uuid(index: int) -> str | None:
    """Return a device's UUID, which PyCUDA does not tell."""
    return device_uuid(ctypes.CDLL("libcuda.so.1"), index)


def _close_gpu() -> None:
    """Give everything back before the interpreter takes PyCUDA apart."""
    global _gpu
    if _gpu is not None:
        for backend in list(_gpu.backends):
            backend.close()
        _gpu.loaded.clear()
        with contextlib.suppress(cuda.Error):
            _gpu.context.pop()
            _gpu.context.detach()
        _gpu = None
