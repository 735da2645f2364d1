"""How messages between ranks travel: what the user asks for, or what is there."""

from dptrain.backend.base import Backend
from dptrain.comm import Communicator, nccl
from dptrain.errors import ConfigError, DeviceError
from dptrain.runtime.streams import write_error
from dptrain.runtime.text import ranges

# Those that send the memory of GPUs, the best one first, and the one that is always there.
_OF_GPUS, HOST = ("nccl", "cuda-aware"), "host"
# What may be asked for.
TRANSPORTS = (HOST, *_OF_GPUS, "auto")


def choose_transport(backend: Backend, comm: Communicator, wanted: str) -> None:
    """Let a backend's messages between ranks travel in a way. Collective.

    Args:
        backend: of this rank.
        comm: the ranks.
        wanted: one of `TRANSPORTS`.

    Raises:
        AgreedError: that way is not there, on every rank.
    """
    if wanted == "auto":
        backend.transport = _chosen(backend, comm)
    elif wanted == HOST:
        backend.transport = HOST
    else:
        shared = _shared(backend, comm)

        def require() -> None:
            if backend.name != "cuda":
                raise ConfigError(f"--comm {wanted} needs --device cuda: this rank computes on {backend.description}")
            if reason := _why_not(backend, comm, wanted, shared):
                raise DeviceError(f"--comm {wanted}: {reason}; use --comm host")

        comm.agree("communicator", require)
        backend.transport = wanted


def _shared(backend: Backend, comm: Communicator) -> str:
    """Return why ranks cannot be told apart by their GPUs, or an empty string. Collective."""
    gpus = comm.allgather(backend.gpu)
    if any(one is not None and one.startswith("MIG-") for one in gpus):
        return "a rank's GPU is a MIG slice"
    for gpu in dict.fromkeys(one for one in gpus if one is not None):
        users = [rank for rank, other in enumerate(gpus) if other == gpu]
        if len(users) > 1:
            return f"ranks {ranges(users)} share the GPU {gpu}"
    return ""


def _why_not(backend: Backend, comm: Communicator, transport: str, shared: str) -> str:
    """Return why this rank cannot send in a way, as far as it knows without the others, or an empty string.

    Args:
        backend: of this rank, on a GPU.
        comm: the ranks.
        transport: one of `_OF_GPUS`.
        shared: as `_shared` returns it.
    """
    if comm.size == 1:  # nobody to send anything to
        return ""
    if transport == "cuda-aware":
        return comm.why_not_cuda_aware()
    return f"{shared}, which NCCL does not join" if shared else nccl.why_not()


def _chosen(backend: Backend, comm: Communicator) -> str:
    """Return the best way that is there on every rank, and say why. Collective."""
    if comm.size == 1 or backend.name != "cuda":
        return HOST
    shared = _shared(backend, comm)
    reasons: dict[str, str] = {}
    for one in _OF_GPUS:
        reasons[one] = next(filter(None, comm.allgather(_why_not(backend, comm, one, shared))), "")
        if not reasons[one]:
            break
    chosen = next((one for one, why in reasons.items() if not why), HOST)
    if comm.rank == 0:
        without = "".join(f"; not {one}: {why}" for one, why in reasons.items() if why)
        write_error(f"dptrain: --comm auto: {chosen}{without}\n")
    return chosen
