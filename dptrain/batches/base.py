"""The batches of a rank: which samples make up each global batch, and how they reach the device."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from dptrain.backend.base import Backend, HostArray
from dptrain.batches.feed import BatchRows, Feed, FeedPool, PooledFeed, ResidentFeed, make_feed
from dptrain.batches.sampling import LocalSampler, Sampler, Shard
from dptrain.batches.structure import BatchSpec
from dptrain.runtime.failure import warn


class Batches(ABC):
    """The batches of one rank; a context manager that frees its device memory."""

    steps: int | None  # steps of an epoch, the same on all ranks; None where only the end of the data tells
    looks_ahead: bool = False  # whether `epoch` yields steps before the rows of earlier ones are read
    spec: BatchSpec  # structure, shapes and dtypes of the current batch
    alone: bool = False  # whether ranks may have different numbers of batches
    first: Sequence[Shard] = ()  # this rank's shards of the first step, where known
    replay_bytes: int = 0  # memory of all ranks that batches retained for a replay take, see `keep`
    numbered_by_batch: bool = False  # whether a sample is known only by its place in its batch

    @property
    def pads(self) -> bool:
        """Whether the memory of a step reaches beyond its rows, up to `padded_rows` of them."""
        return False

    def use_pool(self, feeds: FeedPool) -> None:  # noqa: B027  # only arrays need it
        """Copy small arrays to memory from a pool, so that similar calls share it."""

    @abstractmethod
    def open(self, backend: Backend, most_bytes: int | None, reserved: int = 0) -> Self:
        """Take device memory: at most `most_bytes` for samples (None: what is free), leaving `reserved` bytes."""

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Sequence[Shard]]:
        """Yield this rank's shards of each step of epoch `number` (from 0), as many steps as on every other rank."""

    @abstractmethod
    def resume(self, epochs: int, step: int) -> None:
        """Start after `epochs` whole epochs and `step` steps of the next, where a training was interrupted."""

    @abstractmethod
    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return the samples of as many of the next steps as lie in memory; see `Feed.rows`."""

    def keep(self) -> bool:
        """Retain the rows from now on, for `rows` to return again; return whether that is possible."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Free what `open` took."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ArrayBatches(Batches):
    """Batches of arrays that a rank holds; `restarts` begins a pass with every epoch, as evaluations do."""

    looks_ahead = True

    def __init__(
        self,
        arrays: Sequence[HostArray],
        spec: BatchSpec,
        sampler: Sampler,
        steps_per_epoch: int | None = None,
        *,
        restarts: bool = False,
    ) -> None:
        self._arrays, self.spec, self._sampler, self._steps_per_epoch = arrays, spec, sampler, steps_per_epoch
        self.alone = isinstance(sampler, LocalSampler)
        self.first = sampler.shards(0) if sampler.steps else ()
        self._largest = sampler.capacity * (len(sampler.shards(0)) if sampler.steps else 1)
        self._restarts = restarts
        self.steps = steps_per_epoch or sampler.steps
        self._feed: Feed | None = None
        self._pool: FeedPool | None = None
        self._plan: list[list[Shard]] = []
        # Step at which the next epoch continues, with steps_per_epoch.
        self._pass, self._next_step = 0, 0
        # Steps of the next epoch that were done before an interruption.
        self._skipped = 0

    def open(self, backend: Backend, most_bytes: int | None, reserved: int = 0) -> Self:
        """Copy the arrays to the device, or prepare to stream them."""
        self._feed = make_feed(backend, self._arrays, self._largest, most_bytes, reserved, self._pool)
        shapes = tuple((self._feed.stored_rows, *shape[1:]) for shape in self.spec.shapes)
        self.spec = replace(self.spec, shapes=shapes)
        return self

    def use_pool(self, feeds: FeedPool) -> None:
        """Use the pool; each step is then read on its own."""
        self._pool = feeds

    @property
    def pads(self) -> bool:
        """See `Batches.pads`."""
        return isinstance(self._feed, PooledFeed)

    def epoch(self, number: int) -> Iterator[Sequence[Shard]]:
        """Yield the steps of one pass, or `steps_per_epoch` of them, continuing in the pass as Keras does."""
        assert self._feed is not None
        if self._steps_per_epoch is None or self._restarts:
            self._pass, self._next_step = number, 0
        begin, stop = self._next_step, self._end()
        self._next_step += self._skipped
        self._skipped = 0
        if len(self._plan) != self._sampler.steps:  # the same in every pass
            self._plan = [self._sampler.shards(step) for step in range(self._sampler.steps)]
        plan = self._plan[self._next_step : stop]
        self._feed.start(self._sampler.order(self._pass), plan)
        for shards in plan:
            self._next_step += 1
            yield shards
        self._begin_next_pass()
        if self._steps_per_epoch is not None and stop - begin < self._steps_per_epoch:
            warn_ran_out()

    def resume(self, epochs: int, step: int) -> None:
        """Continue in the pass and at the step where the training was interrupted."""
        self._pass, self._next_step = 0, 0
        if self._steps_per_epoch is not None and not self._restarts:
            for _ in range(epochs):
                self._next_step = self._end()
                self._begin_next_pass()
        self._skipped = step

    def _end(self) -> int:
        """Return the step of the pass after which this epoch ends."""
        return min(self._next_step + (self._steps_per_epoch or self._sampler.steps), self._sampler.steps)

    def _begin_next_pass(self) -> None:
        if self._next_step == self._sampler.steps:
            self._pass, self._next_step = self._pass + 1, 0

    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return the rows that the feed has."""
        assert self._feed is not None
        return self._feed.rows(steps)

    def keep(self) -> bool:
        """Return whether all samples are on the device, where they stay."""
        return isinstance(self._feed, ResidentFeed)

    def close(self) -> None:
        """Close the feed."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None


def warn_ran_out() -> None:
    """Warn, as Keras does, of an epoch with fewer steps than asked for."""
    warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset or generator can generate at "
        "least `steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your "
        "dataset."
    )
