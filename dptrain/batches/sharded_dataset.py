"""Batches of samples in shards: `utils.ShardedDataset`, and mixes of several.

Which sample is where follows from (seed, pass, sizes of the shards), so a checkpoint holds a position, a resumed
training opens only the shards around it, and any number of ranks trains on the same batches.
"""

import copy
import math
import os
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain.batches.py_dataset import PassDataset
from dptrain.batches.resampling import resized
from dptrain.batches.workers import Workers
from dptrain.comm.parts import cut
from dptrain.data.shards.formats import ReadOptions
from dptrain.data.shards.order import BlockOrder, MixOrder
from dptrain.data.shards.shard_set import ShardOptions, ShardSet, agreed, open_shards, rows_of
from dptrain.data.shards.stores import FIRST_WAIT, Store
from dptrain.errors import ConfigError, DataError
from dptrain.program import tree
from dptrain.random import default_seed
from dptrain.registry.arguments import checked_arguments
from dptrain.runtime.defaults import DEFAULT_CACHE_BYTES, DEFAULT_MAX_BYTES
from dptrain.runtime.failure import warn
from dptrain.runtime.launch.launcher import share_of_cores
from dptrain.runtime.text import short

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
# What a stage makes of a batch: the batch, and which of its rows stay; None for all.
Stage = Callable[[Any], tuple[Any, Array | None]]

# Threads of a rank that make batches or fetch shards, at most.
_MOST_THREADS = 4
# What a converted shard may take, as a multiple of its file.
_EXPANSION = 4


class SampleDataset(PassDataset):
    """Base of data sets whose samples have positions in a pass; `map` and `filter` return changed copies."""

    keeps_order = True

    def __init__(self, batch_size: int, total: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size}: expected an integer >= 1")
        threads = max(1, min(_MOST_THREADS, share_of_cores(comms.current().local_size)))
        super().__init__(workers=threads, max_queue_size=2 * threads)
        self.batch_size, self.num_samples = batch_size, total
        self._stages: tuple[Stage, ...] = ()
        self._epoch = 0

    def __len__(self) -> int:
        return math.ceil(self.num_samples / self.batch_size)

    def on_pass_begin(self, number: int) -> None:
        """Take the order of pass `number`."""
        self._epoch = number

    def shard(self, index: int, part: int, parts: int) -> Any:
        """Read and return one part of a batch."""
        start = index * self.batch_size
        stop = min(start + self.batch_size, self.num_samples)
        begin, end = cut(start, stop, parts)[part]
        # Of more ranks than samples some have no rows, but of the right shapes.
        batch, mask = self._staged(self._epoch, np.arange(begin, max(end, begin + 1)))
        mask[end - begin :] = False
        if mask.any():
            return batch
        nothing = tree.map_leaves(lambda path, leaf: np.asarray(leaf)[:0], batch)
        if self._staged(self._epoch, np.arange(start, stop))[1].any():
            return nothing
        return nothing if part else self._sample_before(start)

    def _sample_before(self, position: int) -> Any:
        """Return the nearest sample before a position that `filter` leaves, as a batch of one; behind 0 is the last."""
        for stop in range(position, position - self.num_samples, -self.batch_size):
            size = min(self.batch_size, self.num_samples - (position - stop))
            batch, mask = self._staged(self._epoch, np.arange(stop - size, stop) % self.num_samples)
            if mask.any():
                return tree.map_leaves(lambda path, leaf: leaf[-1:], batch)
        raise DataError("filter leaves none of the samples")

    def map(self, function: Callable[..., Any]) -> Self:
        """Return the data set with each batch replaced by `function` of it, as `tf.data.Dataset.map`.

        A tuple (x, y) is passed as two arguments. The function must treat rows one by one: a rank passes it its own
        rows of a batch. Several threads may call it.
        """

        def stage(batch: Any) -> tuple[Any, None]:
            return (function(*batch) if isinstance(batch, tuple) else function(batch)), None

        return self._with(_stages=(*self._stages, stage))

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """Return the data set without the samples for which `predicate` is false.

        It gets what `map` gets, and returns booleans, (rows,). Batches keep their place and get smaller; one that would
        have no sample has the last sample before it that stays.
        """

        def stage(batch: Any) -> tuple[Any, Array]:
            keep = np.asarray(predicate(*batch) if isinstance(batch, tuple) else predicate(batch))
            rows = len(tree.leaves(batch)[0])
            if keep.dtype != bool or keep.shape != (rows,):
                raise ConfigError(f"filter: expected {rows} booleans, one a sample, found {keep.dtype} {keep.shape}")
            return tree.map_leaves(lambda path, leaf: leaf[keep], batch), keep

        return self._with(_stages=(*self._stages, stage))

    def take(self, samples: int) -> Self:
        """Return the data set of the first samples of each pass."""
        if samples < 1:
            raise ConfigError(f"take: {samples} samples; expected 1 or more")
        return self._with(num_samples=min(samples, self.num_samples))

    @abstractmethod
    def describe_order(self) -> list[Any]:
        """Return what decides which samples a batch has."""

    @abstractmethod
    def _read(self, epoch: int, positions: Indices) -> tuple[Any, Array]:
        """Return the samples at positions of a pass, as many as could be read, and a mask of these positions."""

    def _staged(self, epoch: int, positions: Indices) -> tuple[Any, Array]:
        """Return the samples at positions of a pass after all stages, and a mask of the positions that stay."""
        batch, mask = self._read(epoch, positions)
        for stage in self._stages:
            batch, keep = stage(batch)
            if keep is not None:
                mask[np.flatnonzero(mask)[~keep]] = False
        return batch, mask

    def _with(self, **changes: Any) -> Self:
        changed = copy.copy(self)
        vars(changed).update(changes, _loops=count())
        return changed


class ShardedDataset(SampleDataset):
    """Batches of samples in many files, local or in an object store, of any total size. Collective.

    Shards are Parquet files (a batch is a dictionary of columns), WebDataset tars (a dictionary of members), or shards
    of token ids, `.npy` or `.bin` (windows of ids, and the next ids as targets). Rank 0 lists them. Sizes come from the
    index that `python -m dptrain index` writes beside the shards, else from their headers; tars without an index are
    read once before the training.

    Args:
        urls: paths, addresses (`s3://`, `gs://`, `https://`, ...), globs, ranges (`{000..127}`) or folders, or one of
            them.
        batch_size: samples of a global batch.
        shuffle: whether each pass has another order: shards are permuted, then the samples within blocks of
            `shards_per_block`.
        seed: of the orders; by default that of `set_random_seed`.
        sequence_length: ids of a window of a token shard; windows do not overlap.
        target: the column, member or key of `.json` members that is y. x is the rest: one field as an array, several
            columns of numbers as (rows, columns) in float32, else a dictionary. By default y is the class of pictures
            with `.cls`.
        columns: of Parquet files to read; by default all.
        image_size: (height, width) to which pictures are resized, bilinear, then float32 of 0 to 255. Without, they are
            uint8 and must have one size.
        token_dtype: "uint16" or "uint32", of `.bin` files without llm.c's header.
        vocabulary_size: refuses ids that are as high or higher.
        shards_per_block: shards that are mixed; a rank has about twice as many open or on the way.
        bad_shards: "stop" at a shard that cannot be read, or "skip" it: then other samples of its block take the place
            of its own. `skipped` lists the reasons.
        retries: attempts to read from a store after the first, with waits of 0.5, 1, 2, ... seconds, up to 30.
        max_bytes: of the open shards of a rank, and of one shard or sample, in memory.
        cache_bytes: of the copies of remote shards, and of converted Parquet files, on disk, a node.
        cache_dir: folder of these copies; by default in the cache folder of dptrain.

    Raises:
        ConfigError: an argument is out of range, or a library is missing.
        DataError: no shard matches, formats or columns differ, or a shard is damaged; with its name and offset.
        AgreedError: either of these, on all ranks, under mpirun.
    """

    @checked_arguments
    def __init__(
        self,
        urls: Any,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int | None = None,
        sequence_length: int | None = None,
        *,
        target: str | None = None,
        columns: Sequence[str] | None = None,
        image_size: Sequence[int] | None = None,
        token_dtype: str = "uint16",
        vocabulary_size: int | None = None,
        shards_per_block: int = 8,
        bad_shards: str = "stop",
        retries: int = 5,
        max_bytes: int = DEFAULT_MAX_BYTES,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        names = [os.fspath(urls)] if isinstance(urls, str | os.PathLike) else [os.fspath(url) for url in urls]
        comm = comms.current()
        checked = (sequence_length, token_dtype, bad_shards, shards_per_block, retries, max_bytes, cache_bytes, seed)
        agreed(comm, lambda: _check(names, *checked))
        read = ReadOptions(
            None if columns is None else tuple(columns), sequence_length, token_dtype, vocabulary_size, max_bytes
        )
        options = ShardOptions(read, bad_shards, cache_bytes, None if cache_dir is None else Path(cache_dir))
        self._set = open_shards(names, Store(retries + 1, FIRST_WAIT), options, comm)
        if self.skipped:
            warn(f"skipped {len(self.skipped)} of {self.num_shards + len(self.skipped)} shards: {self.skipped[0]}")
        self._seed = (default_seed() if seed is None else seed) if shuffle else None
        self._order = BlockOrder([shard.samples for shard in self._set.shards], self._seed, shards_per_block)
        super().__init__(batch_size, self._order.total)
        self.shards_per_block, self._sequence_length = shards_per_block, sequence_length
        self._select = partial(_selected, target=target, size=None if image_size is None else tuple(image_size))
        local = comm.local_rank, comm.local_size
        self._ahead = agreed(comm, lambda: _ReadAhead(self._set, *local, shards_per_block))

    @property
    def skipped(self) -> list[str]:
        """Why shards were left out on this rank."""
        return list(self._set.skipped)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self._set.shards)

    @staticmethod
    def mix(
        datasets: Sequence[SampleDataset],
        weights: Sequence[float] | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        num_samples: int | None = None,
    ) -> "MixedDataset":
        """Return a mix of data sets: see `MixedDataset`."""
        return MixedDataset(datasets, weights, batch_size, seed, num_samples)

    def split_off(self, fraction: float) -> "tuple[ShardedDataset, ShardedDataset]":
        """Return the data set without its last shards, and these, which have `fraction` of the samples or more.

        The second is not shuffled.
        """
        if self.num_samples != self._order.total:
            raise ConfigError(
                f"split_off: {self.num_samples:,} of {self._order.total:,} samples are taken; split before take"
            )
        sizes = [shard.samples for shard in self._set.shards]
        ends = np.cumsum(sizes[::-1])
        held = int(np.searchsorted(ends, fraction * ends[-1])) + 1
        if not 0 < fraction < 1 or held >= len(sizes) or not sum(sizes[:-held]):
            raise ConfigError(
                f"the last shards cannot hold {fraction:g} of the samples: {len(sizes)} shards, the last of "
                f"{sizes[-1]:,} samples; name others (--test-data), or write smaller shards"
            )
        first, last = range(len(sizes) - held), range(len(sizes) - held, len(sizes))
        return self._part(first, self._seed), self._part(last, None)

    def _part(self, shards: range, seed: int | None) -> "ShardedDataset":
        part = self._set.part(shards)
        order = BlockOrder([shard.samples for shard in part.shards], seed, self.shards_per_block)
        ahead = self._ahead.of(part)
        return self._with(_set=part, _seed=seed, _order=order, _ahead=ahead, num_samples=order.total)

    def describe_order(self) -> list[Any]:
        """See `SampleDataset`."""
        order = [self.batch_size, self.num_samples, self._seed, self.shards_per_block, self._sequence_length]
        return [*self._set.describe, *order]

    def _read(self, epoch: int, positions: Indices) -> tuple[Any, Array]:
        self._ahead.notice(epoch, self._order, positions)
        shards, rows = self._order.locate(epoch, positions)
        for shard in np.unique(shards).tolist():
            if not self._set.is_readable(shard):
                self._replace(epoch, shard, shards, rows)
        parts, order = [], np.empty(len(positions), np.int64)
        start = 0
        for shard in np.unique(shards).tolist():
            inside = np.flatnonzero(shards == shard)
            # Rising rows are read without going back and forth.
            inside = inside[np.argsort(rows[inside], kind="stable")]
            parts.append(self._set.read(shard, rows[inside]))
            order[inside] = start + np.arange(len(inside))
            start += len(inside)
        return rows_of([self._select(part) for part in parts], order), np.ones(len(positions), bool)

    def _replace(self, epoch: int, shard: int, shards: Indices, rows: Indices) -> None:
        """Let samples of the first good shards of its block, or behind it, take the place of a bad shard's."""
        block, last = self._order.block_of(epoch, shard), -(-self.num_shards // self.shards_per_block)
        for candidate in (block, *range(block + 1, last), *range(block)):
            good = [
                other
                for other in self._order.shards(epoch, candidate)
                if other != shard and self._set.shards[other].samples and self._set.is_readable(other)
            ]
            if good:
                bad = np.flatnonzero(shards == shard)
                quotients, slots = np.divmod(rows[bad], len(good))
                shards[bad] = np.array(good)[slots]
                rows[bad] = quotients % np.array([self._set.shards[other].samples for other in good])[slots]
                return
        raise DataError(f"none of {self.num_shards} shards can be read: {self._set.skipped[0]}")


class MixedDataset(SampleDataset):
    """A mix of data sets in fixed proportions, in a random order.

    Of every 4,096 samples each data set gives its exact share. Each is read to its end before it begins again, in its
    next pass.

    Args:
        datasets: with samples of one structure.
        weights: of the data sets; by default their numbers of samples.
        batch_size: of a global batch; by default that of the first.
        seed: of the order; by default that of `set_random_seed`.
        num_samples: of a pass; by default those of all data sets together.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        weights: Sequence[float] | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        num_samples: int | None = None,
    ) -> None:
        if not datasets or not all(isinstance(dataset, SampleDataset) for dataset in datasets):
            raise ConfigError(f"mix: expected a list of ShardedDatasets, found {short(datasets)}")
        sizes = [dataset.num_samples for dataset in datasets]
        weights = sizes if weights is None else weights
        if len(weights) != len(datasets):
            raise ConfigError(f"mix: {len(weights)} weights for {len(datasets)} data sets")
        total = sum(sizes) if num_samples is None else num_samples
        if total < 1:
            raise ConfigError(f"num_samples = {total}: expected 1 or more")
        super().__init__(datasets[0].batch_size if batch_size is None else batch_size, total)
        self._datasets, self._seed = tuple(datasets), default_seed() if seed is None else seed
        self._order = MixOrder(weights, self._seed)
        self._pass_samples = total

    def describe_order(self) -> list[Any]:
        """See `SampleDataset`."""
        parts = [dataset.describe_order() for dataset in self._datasets]
        return ["mix", self.batch_size, self.num_samples, self._seed, self._order.quotas.tolist(), parts]

    def _read(self, epoch: int, positions: Indices) -> tuple[Any, Array]:
        sources, indices = self._order.locate(positions + epoch * self._pass_samples)
        parts, rows = [], []
        mask = np.zeros(len(positions), bool)
        for source in np.unique(sources).tolist():
            dataset, inside = self._datasets[source], np.flatnonzero(sources == source)
            passes, places = np.divmod(indices[inside], dataset.num_samples)
            for number in np.unique(passes).tolist():
                chosen = inside[passes == number]
                batch, keep = dataset._staged(number, places[passes == number])
                parts.append(batch)
                rows.append(chosen[keep])
                mask[chosen[keep]] = True
        return rows_of(parts, np.argsort(np.concatenate(rows), kind="stable")), mask


class _ReadAhead:
    """Threads that fetch the shards of the block in use and of the next; the ranks of a node divide them."""

    def __init__(self, shards: ShardSet, local_rank: int, local_size: int, per_block: int) -> None:
        self._shards, self._local_rank, self._local_size, self._per_block = shards, local_rank, local_size, per_block
        cache_bytes = shards.cache_bytes
        expansion = _EXPANSION if shards.format.converts else 1
        largest = sorted((shard.file.nbytes for shard in shards.shards), reverse=True)[:per_block]
        needs_disk = shards.fetches and expansion == 1
        if needs_disk and sum(largest) > cache_bytes:
            raise ConfigError(
                f"{per_block} shards, which are mixed, take up to {sum(largest):,} bytes > cache_bytes = "
                f"{cache_bytes:,}: raise cache_bytes, or lower shards_per_block"
            )
        self._next_too = 2 * expansion * sum(largest) <= cache_bytes
        # Threads go from block to block at different times.
        self._noticed: deque[tuple[int, int]] = deque(maxlen=2)
        self._workers: Workers | None = None

    def of(self, shards: ShardSet) -> "_ReadAhead":
        """Return one like this for other shards."""
        return _ReadAhead(shards, self._local_rank, self._local_size, self._per_block)

    def notice(self, epoch: int, order: BlockOrder, positions: Indices) -> None:
        """Begin to fetch what these positions and the next block need."""
        if not self._shards.fetches:
            return
        block = order.blocks(epoch, positions)[0]
        if (epoch, block) in self._noticed:
            return
        self._noticed.append((epoch, block))
        if self._workers is None:
            self._workers = Workers(_MOST_THREADS, "dptrain-shards")
            weakref.finalize(self, self._workers.close).atexit = False
        shards = order.shards(epoch, block)
        shards += order.shards(epoch, block + 1) if self._next_too else []
        for shard in shards[self._local_rank :: self._local_size]:
            self._workers.submit(partial(self._shards.fetch, shard))


def _check(
    names: Sequence[Any],
    sequence_length: int | None,
    token_dtype: str,
    bad_shards: str,
    shards_per_block: int,
    retries: int,
    max_bytes: int,
    cache_bytes: int,
    seed: int | None,
) -> None:
    if seed is not None and seed < 0:
        raise ConfigError(f"seed = {seed}: expected 0 or more")
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"urls = {short(names)}: expected paths, addresses, globs or folders")
    if token_dtype not in ("uint16", "uint32"):
        raise ConfigError(f"token_dtype = {token_dtype!r}: expected 'uint16' or 'uint32'")
    if bad_shards not in ("stop", "skip"):
        raise ConfigError(f"bad_shards = {bad_shards!r}: expected 'stop' or 'skip'")
    least = {"sequence_length": 1, "shards_per_block": 1, "retries": 0, "max_bytes": 1, "cache_bytes": 1}
    values = {
        "sequence_length": sequence_length,
        "shards_per_block": shards_per_block,
        "retries": retries,
        "max_bytes": max_bytes,
        "cache_bytes": cache_bytes,
    }
    for name, value in values.items():
        if value is not None and value < least[name]:
            raise ConfigError(f"{name} = {value}: expected an integer >= {least[name]}")


def _selected(batch: Any, target: str | None, size: tuple[int, ...] | None) -> Any:
    """Return (x, y) of a batch of fields, where there is a target; x alone of a single field; else the fields."""
    if not isinstance(batch, dict):
        return batch
    fields = dict(batch)
    if size is not None:
        fields = {name: _resized(array, size) for name, array in fields.items()}
    pictures = [name for name, array in fields.items() if _is_pictures(array)]
    if target is None:
        if len(pictures) == 1 and "cls" in fields:
            return fields[pictures[0]], fields["cls"]
        return next(iter(fields.values())) if len(fields) == 1 else fields
    if target in fields:
        y = fields.pop(target)
    elif "json" in fields:
        entries = fields.pop("json")
        try:
            y = np.asarray([entry[target] for entry in entries])
        except (KeyError, TypeError, IndexError):
            raise DataError(f"target = {target!r}: a .json member has no such key") from None
    else:
        raise DataError(f"target = {target!r}: samples have {', '.join(map(str, fields))}")
    return _inputs(fields), y


def _inputs(fields: dict[str, Array]) -> Any:
    """Return one field as an array, columns of numbers as (rows, columns), else the fields."""
    if len(fields) == 1:
        return next(iter(fields.values()))
    if fields and all(array.ndim == 1 and array.dtype.kind in "uifb" for array in fields.values()):
        return np.stack([array.astype(np.float32) for array in fields.values()], axis=1)
    return fields


def _is_pictures(array: Array) -> bool:
    first = array[0] if array.dtype == object and len(array) else array[:1]
    return isinstance(first, np.ndarray) and first.ndim + (array.dtype == object) == 4 and array.dtype.kind in "uOf"


def _resized(array: Array, size: tuple[int, ...]) -> Array:
    if not _is_pictures(array):
        return array
    return np.stack([resized(np.asarray(picture, np.float32), size, "bilinear") for picture in array])
