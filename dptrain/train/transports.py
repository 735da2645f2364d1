"""How messages between ranks travel: what the user asks for, or what was measured to be the fastest here."""

import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import numpy as np

from dptrain import ops
from dptrain.backend.base import Backend
from dptrain.comm import Communicator, nccl
from dptrain.errors import AgreedError, ConfigError, DeviceError
from dptrain.program.dims import Dim
from dptrain.program.placement import place
from dptrain.program.program import trace
from dptrain.runtime.measurements import Measurements, are_seconds
from dptrain.runtime.streams import write_error
from dptrain.runtime.text import ranges

# Those that send the memory of GPUs, in the order in which they are tried, and the one that is always there.
_OF_GPUS, HOST = ("nccl", "ipc", "cuda-aware"), "host"
# What may be asked for.
TRANSPORTS = (HOST, *_OF_GPUS, "auto")
# float32 in the message that is measured, how often it is, and before that is not.
_ELEMENTS, _REPEATS, _WARM_UP = 1 << 20, 5, 2


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
        backend.transport = _fastest(backend, comm)
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
    if transport == "nccl":
        return f"{shared}, which NCCL does not join" if shared else nccl.why_not()
    if str(backend.gpu).startswith("MIG-"):
        return "this rank's GPU is a MIG slice, whose memory no other process maps"
    return "" if comm.local_size == comm.size else "the ranks are on several nodes, and map memory within one only"


def _fastest(backend: Backend, comm: Communicator) -> str:
    """Return the way in which a message of some MB was the fastest here, and say why it is. Collective.

    It is measured once for a kind of machine, and kept in the cache.
    """
    if comm.size == 1 or backend.name != "cuda":
        return HOST
    shared = _shared(backend, comm)
    own = {one: _why_not(backend, comm, one, shared) or _why_not_tried(one) for one in _OF_GPUS}
    found = comm.allgather(own)
    reasons = {one: next((each[one] for each in found if each[one]), "") for one in _OF_GPUS}
    there = [HOST, *(one for one in _OF_GPUS if not reasons[one])]
    gpu = backend.description.partition(",")[0]  # the product
    about = [gpu, backend.numerics, comm.description, comm.size, comm.local_size, there]
    known = Measurements("transports", about)
    kept = comm.broadcast_fact(_kept(known.read(), there) if comm.rank == 0 else None)
    seconds = kept or _measured(backend, comm, there)
    if not kept and comm.rank == 0:
        known.keep(seconds)
    chosen = min(seconds, key=lambda one: (seconds[one], TRANSPORTS.index(one)))
    if comm.rank == 0:
        times = ", ".join(f"{one} {1e3 * each:.2f} ms" for one, each in seconds.items())
        without = "".join(f"; not {one}: {why}" for one, why in reasons.items() if why)
        when = "before" if kept else "now"
        size = f"{4 * _ELEMENTS / 1e6:.1f} MB"
        write_error(f"dptrain: --comm auto: {chosen}; a sum of {size}, measured {when}: {times}{without}\n")
    return chosen


def _why_not_tried(transport: str) -> str:
    """Return why a way does not work in a process of its own; those of MPI and of the driver have been tried."""
    return nccl.why_not_alone() if transport == "nccl" else ""


def _measured(backend: Backend, comm: Communicator, transports: list[str]) -> dict[str, float]:
    """Return the seconds that a step with one message takes, by the way in which it travels. Collective."""
    found = {}
    for one in transports:
        with suppress(AgreedError):  # which says on all ranks that it does not work
            found[one] = _seconds(backend, comm, one)
        backend.part(comm)
    return found


def _seconds(backend: Backend, comm: Communicator, transport: str) -> float:
    """Return the median of the seconds that the slowest rank takes for a sum over all of them. Collective."""
    backend.transport = transport
    rows = ((Dim.rows(comm.replicas), _ELEMENTS), np.float32)
    program = place(trace(lambda x: {"sum": ops.sum(x, 0)}, {"x": rows}))
    x = np.ones((1, _ELEMENTS), np.float32)
    executable = backend.executable(program, {"x": x}, rows=1, first_row=comm.replica, comm=comm)
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        comm.barrier()
        begun = time.perf_counter()
        executable.run()
        wrong = executable.outputs["sum"][0] != comm.replicas
        times.append(time.perf_counter() - begun)

        def require(wrong: bool = bool(wrong)) -> None:
            if wrong:
                raise DeviceError(f"--comm {transport}: a sum over the ranks is wrong")

        comm.agree("communicator", require)
    executable.close()
    found: list[float] = comm.allgather(median(times[_WARM_UP:]))
    return max(found)


def _kept(found: dict[str, Any], there: Sequence[str]) -> dict[str, float] | None:
    """Return what was measured of the ways that are there; None where nothing was, or what is kept says otherwise."""
    return found if HOST in found and found.keys() <= set(there) and are_seconds(found) else None
