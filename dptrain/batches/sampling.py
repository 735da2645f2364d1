"""Samplers: which samples a rank trains on in each step.

All ranks compute the same plan from (seed, epoch), without messages. A global batch is cut into shards, and each rank
takes a contiguous run of them: one by default. With a fixed number of shards, whatever the world size, every shard is
computed with the same shapes, and shard gradients can be summed in one fixed tree.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dptrain.comm.parts import cut
from dptrain.errors import ConfigError
from dptrain.random import Purpose, stream
from dptrain.runtime.defaults import REPRODUCIBLE_SHARDS

# Default samples of a rank's evaluation batch: large batches are faster, and activations of this many are small.
EVALUATION_ROWS = 256
# Most shards of a batch, whatever the number of ranks.
_MOST_SHARDS = 1 << 16

# Shards of every global batch for the same bits on any number of ranks; None if not set.
_fixed: int | None = None


def fix_shards(shards: int) -> None:
    """Cut every global batch into this many shards from now on, whatever the number of ranks."""
    global _fixed
    _fixed = shards


def fixed_shards() -> int | None:
    """Return the fixed number of shards of a global batch, also from `DPTRAIN_REPRODUCIBLE`; None for one a rank."""
    text = os.environ.get("DPTRAIN_REPRODUCIBLE", "")
    if _fixed is not None or text in ("", "0"):
        return _fixed
    if not text.isdecimal():
        raise ConfigError(f"DPTRAIN_REPRODUCIBLE = {text!r}: expected 0, 1, or a number of shards of a global batch")
    return REPRODUCIBLE_SHARDS if text == "1" else int(text)


@dataclass(frozen=True)
class Shard:
    """A rank's contiguous part of a global batch."""

    start: int  # its first index in the rank's epoch order
    stop: int  # one past its last index; equal to `start` where it is empty
    first_row: int  # index of its first sample in the global batch
    batch_rows: int  # samples of the global batch
    number: int = 0  # its index among the global batch's shards
    # Their number where it is fixed: sums over them form one tree on any number of ranks; None: one a rank
    of: int | None = None

    @property
    def rows(self) -> int:
        """Number of samples."""
        return self.stop - self.start


class Sampler(ABC):
    """The plan of an epoch for one rank."""

    steps: int  # steps of a pass, the same on all ranks (except for `LocalSampler`)
    capacity: int  # samples of the largest shard
    shards_per_batch: int | None = None  # over all ranks, where fixed; None: one a rank

    @abstractmethod
    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the rows of the rank's data in the order of this epoch, (rows,) int64."""

    @abstractmethod
    def shards(self, step: int) -> list[Shard]:
        """Return this rank's shards of a step, in order; some may be empty."""


def _steps(samples: int, batch_size: int, drop_last: bool) -> int:
    """Return the steps of a pass; refuse a pass without any."""
    if samples < 1:
        raise ConfigError("the training set is empty")
    steps = samples // batch_size if drop_last else -(-samples // batch_size)
    if steps == 0:
        raise ConfigError(
            f"batch_size = {batch_size} with drop_last leaves no batch of {samples} samples: "
            f"use a batch size of at most {samples}, or no drop_last"
        )
    return steps


class GlobalSampler(Sampler):
    """Every rank sees all rows and takes its slice of each global batch of one permutation f(seed, epoch)."""

    def __init__(
        self,
        samples: int,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        *,
        seed: int = 0,
        shuffle: bool | Literal["batch"] = True,
        drop_last: bool = False,
        shards_per_batch: int | None = None,
    ) -> None:
        check_batch_size(batch_size, world)
        self.steps = _steps(samples, batch_size, drop_last)
        self._samples, self._batch_size, self._seed, self._shuffle = samples, batch_size, seed, shuffle
        self.shards_per_batch = shards_per_batch
        self._shards = world if shards_per_batch is None else shards_per_batch
        check_shards(self._shards, world)
        self._rank, self._world = rank, world
        self.capacity = -(-min(batch_size, samples) // self._shards)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the permutation of all rows, the same on every rank."""
        if self._shuffle == "batch":
            return _order_in_batches(self._samples, self._batch_size, self._seed, epoch)
        return _order(self._samples, bool(self._shuffle), self._seed, epoch)

    def shards(self, step: int) -> list[Shard]:
        """Return this rank's shards of one global batch."""
        first = step * self._batch_size
        end = min(first + self._batch_size, self._samples)
        return shards_of(first, end, self._rank, self._world, self.shards_per_batch)


class StaticSampler(Sampler):
    """Each rank keeps 1/world of the rows and shuffles within them; a global batch takes the same fraction of each.

    If rows do not divide evenly, a batch may differ by up to `world` samples, and is weighted accordingly.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        check_batch_size(batch_size, world)
        self.steps = _steps(samples, batch_size, drop_last)
        self._samples, self._batch_size, self._seed, self._shuffle = samples, batch_size, seed, shuffle
        self._counts = [stop - start for start, stop in cut(0, samples, world)]
        self._rank = rank
        # floor(a + b) - floor(a) <= ceil(b), with b a rank's fraction of a full batch
        self.capacity = -(-self._counts[rank] * min(batch_size, samples) // samples)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return a permutation of this rank's own rows, numbered from 0."""
        return _order(self._counts[self._rank], self._shuffle, self._seed, epoch, self._rank)

    def _bounds(self, step: int) -> list[tuple[int, int]]:
        """Return each rank's bounds of one step: the same fraction of each rank's rows."""
        begin = step * self._batch_size
        end = min(begin + self._batch_size, self._samples)
        return [(count * begin // self._samples, count * end // self._samples) for count in self._counts]

    def shards(self, step: int) -> list[Shard]:
        """Return this rank's only shard of a step."""
        bounds = self._bounds(step)
        first_row = sum(stop - start for start, stop in bounds[: self._rank])
        return [Shard(*bounds[self._rank], first_row, sum(stop - start for start, stop in bounds))]


class PartSampler(Sampler):
    """A subset of the rows, in the order of a sampler of as many."""

    def __init__(self, rows: npt.NDArray[np.int64], sampler: GlobalSampler) -> None:
        self._rows, self._sampler = rows, sampler
        self.steps, self.capacity, self.shards_per_batch = sampler.steps, sampler.capacity, sampler.shards_per_batch

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return these rows in the order of this epoch."""
        return self._rows[self._sampler.order(epoch)]

    def shards(self, step: int) -> list[Shard]:
        """Return the sampler's shards."""
        return self._sampler.shards(step)


class LocalSampler(Sampler):
    """A rank's own rows in stored order, for work without common steps: ranks may differ in their number of steps."""

    def __init__(self, start: int, stop: int, batch_size: int) -> None:
        self._start, self._stop, self._batch_size = start, stop, batch_size
        self.steps = -(-(stop - start) // batch_size)
        self.capacity = min(batch_size, stop - start)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the stored order."""
        return np.arange(self._stop, dtype=np.int64)

    def shards(self, step: int) -> list[Shard]:
        """Return the one shard of a step: a batch of this rank alone."""
        begin = self._start + step * self._batch_size
        end = min(begin + self._batch_size, self._stop)
        return [Shard(begin, end, 0, end - begin)]


def shards_of(first: int, end: int, rank: int, world: int, shards: int | None) -> list[Shard]:
    """Return a rank's shards of the global batch [first, end); `shards` is their fixed number, None for one a rank."""
    pieces = list(enumerate(cut(first, end, shards or world)))
    mine = cut(0, shards or world, world)[rank]
    return [
        Shard(start, stop, start - first, end - first, number, shards) for number, (start, stop) in pieces[slice(*mine)]
    ]


def check_shards(shards: int, world: int) -> None:
    """Refuse a fixed number of shards below the number of ranks, or absurdly large."""
    if shards > _MOST_SHARDS:
        raise ConfigError(f"shards_per_batch = {shards}: use at most {_MOST_SHARDS}")
    if shards < world:
        raise ConfigError(
            f"shards_per_batch = {shards} leaves some of the {world} ranks without work: use at least {world}, or "
            f"mpirun -n {shards}"
        )


def check_batch_size(batch_size: int, world: int) -> None:
    """Refuse a global batch below 1, or one that leaves a rank without samples in every step."""
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size}: expected an integer >= 1")
    if batch_size < world:
        raise ConfigError(
            f"batch_size = {batch_size} is the global batch and leaves some of the {world} ranks without work: "
            f"use at least {world}, or mpirun -n {batch_size}"
        )


def _order(samples: int, shuffle: bool, seed: int, epoch: int, *part: int) -> npt.NDArray[np.int64]:
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    return stream(seed, Purpose.SHUFFLE, epoch, *part).permutation(samples)


def _order_in_batches(samples: int, batch_size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    order = np.arange(samples, dtype=np.int64)
    for number, begin in enumerate(range(0, samples, batch_size)):
        stream(seed, Purpose.SHUFFLE, epoch, number).shuffle(order[begin : begin + batch_size])
    return order
