"""Which samples a rank trains on in each step: permutation, global batches, shards.

All ranks compute the same plan from (seed, epoch) and never talk about it. A global batch is cut into shards, and each
rank takes a contiguous run of them. By default there is one shard a rank; with a fixed number of shards, whatever the
world size, every shard is computed with the same shapes and shard gradients can be summed in one fixed tree.
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

# Samples that a rank evaluates at once where nobody asks for a number: a larger batch is faster, and activations of
# this many are small.
EVALUATION_ROWS = 256
# Of a batch, whatever the number of ranks.
_MOST_SHARDS = 1 << 16

# Shards of every global batch, where this process is to have the same bits on any number of ranks; None if nobody says.
_fixed: int | None = None


def fix_shards(shards: int) -> None:
    """Cut every global batch into so many shards from now on, whatever the number of ranks."""
    global _fixed
    _fixed = shards


def fixed_shards() -> int | None:
    """Return into how many shards global batches are cut, whatever the number of ranks; None for one a rank.

    Raises:
        ConfigError: `DPTRAIN_REPRODUCIBLE` is no such number.
    """
    text = os.environ.get("DPTRAIN_REPRODUCIBLE", "")
    if _fixed is not None or text in ("", "0"):
        return _fixed
    if not text.isdecimal():
        raise ConfigError(f"DPTRAIN_REPRODUCIBLE = {text!r}: expected 0, 1, or a number of shards of a global batch")
    return REPRODUCIBLE_SHARDS if text == "1" else int(text)


@dataclass(frozen=True)
class Shard:
    """A rank's contiguous part of a global batch.

    Attributes:
        start: its first place in the rank's epoch order.
        stop: one past its last place; equal to `start` where it is empty.
        first_row: place of its first sample in the global batch.
        batch_rows: samples of the global batch.
        number: which of the global batch's shards it is, from 0.
        of: how many those are, where their number is fixed: what is summed over them is then added in one tree,
            whichever ranks have them. None: one a rank.
    """

    start: int
    stop: int
    first_row: int
    batch_rows: int
    number: int = 0
    of: int | None = None

    @property
    def rows(self) -> int:
        """Number of samples."""
        return self.stop - self.start


class Sampler(ABC):
    """The plan of an epoch for one rank.

    Attributes:
        steps: of a pass through the data, the same on all ranks (but for `LocalSampler`).
        capacity: samples of the largest shard.
        shards_per_batch: of all ranks together, where their number is fixed; None: one a rank.
    """

    steps: int
    capacity: int
    shards_per_batch: int | None = None

    @abstractmethod
    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the rows of the rank's data in the order of this epoch (shape (rows,), int64)."""

    @abstractmethod
    def shards(self, step: int) -> list[Shard]:
        """Return this rank's shards of a step, 0 to steps - 1, in order; some may be empty."""


def _steps(samples: int, batch_size: int, drop_last: bool) -> int:
    """Steps of a pass through the data.

    Raises:
        ConfigError: there would be none.
    """
    if samples < 1:
        raise ConfigError("the training set is empty")
    steps = samples // batch_size if drop_last else -(-samples // batch_size)
    if steps == 0:
        raise ConfigError(
            f"batch_size = {batch_size} with drop_last leaves no step of {samples} samples: "
            f"use a batch size of at most {samples}, or no drop_last"
        )
    return steps


class GlobalSampler(Sampler):
    """Every rank sees all rows and takes its slice of each global batch of one permutation f(seed, epoch).

    Args:
        samples: rows of the training set.
        batch_size: samples of a global batch.
        rank: this rank.
        world: number of ranks.
        seed: of the permutation.
        shuffle: False keeps the stored order; "batch" changes it within each global batch only, as Keras.
        drop_last: leave out a last batch that is not full.
        shards_per_batch: at least `world`, dealt out as evenly as possible, of which some are empty if a batch has
            fewer samples; None for one shard a rank.

    Raises:
        ConfigError: a batch size below 1 or below the number of ranks, no step, fewer shards than ranks, or too many.
    """

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
    """Each rank keeps 1/world of the rows and shuffles within them; global batches take a proportional part of each.

    Args:
        samples: rows of the training set over all ranks.
        batch_size: samples of a global batch; where rows do not divide evenly a batch may have up to `world` more or
            fewer, its weight being counted as it is.
        rank: this rank.
        world: number of ranks.
        seed: of the permutations, which differ between ranks.
        shuffle: False keeps the stored order.
        drop_last: leave out a last batch that is not full.

    Raises:
        ConfigError: a batch size below 1 or below the number of ranks, or no step.
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
        """Every rank's places of one step: the same fraction of each rank's rows."""
        begin = step * self._batch_size
        end = min(begin + self._batch_size, self._samples)
        return [(count * begin // self._samples, count * end // self._samples) for count in self._counts]

    def shards(self, step: int) -> list[Shard]:
        """Return this rank's one shard of a step."""
        bounds = self._bounds(step)
        first_row = sum(stop - start for start, stop in bounds[: self._rank])
        return [Shard(*bounds[self._rank], first_row, sum(stop - start for start, stop in bounds))]


class PartSampler(Sampler):
    """Some rows of a data set, in the order of a sampler of as many.

    Args:
        rows: which ones (shape (samples,), int64).
        sampler: of samples that are numbered from 0.
    """

    def __init__(self, rows: npt.NDArray[np.int64], sampler: GlobalSampler) -> None:
        self._rows, self._sampler = rows, sampler
        self.steps, self.capacity, self.shards_per_batch = sampler.steps, sampler.capacity, sampler.shards_per_batch

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return these rows in the order of this epoch."""
        return self._rows[self._sampler.order(epoch)]

    def shards(self, step: int) -> list[Shard]:
        """Return those of the sampler."""
        return self._sampler.shards(step)


class LocalSampler(Sampler):
    """A rank's own rows in their order, for what needs no step in common: each rank may have another number of steps.

    Args:
        start: its first row.
        stop: one past its last row.
        batch_size: rows at once.
    """

    def __init__(self, start: int, stop: int, batch_size: int) -> None:
        self._start, self._stop, self._batch_size = start, stop, batch_size
        self.steps = -(-(stop - start) // batch_size)
        self.capacity = min(batch_size, stop - start)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the stored order."""
        return np.arange(self._stop, dtype=np.int64)

    def shards(self, step: int) -> list[Shard]:
        """Return the one piece of a step, which is a batch of this rank's own."""
        begin = self._start + step * self._batch_size
        end = min(begin + self._batch_size, self._stop)
        return [Shard(begin, end, 0, end - begin)]


def shards_of(first: int, end: int, rank: int, world: int, shards: int | None) -> list[Shard]:
    """Return a rank's shards of the global batch that has these places.

    Args:
        first: its first place.
        end: one past its last.
        rank: the rank.
        world: number of ranks.
        shards: of the batch, dealt out as evenly as possible; None for one a rank.
    """
    pieces = list(enumerate(cut(first, end, shards or world)))
    mine = cut(0, shards or world, world)[rank]
    return [
        Shard(start, stop, start - first, end - first, number, shards) for number, (start, stop) in pieces[slice(*mine)]
    ]


def check_shards(shards: int, world: int) -> None:
    """Refuse a fixed number of shards that leaves a rank without one, or that nobody can mean.

    Raises:
        ConfigError: there are fewer than ranks, or too many.
    """
    if shards > _MOST_SHARDS:
        raise ConfigError(f"shards_per_batch = {shards}: use at most {_MOST_SHARDS}")
    if shards < world:
        raise ConfigError(
            f"shards_per_batch = {shards} leaves some of the {world} ranks without work: use at least {world}, or "
            f"mpirun -n {shards}"
        )


def check_batch_size(batch_size: int, world: int) -> None:
    """Refuse a global batch that leaves a rank without a sample in every step.

    Raises:
        ConfigError: batch_size is below 1 or below `world`.
    """
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
