"""Measures this machine's compute and communication rates, from which `explain --ranks` predicts CPU steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dptrain import ops
from dptrain.backend import Backend
from dptrain.comm import Communicator
from dptrain.program.cost.hardware import Link
from dptrain.program.program import Program, trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Tensor, Variable

# Timed calls, and warm-up calls.
_REPEATS, _WARM_UP = 30, 3
# Rows and columns of the timed product's factors; elements of the two added arrays.
_LENGTH, _ELEMENTS = 512, 1 << 21
# Bytes of the timed messages: the first measures latency, the second bandwidth too.
_SHORT, _LONG = 8, 1 << 20


@dataclass(frozen=True)
class Rates:
    """Rates of a rank while the others of its node do the same."""

    flops: float  # operations/s of a product of float32 matrices
    bandwidth: float  # bytes/s of memory in an update of a variable
    link: Link | None  # of an all-reduce between all ranks; None for one rank


def measured(backend: Backend, comm: Communicator) -> Rates:
    """Return the slowest rank's rates on a CPU backend. Collective."""
    rng = np.random.default_rng(0)
    factors = {name: rng.standard_normal((_LENGTH, _LENGTH)).astype(np.float32) for name in ("x", "y")}
    shapes = {name: (array.shape, array.dtype) for name, array in factors.items()}
    product = _seconds(backend, comm, trace(lambda x, y: {"z": ops.matmul(x, y)}, shapes), factors)
    values = [Variable(np.ones(_ELEMENTS, np.float32), name) for name in ("value", "gradient")]
    update = _seconds(backend, comm, trace(lambda: _descend(*values), {}))
    backend.release(values)
    link = None
    if comm.size > 1:
        rounds = (comm.size - 1).bit_length()
        short, long = (_all_reduce(comm, nbytes) for nbytes in (_SHORT, _LONG))
        moved = 2 * (comm.size - 1) / comm.size * _LONG
        link = Link(moved / max(long - short, 1e-9), short / rounds)
    return Rates(2 * _LENGTH**3 / product, 3 * 4 * _ELEMENTS / update, link)


def stated(rates: Rates) -> str:
    """Format rates as options of `explain --ranks`."""
    link = rates.link and f" --link {rates.link.bandwidth / 1e9:.3g}GB,{1e6 * rates.link.latency:.3g}us"
    return f"--gflops {rates.flops / 1e9:.3g} --memory-bandwidth {rates.bandwidth / 1e9:.3g}GB{link or ''}"


def _descend(value: Variable, gradient: Variable) -> dict[str, Tensor]:
    value.assign(value - 1e-3 * gradient.value)
    return {}


def _seconds(
    backend: Backend, comm: Communicator, program: Program, arrays: dict[str, np.ndarray] | None = None
) -> float:
    executable = backend.executable(place(program), arrays or {})
    return _best(comm, executable.run)


def _all_reduce(comm: Communicator, nbytes: int) -> float:
    buffer = np.zeros(nbytes // 4, np.float32)
    return _best(comm, lambda: comm.allreduce_sum(buffer))


def _best(comm: Communicator, action: Callable[[], None]) -> float:
    """Return the least seconds of an action on the slowest rank (other work only adds time). Collective."""
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        comm.barrier()
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return float(max(comm.allgather(min(times[_WARM_UP:]))))
