"""Adapters of the user's generators, PyDatasets and loaders to sources of batches.

The order of events follows keras/src/trainers/data_adapters/ (3.15).
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np

from dptrain.errors import ConfigError, DataError
from dptrain.program import tree
from dptrain.random import Purpose, stream
from dptrain.runtime.text import short

# Returned by a draw after the last batch.
END: Final = object()
Draw = Callable[[], Any]

_TUPLES = "either (input,) or (inputs, targets) or (inputs, targets, sample_weights). Received:"
# Batches that one thread draws ahead.
_AHEAD = 2


class BatchSource(ABC):
    """Global batches, the same ones on all ranks."""

    kind: str  # as messages call it
    workers: int = 1  # threads that may draw at once
    ahead: int = _AHEAD  # batches drawn ahead at most
    sharded: bool = False  # whether each rank draws only its part of a batch
    by_number: bool = False  # whether a batch can be drawn without those before it
    class_weight: Mapping[int, float] | None = None  # weights of samples by label
    order: Any = None  # what decides which samples a batch has, in JSON, where the source can say

    @property
    @abstractmethod
    def num_batches(self) -> int | None:
        """Batches of a pass; None where only its end tells."""

    @abstractmethod
    def start(self, number: int) -> Iterator[Draw]:
        """Begin pass `number` (from 0); each draw returns a batch of the user's, or `END`."""

    def draw_whole(self) -> None:  # noqa: B027  # only sources of parts need it
        """Draw whole batches on every rank from now on."""

    @abstractmethod
    def parts(self, batch: Any) -> tuple[Any, ...]:
        """Return (x,), (x, y) or (x, y, sample_weight) of a batch, or raise a DataError."""

    @abstractmethod
    def on_epoch_begin(self) -> None:
        """Notify the user's object that an epoch begins."""

    @abstractmethod
    def on_epoch_end(self) -> None:
        """Notify the user's object that an epoch has ended."""

    def look(self) -> tuple[Any, ...]:
        """Return the parts of the first batch, as Keras does to learn shapes; call `on_epoch_end` afterwards."""
        self.on_epoch_begin()
        batch = next(self.start(0))()
        if batch is END:
            raise DataError(f"the {self.kind} returns no batch")
        return self.parts(batch)


class GeneratorSource(BatchSource):
    """A generator or another iterator, which cannot be restarted.

    Keras peeks at two batches and replays them at each start of a pass: a second epoch of an exhausted generator trains
    on these two.
    """

    kind = "generator"

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._first = [copied(batch) for batch in itertools.islice(iterator, 2)]
        if not self._first:
            raise ConfigError(
                "When passing a Python generator to a Keras model, the generator must yield at least one batch. "
                "Received an empty generator."
            )
        self.parts(self._first[0])

    @property
    def num_batches(self) -> int | None:
        """None: only the end tells."""
        return None

    def start(self, number: int) -> Iterator[Draw]:
        """Yield the batches peeked at, then the rest."""
        return itertools.repeat(partial(next, itertools.chain(self._first, self._iterator), END))

    def parts(self, batch: Any) -> tuple[Any, ...]:
        """Return a tuple of one to three parts."""
        if not isinstance(batch, tuple):
            raise ConfigError(
                "When passing a Python generator to a Keras model, the generator must return a tuple, "
                f"{_TUPLES} {short(batch)}"
            )
        return _checked_parts(batch)

    def on_epoch_begin(self) -> None:
        """Do nothing: a generator has no hooks."""

    def on_epoch_end(self) -> None:
        """Do nothing: a generator has no hooks."""


class LoaderSource(BatchSource):
    """An iterable that can be iterated repeatedly, such as a torch DataLoader."""

    def __init__(self, loader: Iterable[Any], kind: str) -> None:
        self._loader, self.kind = loader, kind

    @property
    def num_batches(self) -> int | None:
        """The loader's length, where it has one."""
        try:
            return len(self._loader)  # type: ignore[arg-type]  # TypeError if it has none
        except TypeError:
            return None

    def start(self, number: int) -> Iterator[Draw]:
        """Iterate from the beginning."""
        return itertools.repeat(partial(next, iter(self._loader), END))

    def parts(self, batch: Any) -> tuple[Any, ...]:
        """Return a tuple of one to three parts; x alone becomes (x,)."""
        return _checked_parts(tuple(batch) if isinstance(batch, list | tuple) else (batch,))

    def on_epoch_begin(self) -> None:
        """Do nothing: a loader has no hooks."""

    def on_epoch_end(self) -> None:
        """Do nothing: a loader has no hooks."""


class PyDatasetSource(BatchSource):
    """A dataset indexed by batch, see `dptrain.utils.PyDataset`."""

    kind = "PyDataset"
    by_number = True

    def __init__(
        self,
        dataset: Any,
        *,
        class_weight: Mapping[int, float] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._dataset, self.class_weight, self._seed = dataset, class_weight, seed
        self._shuffle = shuffle and not getattr(dataset, "keeps_order", False)
        if callable(describe := getattr(dataset, "describe_order", None)):
            self.order = describe()
        if getattr(dataset, "use_multiprocessing", False):
            raise ConfigError(
                "not supported: use_multiprocessing=True, because processes forked under MPI may hang; use workers=N "
                "for threads"
            )
        self.workers = max(1, int(getattr(dataset, "workers", 1)))
        self.ahead = max(1, int(getattr(dataset, "max_queue_size", 10))) if self.workers > 1 else _AHEAD
        self._get = dataset.__getitem__
        if world > 1 and callable(getattr(dataset, "shard", None)):
            self.sharded, self._get = True, partial(_part, dataset, rank, world)
        if self.num_batches == 0:
            raise ConfigError("The PyDataset has length 0")

    def draw_whole(self) -> None:
        """Draw whole batches on every rank, so that shards do not depend on the number of ranks."""
        self.sharded, self._get = False, self._dataset.__getitem__

    @property
    def num_batches(self) -> int | None:
        """The dataset's number of batches; None for an endless one."""
        if hasattr(type(self._dataset), "num_batches") or "num_batches" in getattr(self._dataset, "__dict__", {}):
            batches = self._dataset.num_batches
            return None if batches is None else int(batches)
        return len(self._dataset)

    def start(self, number: int) -> Iterator[Draw]:
        """Announce the pass to the dataset; yield draws in order, or in the pass's permutation."""
        _call(self._dataset, "on_pass_begin", number)
        batches = self.num_batches
        order: Iterable[int]
        if batches is None:
            order = itertools.count()
        elif self._shuffle:
            order = stream(self._seed, Purpose.SHUFFLE, number).permutation(batches).tolist()
        else:
            order = range(batches)
        return (partial(self._get, index) for index in order)

    def parts(self, batch: Any) -> tuple[Any, ...]:
        """Return a tuple of one to three parts; an array alone becomes (x,)."""
        if hasattr(batch, "__array__"):
            batch = (batch,)
        if not isinstance(batch, tuple | list) or len(batch) not in (1, 2, 3):
            raise ConfigError(
                "PyDataset.__getitem__() must return a tuple or a dict. If a tuple, it must be ordered "
                f"{_TUPLES} {short(batch)} of type {type(batch)}"
            )
        if self.class_weight is not None and len(batch) == 3:
            raise ConfigError("You cannot specify `class_weight` and `sample_weight` at the same time.")
        return tuple(batch)

    def on_epoch_begin(self) -> None:
        """Call the dataset's hook."""
        _call(self._dataset, "on_epoch_begin")

    def on_epoch_end(self) -> None:
        """Call the dataset's hook."""
        _call(self._dataset, "on_epoch_end")


def _checked_parts(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    if not 1 <= len(batch) <= 3:
        raise ConfigError(
            "Data is expected to be in format `x`, `(x,)`, `(x, y)`, or `(x, y, sample_weight)`, found: "
            f"{len(batch)} parts"
        )
    return batch


def copied(batch: Any) -> Any:
    """Copy a nested batch: the generator may reuse its memory for the next one."""
    return tree.map_leaves(lambda path, leaf: _copied_leaf(leaf), batch)


def _copied_leaf(leaf: Any) -> Any:
    if hasattr(leaf, "detach") and hasattr(leaf, "clone"):  # a PyTorch tensor
        return leaf.detach().clone()
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf).copy()
    if hasattr(leaf, "__dlpack__"):
        with suppress(Exception):  # another library's errors: reading the batch reports them
            return np.from_dlpack(leaf).copy()
    return leaf


def _part(dataset: Any, rank: int, world: int, index: int) -> Any:
    return dataset.shard(index, rank, world)


def _call(dataset: Any, hook: str, *arguments: Any) -> None:
    if callable(method := getattr(dataset, hook, None)):
        method(*arguments)
