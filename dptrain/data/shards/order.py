"""The order of samples as a function of (seed, pass, sizes): any rank finds any position without those before it.

Shards are permuted, then cut into blocks of a few; the samples of a block are permuted together. So a rank reads the
shards of one block at a time, and a position is all that a checkpoint needs.
"""

import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.random import Purpose, stream

Indices = npt.NDArray[np.int64]

# Permutations of blocks that are kept: those around the boundary of two blocks.
_KEPT = 3
# Positions of a mix after which each source has its exact share; weights are rounded to multiples of its inverse.
PERIOD = 4096


class BlockOrder:
    """Where each position of a pass lies: a shard, and a sample in it. Thread-safe.

    Args:
        sizes: samples of each shard.
        seed: of the permutations; None for the order of the shards.
        shards_per_block: shards whose samples are permuted together.
    """

    def __init__(self, sizes: Sequence[int], seed: int | None, shards_per_block: int) -> None:
        self._sizes, self._seed, self._per_block = np.asarray(sizes, np.int64), seed, shards_per_block
        self.total = int(self._sizes.sum())
        self._passes: dict[int, tuple[Indices, Indices]] = {}
        self._permutations: dict[tuple[int, int], npt.NDArray[Any]] = {}
        self._lock = threading.Lock()

    def locate(self, epoch: int, positions: Indices) -> tuple[Indices, Indices]:
        """Return the shard and the sample in it of each position of a pass."""
        order, ends = self._pass(epoch)
        positions = np.asarray(positions, np.int64)
        if self._seed is not None:
            positions = self._permuted(epoch, positions, ends)
        slots = np.searchsorted(ends, positions, side="right")
        starts = ends - self._sizes[order]
        return order[slots], positions - starts[slots]

    def blocks(self, epoch: int, positions: Indices) -> list[int]:
        """Return the blocks that hold these positions of a pass, rising."""
        _, ends = self._pass(epoch)
        return sorted(set(np.searchsorted(self._block_ends(ends), positions, side="right").tolist()))

    def shards(self, epoch: int, block: int) -> list[int]:
        """Return the shards of a block in the order of the pass; none behind the last block."""
        order, _ = self._pass(epoch)
        return [int(shard) for shard in order[block * self._per_block : (block + 1) * self._per_block]]

    def block_of(self, epoch: int, shard: int) -> int:
        """Return the block of a pass that a shard is in."""
        order, _ = self._pass(epoch)
        return int(np.flatnonzero(order == shard)[0]) // self._per_block

    def _pass(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the order of the shards in a pass, and where each ends in it."""
        with self._lock:
            if epoch not in self._passes:
                order = np.arange(len(self._sizes))
                if self._seed is not None:
                    order = stream(self._seed, Purpose.SHUFFLE, epoch).permutation(order)
                if len(self._passes) >= _KEPT:
                    self._passes.pop(next(iter(self._passes)))
                self._passes[epoch] = order, np.cumsum(self._sizes[order])
            return self._passes[epoch]

    def _block_ends(self, ends: Indices) -> Indices:
        last = np.arange(self._per_block, len(ends) + self._per_block, self._per_block) - 1
        return ends[np.minimum(last, len(ends) - 1)]

    def _permuted(self, epoch: int, positions: Indices, ends: Indices) -> Indices:
        block_ends = self._block_ends(ends)
        blocks = np.searchsorted(block_ends, positions, side="right")
        permuted = np.empty_like(positions)
        for block in np.unique(blocks).tolist():
            inside = blocks == block
            start = int(block_ends[block - 1]) if block else 0
            permutation = self._permutation(epoch, block, int(block_ends[block]) - start)
            permuted[inside] = start + permutation[positions[inside] - start].astype(np.int64)
        return permuted

    def _permutation(self, epoch: int, block: int, size: int) -> npt.NDArray[Any]:
        with self._lock:
            if (epoch, block) not in self._permutations:
                if len(self._permutations) >= _KEPT:
                    self._permutations.pop(next(iter(self._permutations)))
                identity = np.arange(size, dtype=np.uint32 if size <= 1 << 32 else np.uint64)
                # Blocks count from 1: position 0 is that of the shards.
                generator = stream(self._seed or 0, Purpose.SHUFFLE, epoch, block + 1)
                self._permutations[epoch, block] = generator.permutation(identity)
            return self._permutations[epoch, block]


class MixOrder:
    """Which source each position of a mix takes from, and how many the source has given before. Thread-safe.

    Every `PERIOD` positions hold each source's exact share, in a random order.

    Args:
        weights: of the sources, positive.
        seed: of the order within a period.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.quotas, self._seed = _quotas(weights), seed
        self._sources = np.repeat(np.arange(len(weights)), self.quotas)
        self._bounds = np.cumsum([0, *self.quotas])
        self._periods: dict[int, tuple[Indices, Indices]] = {}
        self._lock = threading.Lock()

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source of each position, and its index among all that this source gives."""
        positions = np.asarray(positions, np.int64)
        periods, slots = np.divmod(positions, PERIOD)
        sources, indices = np.empty_like(positions), np.empty_like(positions)
        for period in np.unique(periods).tolist():
            inside = periods == period
            order, ranks = self._period(period)
            sources[inside] = chosen = order[slots[inside]]
            indices[inside] = period * self.quotas[chosen] + ranks[slots[inside]]
        return sources, indices

    def _period(self, period: int) -> tuple[Indices, Indices]:
        """Return the source of each position of a period, and its index among the source's in this period."""
        with self._lock:
            if period not in self._periods:
                order = stream(self._seed, Purpose.SHUFFLE, period).permutation(self._sources)
                ranks = np.empty_like(order)
                ranks[np.argsort(order, kind="stable")] = np.arange(PERIOD) - self._bounds[self._sources]
                if len(self._periods) >= _KEPT:
                    self._periods.pop(next(iter(self._periods)))
                self._periods[period] = order, ranks
            return self._periods[period]


def _quotas(weights: Sequence[float]) -> Indices:
    """Return the positions of a period that each source gets, at least one: the largest remainders are rounded up."""
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"weights = {list(weights)}: expected positive numbers")
    if len(weights) > PERIOD:
        raise ConfigError(f"{len(weights)} sources: at most {PERIOD} are mixed")
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) * PERIOD / total for weight in weights]
    quotas = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda source: (quotas[source] - shares[source], source))
    step = 1 if sum(quotas) < PERIOD else -1
    candidates = by_remainder if step > 0 else by_remainder[::-1]
    while sum(quotas) != PERIOD:
        for source in candidates:
            if sum(quotas) != PERIOD and quotas[source] + step >= 1:
                quotas[source] += step
    return np.array(quotas, np.int64)
