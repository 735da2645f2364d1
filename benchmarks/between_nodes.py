"""Collectives between nodes: what travels, and CPU time, node first and flat.

    MPIR_CVAR_NUM_CLIQUES=2 MPIR_CVAR_CLIQUES_BY_BLOCK=1 mpirun -n 4 python benchmarks/between_nodes.py

MPICH then takes the ranks of this machine for those of two nodes, whose messages go through its network module. Bytes
are of one rank's calls of MPI for ranks of other nodes, counted where they are made; of MPI's own all-reduce and
all-gather they are not known. CPU time is of all ranks together, with what they spend waiting; of several rounds, one
of each way in turn.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain.comm import current
from dptrain.comm.hierarchy import HierarchicalCollectives
from dptrain.program.cost.hardware import inter_node_traffic

ROUNDS = 15


class Counting:
    """A column that counts the bytes that it has for other nodes."""

    def __init__(self, column: Any, node: int) -> None:
        self.column, self.node, self.nbytes = column, node, 0

    @property
    def call(self) -> Any:
        """See `NodePeers`."""
        return self.column.call

    def all_gather(self, memory: Any, places: Any) -> None:
        """See `NodePeers`."""
        first, last = places[self.node]
        self.nbytes += (len(places) - 1) * (last - first)
        self.column.all_gather(memory, places)

    def all_to_all(self, memory: Any, places: Any, out: Any) -> None:
        """See `NodePeers`."""
        self.nbytes += sum(last - first for node, (first, last) in enumerate(places) if node != self.node)
        self.column.all_to_all(memory, places, out)


def main() -> None:
    """Print a line for each collective and size."""
    comm: Any = current()
    comm.allreduce_sum(np.zeros(1))
    together = comm._shared
    assert isinstance(together, HierarchicalCollectives), "expected ranks of several nodes, of which some share one"
    if together._column is not None:
        together._column = Counting(together._column, together._node_index)
    columns = min(map(len, comm._nodes))
    for elements in (1200, 120_000, 4_800_000):
        counts = [elements // comm.size] * comm.size
        flat, part = np.ones(elements, np.float32), np.ones(counts[0], np.float32)
        ways: dict[str, Callable[[], None]] = {
            "all_reduce": lambda flat=flat: comm.allreduce_sum(flat),
            "reduce_scatter": lambda flat=flat, part=part, counts=counts: comm.reduce_scatter(flat, part, counts),
            "all_gather": lambda flat=flat, part=part, counts=counts: comm.all_gather(part, flat, counts),
        }
        for name, act in ways.items():
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(ROUNDS):
                for first, seconds in times.items():
                    comm._shared = together if first else None
                    if together._column is not None:
                        together._column.nbytes = 0
                    comm.barrier()
                    begun = time.process_time()
                    act()
                    seconds.append(sum(comm.allgather(time.process_time() - begun)))
                    if first:
                        sent = sum(comm.allgather(0 if together._column is None else together._column.nbytes))
                    flat[:] = 1
            predicted = inter_node_traffic(name, 4 * elements, len(comm._nodes), columns).nbytes * len(comm._nodes)
            if comm.rank == 0:
                ratios = [hierarchical / other for hierarchical, other in zip(times[True], times[False], strict=True)]
                middle, (low, *_, high) = statistics.median(ratios), statistics.quantiles(ratios, n=4)
                took, ratio = 1e3 * statistics.median(times[True]), f"{middle:.2f} ({low:.2f} to {high:.2f})"
                print(f"| {name} | {4 * elements:,} | {sent:,} | {predicted:,.0f} | {took:.2f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
