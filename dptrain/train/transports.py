"""Chooses how messages between ranks travel: as requested, or the best one available."""

from dptrain.backend.base import Backend
from dptrain.comm import Communicator, nccl
from dptrain.errors import ConfigError, DeviceError
from dptrain.runtime.output.streams import write_error
from dptrain.runtime.text import ranges

# Transports of GPU memory, best first, and the one that always exists.
_OF_GPUS, HOST = ("nccl", "cuda-aware"), "host"
# Accepted values.
TRANSPORTS = (HOST, *_OF_GPUS, "auto")


def choose_transport(backend: Backend, comm: Communicator, requested: str) -> None:
    """Set a backend's transport to one of `TRANSPORTS`, available on every rank. Collective."""
    if requested == "auto":
        backend.transport = _chosen(backend, comm)
    elif requested == HOST:
        backend.transport = HOST
    else:
        shared = _shared(backend, comm)

        def require() -> None:
            if backend.name != "cuda":
                raise ConfigError(
                    f"--comm {requested} needs --device cuda: this rank computes on {backend.description}"
                )
            if reason := _why_not(backend, comm, requested, shared):
                raise DeviceError(f"--comm {requested}: {reason}; use --comm host")

        comm.agree("communicator", require)
        backend.transport = requested


def _shared(backend: Backend, comm: Communicator) -> str:
    """Return why the ranks' GPUs are not distinct, or an empty string. Collective."""
    gpus = comm.allgather(backend.gpu)
    if any(device is not None and device.startswith("MIG-") for device in gpus):
        return "a rank's GPU is a MIG slice"
    for gpu in dict.fromkeys(device for device in gpus if device is not None):
        users = [rank for rank, other in enumerate(gpus) if other == gpu]
        if len(users) > 1:
            return f"ranks {ranges(users)} share the GPU {gpu}"
    return ""


def _why_not(backend: Backend, comm: Communicator, transport: str, shared: str) -> str:
    if comm.size == 1:  # no other rank
        return ""
    if transport == "cuda-aware":
        return comm.why_not_cuda_aware()
    return f"{shared}, which NCCL does not support" if shared else nccl.why_not()


def _chosen(backend: Backend, comm: Communicator) -> str:
    """Return the best transport of all ranks, and print why. Collective."""
    if comm.size == 1 or backend.name != "cuda":
        return HOST
    shared = _shared(backend, comm)
    reasons: dict[str, str] = {}
    for transport in _OF_GPUS:
        reasons[transport] = next(filter(None, comm.allgather(_why_not(backend, comm, transport, shared))), "")
        if not reasons[transport]:
            break
    chosen = next((transport for transport, why in reasons.items() if not why), HOST)
    if comm.rank == 0:
        without = "".join(f"; not {transport}: {why}" for transport, why in reasons.items() if why)
        write_error(f"dptrain: --comm auto: {chosen}{without}\n")
    return chosen
