"""The step's collective: dptrain's all-reduce beside gloo's, for messages of 8 B to 100 MB.

    mpirun -n 2 python benchmarks/allreduce.py
    mpirun -n 2 python benchmarks/allreduce.py --rounds 15 --output benchmarks/results/allreduce_HARDWARE_DATE.md

Both sum float32 buffers in place over the same processes, taking turns in every round. 407 KB and 1.63 MB are the
gradients of 784-128-10 and 784-512-10. Without PyTorch, dptrain's alone is measured.
"""

import argparse
import importlib.util
import os
import platform
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import cpu_model, spread, versions

from dptrain import comm as comms
from dptrain.comm import Communicator

Buffer = npt.NDArray[np.float32]
Collective = Callable[[], None]

# Float32 elements; each size takes about eight to ten times the one before, the two gradients aside.
ELEMENTS = (2, 16, 128, 1024, 10_240, 101_770, 407_050, 2_500_000, 25_000_000)


def start_gloo(comm: Communicator) -> Callable[[Buffer], Collective]:
    """Join the ranks by torch.distributed and return what makes a collective of a buffer."""
    import torch
    import torch.distributed as dist

    # MPI's ranks spin while they wait; more threads than one a rank would only fight them for the cores.
    torch.set_num_threads(1)
    port = 0
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
    one_node = all(host == comm.host for host in comm.allgather(comm.host))
    os.environ["MASTER_ADDR"] = "127.0.0.1" if one_node else comm.broadcast_fact(comm.host)
    os.environ["MASTER_PORT"] = str(comm.broadcast_fact(port))
    if one_node and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever this machine's name resolves to
    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)

    def collective(buffer: Buffer) -> Collective:
        tensor = torch.from_numpy(buffer)  # the same memory
        return lambda: dist.all_reduce(tensor)

    return collective


def per_call(comm: Communicator, collective: Collective, calls: int) -> float:
    """Return the seconds of a call, over a block of calls that all ranks begin together; rank 0's clock counts."""
    comm.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        collective()
    return float(comm.broadcast_fact((time.perf_counter() - started) / calls))


def check(comm: Communicator, collective: Collective, buffer: Buffer, name: str) -> None:
    """Exit, on all ranks alike, if a collective does not give the sum."""
    buffer.fill(comm.rank + 1)
    collective()
    expected = comm.size * (comm.size + 1) / 2
    wrong = float(np.abs(buffer - np.float32(expected)).max())
    buffer.fill(0)  # a buffer summed over and over again would overflow
    if wrong:
        raise SystemExit(f"{name}: a sum over ranks is off by {wrong}")


def measure(
    comm: Communicator, collectives: dict[str, Collective], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Return the seconds of a call in every round by name; each block of calls takes about `seconds`."""
    calls = {}
    for name, collective in collectives.items():
        per_call(comm, collective, 2)  # connections, buffers, page faults
        calls[name] = max(1, min(10_000, int(seconds / max(per_call(comm, collective, 3), 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in collectives}
    for _ in range(rounds):
        for name, collective in collectives.items():
            times[name].append(per_call(comm, collective, calls[name]))
    return times


def size_name(size: int) -> str:
    """Return a number of bytes with three digits and a decimal unit."""
    for unit, factor in (("MB", 1e6), ("KB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def header(comm: Communicator) -> list[str]:
    """Return what the figures depend on, one line each."""
    nodes = len({*comm.allgather(comm.host)})
    lines = [
        "# All-reduce between ranks",
        "",
        f"- Command: `mpirun -n {comm.size} python {shlex.join(sys.argv)}`",
        f"- Machine: {cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}; nodes: {nodes}",
        f"- Ranks: {comm.size}, joined by {comm.description}",
        f"- Versions: {versions(('dptrain', 'numpy', 'mpi4py', 'torch'))}",
    ]
    if comm.local_size > (os.cpu_count() or 1):
        lines.append("- More ranks than cores: ranks that spin while they wait hold up the others.")
    return lines


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--seconds", type=float, default=0.05, metavar="S", help="of a block of calls, about")
    parser.add_argument("--max-bytes", type=int, default=100_000_000, metavar="N", help="leave out larger messages")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there as well")
    return parser.parse_args()


def main() -> None:
    """Measure all sizes; rank 0 prints."""
    options = parse()
    comm = comms.current()
    with_gloo = all(comm.allgather(importlib.util.find_spec("torch") is not None))
    lines: list[str] = []

    def report(*more: str) -> None:
        if comm.rank == 0:
            print("\n".join(more), flush=True)
            lines.extend(more)

    report(*header(comm))
    if comm.size == 1:
        report("- One rank: nothing to sum. Start it as `mpirun -n 2 python benchmarks/allreduce.py`.")
        return
    gloo = start_gloo(comm) if with_gloo else None
    if gloo is None:
        report("- PyTorch is not installed on every rank; gloo is left out (`pip install torch`)")
    report(
        "",
        f"Microseconds a call, median (min to max) of {options.rounds} rounds. The ratio is that of the medians, then"
        " the median (min to max) within each round; above 1, dptrain's is faster.",
        "",
        "| message | dptrain | GB/s |" + (" gloo | gloo / dptrain |" if gloo else ""),
        "|---:|---:|---:|" + ("---:|---:|" if gloo else ""),
    )
    for elements in ELEMENTS:
        if elements * 4 > options.max_bytes:
            continue
        buffer = np.zeros(elements, np.float32)

        def ours(buffer: Buffer = buffer) -> None:
            comm.allreduce_sum(buffer)

        collectives: dict[str, Collective] = {"dptrain": ours}
        if gloo is not None:
            collectives["gloo"] = gloo(buffer)
        for name, collective in collectives.items():
            check(comm, collective, buffer, name)
        times = measure(comm, collectives, options.rounds, options.seconds)
        mine = times["dptrain"]
        cells = [spread([1e6 * t for t in mine], ",.1f"), f"{buffer.nbytes / statistics.median(mine) / 1e9:.2f}"]
        if gloo is not None:
            other = times["gloo"]
            paired = [b / a for a, b in zip(mine, other, strict=True)]
            cells.append(spread([1e6 * t for t in other], ",.1f"))
            cells.append(f"{statistics.median(other) / statistics.median(mine):.1f}; {spread(paired, '.1f')}")
        report(f"| {size_name(buffer.nbytes)} | " + " | ".join(cells) + " |")
    if comm.rank == 0 and options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if gloo is not None:
        import torch.distributed as dist

        dist.destroy_process_group()
    comm.barrier()


if __name__ == "__main__":
    main()
