"""Hardware as numbers: how long an op takes on a rank, and a collective between ranks.

Sources: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009; R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", IJHPCA 19(1), 2005; P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", JPDC 69(2), 2009. The link's bandwidth here is NCCL's bus bandwidth, n 2 (P - 1) / P over the time of
an all-reduce (nccl-tests, doc/PERFORMANCE.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dptrain.comm import hierarchy


@dataclass(frozen=True)
class Link:
    """A message takes `latency` seconds, and 1 / `bandwidth` for each of its bytes."""

    bandwidth: float
    latency: float

    def shared(self, by: int) -> "Link":
        """Return the share of each of so many that send at once."""
        return Link(self.bandwidth / by, self.latency)


@dataclass(frozen=True)
class Work:
    """Floating-point operations and memory traffic of an op; `launched` if it is a kernel of its own."""

    operations: float
    nbytes: float
    launched: bool = False
    precision: str = "float32"


@dataclass(frozen=True)
class Hardware:
    """Nodes with ranks.

    Attributes:
        rates: floating-point operations/s of a rank's products by precision: "float32", "tf32", "half".
        bandwidth: of a rank's memory, bytes/s.
        launch: overhead of a product, seconds.
        least: minimal seconds of a product's work, however small, as it fills only a part of a device.
        step: overhead of a step, seconds.
        node: ranks of a node.
        link: between two ranks of a node.
        network: of a node; its ranks share it.
        memory: bytes of a rank; None for no limit.
        cores: of a node, as many ranks as compute at full speed at once; None if each has a device.
        overlaps: whether messages travel while a rank computes.
        hierarchical: whether all collectives go node first.
        sums_halves: how half precision is summed where collectives are not hierarchical: "node first", as between GPUs
            (`backend/cuda/transfers/node_first.py`), or by an "all-to-all" of all ranks.
        axes_apart: whether messages along an axis of the mesh travel beside those along others, or behind them.
        late: whether gathers that a step does not read travel while the next one computes, if messages overlap.
        urgent: whether a message starts once it is ready, or behind the op that a rank computes then.
    """

    rates: Mapping[str, float]
    bandwidth: float
    launch: float
    least: float
    step: float
    node: int
    link: Link
    network: Link
    memory: float | None = None
    cores: float | None = None
    overlaps: bool = True
    hierarchical: bool = False
    sums_halves: Literal["node first", "all-to-all"] = "node first"
    axes_apart: bool = True
    late: bool = True
    urgent: bool = True

    def busy(self, ranks: int) -> float:
        """Return how many times longer a rank computes because ranks share the cores of a node."""
        return 1.0 if self.cores is None else max(1.0, min(ranks, self.node) / self.cores)

    def seconds(self, work: Work) -> float:
        """Return the time of an op on a rank with a device of its own."""
        arithmetic = work.operations / self.rates.get(work.precision, self.rates["float32"])
        busy = max(arithmetic, work.nbytes / self.bandwidth)
        return max(busy, self.least) + self.launch if work.launched else busy

    def collective(
        self,
        name: str,
        nbytes: float,
        ranks: int,
        stride: int = 1,
        hierarchical: bool = False,
        *,
        half: bool = False,
    ) -> float:
        """Return the seconds of a collective ("all_reduce", "all_gather" or "reduce_scatter") of `nbytes` in all.

        P ranks, n bytes, latency a, seconds a byte b. Within a node an all-gather or a reduce-scatter takes log2(P) a +
        (P - 1) / P n b (recursive doubling or halving), and an all-reduce the shorter of both one after the other and
        log2(P) (a + n b) (recursive doubling). Between nodes rings take (P - 1) a + (P - 1) / P n b with the slowest
        link, twice that for an all-reduce; if that is shorter, they double too, over the network that all ranks of a
        node share.

        Ranks are `stride` numbers apart; those between do the same at the same time. `hierarchical`: within each node
        first, then between nodes, a slice by each rank; by default as the hardware's collectives are. `half`: of half
        precision, which is summed in float32.
        """
        if ranks == 1:
            return 0.0
        on_node = max(min(ranks, self.node // stride), 1)  # ranks on a node
        times = 2 if name == "all_reduce" else 1
        if half and name != "all_gather" and not self.hierarchical:
            return self._of_halves(times, nbytes, ranks, stride, on_node)
        if on_node >= ranks:
            return _doubling(times, nbytes, ranks, self.link)
        beside, nodes = min(stride, self.node), -(-ranks // on_node)
        edge = self.network.shared(beside)
        if hierarchical or self.hierarchical:
            exchanges = _possible_exchanges(name, nbytes, nodes, on_node, half)
            pause = _rounds(nodes) * edge.latency
            between_nodes = min(exchange.turns * pause + exchange.nbytes / edge.bandwidth for exchange in exchanges)
            return _doubling(times, nbytes, on_node, self.link) + between_nodes
        slowest = min(edge.bandwidth, self.link.bandwidth)
        ring = times * ((ranks - 1) * edge.latency + (ranks - 1) / ranks * nbytes / slowest)
        between = edge.shared(on_node)
        latency = _rounds(on_node) * self.link.latency + _rounds(nodes) * between.latency
        if name == "all_reduce":
            moved = _rounds(on_node) * nbytes / self.link.bandwidth + _rounds(nodes) * nbytes / between.bandwidth
        else:
            moved = (ranks - 1) / ranks * nbytes / between.bandwidth
        return min(ring, latency + moved)

    def _of_halves(self, times: int, nbytes: float, ranks: int, stride: int, on_node: int) -> float:
        """Return the seconds of a reduce-scatter between GPUs, and of an all-reduce's gather: each an all-to-all.

        Node first, float32 travels between nodes to the reduce-scatter's second sum; by an all-to-all of all ranks, the
        halves of each.
        """
        nodes, edge = -(-ranks // on_node), self.network.shared(min(stride, self.node))
        if nodes > 1 and self.sums_halves == "all-to-all":
            sent = (ranks - on_node) / ranks * nbytes * on_node
            return times * (edge.latency + sent / edge.bandwidth)
        seconds = 0.0
        if on_node > 1:
            seconds += times * (self.link.latency + (on_node - 1) / on_node * nbytes / self.link.bandwidth)
        if nodes > 1:
            wide = 2 if on_node > 1 else 1
            sent = (wide + times - 1) * (nodes - 1) / nodes * nbytes
            seconds += times * edge.latency + sent / edge.bandwidth
        return seconds


@dataclass(frozen=True)
class InterNodeTraffic:
    """Traffic between nodes of a hierarchical collective (`comm/hierarchy.py`): rounds, a node's messages and bytes."""

    turns: int
    messages: int
    nbytes: float


def inter_node_traffic(name: str, nbytes: float, nodes: int, columns: int, *, half: bool = False) -> InterNodeTraffic:
    """Return the traffic of a collective between nodes with equal parts; half precision is summed in float32."""
    *gathered_whole, large = _possible_exchanges(name, nbytes, nodes, columns, half)
    wide = 2 if half else 1
    return gathered_whole[0] if gathered_whole and nbytes * wide * nodes / columns <= hierarchy.GATHERED else large


def _possible_exchanges(
    name: str, nbytes: float, nodes: int, columns: int, half: bool = False
) -> list[InterNodeTraffic]:
    """Return the possible exchanges: small sums are gathered whole, larger ones scattered first."""
    other_nodes, wide = nodes - 1, 2 if half and name != "all_gather" else 1

    def exchange(turns: int, nbytes_sent: float) -> InterNodeTraffic:
        messages = turns * columns * other_nodes
        return InterNodeTraffic(turns, messages, nbytes_sent + columns * other_nodes * hierarchy.CALL)

    room = hierarchy.PIECE * (columns if name == "all_gather" else 1)
    rounds = max(math.ceil(nbytes * (3 if wide == 2 else 1) / room), 1)
    if name != "all_reduce":
        return [exchange(1 + rounds, wide * nbytes * other_nodes / nodes)]
    return [
        exchange(1, wide * nbytes * other_nodes),
        exchange(1 + 2 * rounds, (1 + wide) * nbytes * other_nodes / nodes),
    ]


def _doubling(times: int, nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a collective by recursive doubling; an all-reduce has `times` 2."""
    if ranks == 1:
        return 0.0
    rounds = _rounds(ranks)
    scattered = times * (rounds * link.latency + (ranks - 1) / ranks * nbytes / link.bandwidth)
    return min(scattered, rounds * (link.latency + nbytes / link.bandwidth)) if times == 2 else scattered


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))
