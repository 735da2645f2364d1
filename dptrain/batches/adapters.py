"""Where batches come from that the user's own code makes: generators, data sets by number, loaders.

What happens in which order is Keras': keras/src/trainers/data_adapters/ (3.15).
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

# What a draw gives where there is no further batch.
END: Final = object()
Draw = Callable[[], Any]

_TUPLES = "either (input,) or (inputs, targets) or (inputs, targets, sample_weights). Received:"
# Batches that one thread is ahead.
_AHEAD = 2


class BatchSource(ABC):
    """Global batches, the same ones on all ranks.

    Attributes:
        kind: in words, for messages.
        workers: threads that may draw at once.
        ahead: batches that may be drawn before they are needed.
        sharded: every rank draws its own part of each batch instead of the whole.
        by_number: whether a batch can be drawn without those before it.
        class_weight: weights of samples by their label.
    """

    kind: str
    workers: int = 1
    ahead: int = _AHEAD
    sharded: bool = False
    by_number: bool = False
    class_weight: Mapping[int, float] | None = None

    @property
    @abstractmethod
    def num_batches(self) -> int | None:
        """Batches of a pass, None where only its end will tell."""

    @abstractmethod
    def start(self, number: int) -> Iterator[Draw]:
        """Begin pass `number`, counted from 0; each draw gives a batch as the user's code makes it, or `END`."""

    def draw_whole(self) -> None:  # noqa: B027  # only sources of parts need it
        """Let every rank draw whole batches from now on."""

    @abstractmethod
    def parts(self, batch: Any) -> tuple[Any, ...]:
        """Return (x,), (x, y) or (x, y, sample_weight) of a batch.

        Raises:
            DataError: it is none of these.
        """

    @abstractmethod
    def on_epoch_begin(self) -> None:
        """Tell the user's object that an epoch begins."""

    @abstractmethod
    def on_epoch_end(self) -> None:
        """Tell it that an epoch has ended."""

    def look(self) -> tuple[Any, ...]:
        """Return the parts of the first batch, as Keras where it must know shapes; call `on_epoch_end` afterwards.

        Raises:
            DataError: there is no batch.
        """
        self.on_epoch_begin()
        batch = next(self.start(0))()
        if batch is END:
            raise DataError(f"the {self.kind} has no batch")
        return self.parts(batch)


class GeneratorSource(BatchSource):
    """A generator or another iterator, which cannot be started again.

    Keras draws two batches to look at, and hands them out again wherever it starts a pass: a second epoch of a
    generator that has ended trains on these two.

    Args:
        iterator: gives tuples.

    Raises:
        ConfigError: the first is none, or there is none.
    """

    kind = "generator"

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._first = [_copied(batch) for batch in itertools.islice(iterator, 2)]
        if not self._first:
            raise ConfigError(
                "When passing a Python generator to a Keras model, the generator must yield at least one batch. "
                "Received an empty generator."
            )
        self.parts(self._first[0])

    @property
    def num_batches(self) -> int | None:
        """Only the end will tell."""
        return None

    def start(self, number: int) -> Iterator[Draw]:
        """Go on, after the batches that were looked at."""
        return itertools.repeat(partial(next, itertools.chain(self._first, self._iterator), END))

    def parts(self, batch: Any) -> tuple[Any, ...]:
        """Return a tuple of one to three."""
        if not isinstance(batch, tuple):
            raise ConfigError(
                "When passing a Python generator to a Keras model, the generator must return a tuple, "
                f"{_TUPLES} {short(batch)}"
            )
        return _one_to_three(batch)

    def on_epoch_begin(self) -> None:
        """Nobody to tell."""

    def on_epoch_end(self) -> None:
        """Nobody to tell."""


class LoaderSource(BatchSource):
    """What can be iterated over again and again, such as a torch DataLoader.

    Args:
        loader: gives batches.
        kind: in words.
    """

    def __init__(self, loader: Iterable[Any], kind: str) -> None:
        self._loader, self.kind = loader, kind

    @property
    def num_batches(self) -> int | None:
        """The loader's length, where it has one."""
        try:
            return len(self._loader)  # type: ignore[arg-type]  # a TypeError where it has none
        except TypeError:
            return None

    def start(self, number: int) -> Iterator[Draw]:
        """Iterate afresh."""
        return itertools.repeat(partial(next, iter(self._loader), END))

    def parts(self, batch: Any) -> tuple[Any, ...]:
        """Return a tuple or list of one to three, or x alone."""
        return _one_to_three(tuple(batch) if isinstance(batch, list | tuple) else (batch,))

    def on_epoch_begin(self) -> None:
        """Nobody to tell."""

    def on_epoch_end(self) -> None:
        """Nobody to tell."""


class PyDatasetSource(BatchSource):
    """An object with batches by number, see `dptrain.utils.PyDataset`.

    Args:
        dataset: the object.
        class_weight: weights of samples by their label.
        shuffle: draw the batches of each pass in another order.
        seed: of these orders, the same on all ranks.
        rank: this rank.
        world: number of ranks.

    Raises:
        ConfigError: it has no batch, or wants processes.
    """

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
        self._dataset, self.class_weight, self._shuffle, self._seed = dataset, class_weight, shuffle, seed
        if getattr(dataset, "use_multiprocessing", False):
            raise ConfigError(
                "not supported: use_multiprocessing=True, as processes that are forked under MPI may hang; use "
                "workers=N for threads"
            )
        self.workers = max(1, int(getattr(dataset, "workers", 1)))
        self.ahead = max(1, int(getattr(dataset, "max_queue_size", 10))) if self.workers > 1 else _AHEAD
        self._get = dataset.__getitem__
        if world > 1 and callable(getattr(dataset, "shard", None)):
            self.sharded, self._get = True, partial(_part, dataset, rank, world)
        if self.num_batches == 0:
            raise ConfigError("The PyDataset has length 0")

    def draw_whole(self) -> None:
        """Make whole batches on every rank, whose parts are then the same whatever the number of ranks."""
        self.sharded, self._get = False, self._dataset.__getitem__

    @property
    def num_batches(self) -> int | None:
        """As the object says."""
        if hasattr(type(self._dataset), "num_batches") or "num_batches" in getattr(self._dataset, "__dict__", {}):
            batches = self._dataset.num_batches
            return None if batches is None else int(batches)
        return len(self._dataset)

    def start(self, number: int) -> Iterator[Draw]:
        """Tell the object which pass begins; take the batches in order, or in that of the pass."""
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
        """Return a tuple or list of one to three, or an array alone."""
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
        """Call the object's own."""
        _call(self._dataset, "on_epoch_begin")

    def on_epoch_end(self) -> None:
        """Call the object's own."""
        _call(self._dataset, "on_epoch_end")


def _one_to_three(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    if not 1 <= len(batch) <= 3:
        raise ConfigError(
            "Data is expected to be in format `x`, `(x,)`, `(x, y)`, or `(x, y, sample_weight)`, found: "
            f"{len(batch)} parts"
        )
    return batch


def _copied(batch: Any) -> Any:
    """Copy what is in a batch that is kept, however nested: its maker may fill the same memory for the next one."""
    return tree.map_leaves(lambda path, leaf: _copied_leaf(leaf), batch)


def _copied_leaf(leaf: Any) -> Any:
    if hasattr(leaf, "detach") and hasattr(leaf, "clone"):  # a PyTorch tensor
        return leaf.detach().clone()
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf).copy()
    if hasattr(leaf, "__dlpack__"):
        with suppress(Exception):  # whatever another library raises: the message comes where the batch is read
            return np.from_dlpack(leaf).copy()
    return leaf


def _part(dataset: Any, rank: int, world: int, index: int) -> Any:
    return dataset.shard(index, rank, world)


def _call(dataset: Any, hook: str, *arguments: Any) -> None:
    if callable(method := getattr(dataset, hook, None)):
        method(*arguments)
