"""What a rank works on, step by step: which samples make up each global batch, and how they come to the device."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from dptrain.backend.base import Backend, HostArray
from dptrain.batches.feed import BatchRows, Feed, KeptFeed, KeptFeeds, ResidentFeed, make_feed
from dptrain.batches.sampling import LocalSampler, Sampler, Shard
from dptrain.batches.structure import Batch
from dptrain.runtime.failure import warn


class Batches(ABC):
    """The steps of one rank; a context that gives back what it holds on the device.

    Attributes:
        steps: of an epoch, the same on all ranks; None where only the end of the data will tell.
        looks_ahead: whether steps can be asked of `epoch` before the rows of those before them.
        about: what the arrays of the batch at hand are.
        alone: ranks need not have the same number of batches.
        first: this rank's shards of the first step, if anybody knows.
        kept_bytes: what the samples take of all ranks' memory that are kept to be asked for again, see `keep`.
        numbered_by_batch: whether samples have no numbers but those in their batch.
    """

    steps: int | None
    looks_ahead: bool = False
    about: Batch
    alone: bool = False
    first: Sequence[Shard] = ()
    kept_bytes: int = 0
    numbered_by_batch: bool = False

    @property
    def pads(self) -> bool:
        """Whether there is memory behind a step's rows, up to `padded_rows` of them."""
        return False

    def keep_memory(self, feeds: KeptFeeds) -> None:  # noqa: B027  # only arrays need it
        """Let few samples be copied to memory that stays, where they come from arrays: see `KeptFeeds`."""

    @abstractmethod
    def open(self, backend: Backend, most_bytes: int | None, reserved: int = 0) -> Self:
        """Take memory on the device.

        Args:
            backend: the device.
            most_bytes: of its memory that samples may take; None for what is free.
            reserved: bytes of what is free that something else will need.
        """

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Sequence[Shard]]:
        """Yield this rank's shards of each step of an epoch, as many steps as on every other rank.

        Args:
            number: of the epoch, counted from 0.
        """

    @abstractmethod
    def resume(self, epochs: int, step: int) -> None:
        """Let the next epoch go on where an interrupted training was.

        Args:
            epochs: whole ones since the training began.
            step: of the epoch at hand that are done.
        """

    @abstractmethod
    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Return the samples of the next steps, of as many of those given as lie in memory; see `Feed.rows`."""

    def keep(self) -> bool:
        """Let `rows` be asked again for steps from now on, and no more for those before; return whether it can be."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give back what `open` took."""

    def __enter__(self) -> Self:
        """Return the batches."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close them."""
        self.close()


class ArrayBatches(Batches):
    """Batches of arrays that a rank holds.

    Args:
        arrays: features, targets and what else belongs to a sample, (rows, ...) each.
        about: what they are.
        sampler: which rows make up which step.
        steps_per_epoch: as Keras: epochs end after that many steps, the next one goes on where the last has ended, and
            a pass through the data that ends earlier ends the epoch as well, with a warning. None: a pass an epoch.
        restarts: every epoch begins a pass, as evaluations do.
    """

    looks_ahead = True

    def __init__(
        self,
        arrays: Sequence[HostArray],
        about: Batch,
        sampler: Sampler,
        steps_per_epoch: int | None = None,
        *,
        restarts: bool = False,
    ) -> None:
        self._arrays, self.about, self._sampler, self._steps_per_epoch = arrays, about, sampler, steps_per_epoch
        self.alone = isinstance(sampler, LocalSampler)
        self.first = sampler.shards(0) if sampler.steps else ()
        self._largest = sampler.capacity * (len(sampler.shards(0)) if sampler.steps else 1)
        self._restarts = restarts
        self.steps = steps_per_epoch or sampler.steps
        self._feed: Feed | None = None
        self._kept: KeptFeeds | None = None
        self._plan: list[list[Shard]] = []
        # Where the next epoch goes on, with steps_per_epoch.
        self._pass, self._done = 0, 0
        # Steps of the next epoch that were done before an interruption.
        self._skipped = 0

    def open(self, backend: Backend, most_bytes: int | None, reserved: int = 0) -> Self:
        """Put the arrays on the device, or prepare to stream them."""
        self._feed = make_feed(backend, self._arrays, self._largest, most_bytes, reserved, self._kept)
        shapes = tuple((self._feed.stored_rows, *shape[1:]) for shape in self.about.shapes)
        self.about = replace(self.about, shapes=shapes)
        return self

    def keep_memory(self, feeds: KeptFeeds) -> None:
        """See `Batches.keep_memory`; steps are then asked for singly."""
        self._kept = feeds

    @property
    def pads(self) -> bool:
        """See `Batches.pads`."""
        return isinstance(self._feed, KeptFeed)

    def epoch(self, number: int) -> Iterator[Sequence[Shard]]:
        """Yield the steps of one pass, or `steps_per_epoch` of them."""
        assert self._feed is not None
        if self._steps_per_epoch is None or self._restarts:
            self._pass, self._done = number, 0
        begin, stop = self._done, self._end()
        self._done += self._skipped
        self._skipped = 0
        if len(self._plan) != self._sampler.steps:  # the same in every pass
            self._plan = [self._sampler.shards(step) for step in range(self._sampler.steps)]
        plan = self._plan[self._done : stop]
        self._feed.start(self._sampler.order(self._pass), plan)
        for shards in plan:
            self._done += 1
            yield shards
        self._begin_next_pass()
        if self._steps_per_epoch is not None and stop - begin < self._steps_per_epoch:
            warn_of_the_end()

    def resume(self, epochs: int, step: int) -> None:
        """Go on in the pass and at the step where the interrupted training was."""
        self._pass, self._done = 0, 0
        if self._steps_per_epoch is not None and not self._restarts:
            for _ in range(epochs):
                self._done = self._end()
                self._begin_next_pass()
        self._skipped = step

    def _end(self) -> int:
        """Return the step of the pass at which the epoch ends that begins here."""
        return min(self._done + (self._steps_per_epoch or self._sampler.steps), self._sampler.steps)

    def _begin_next_pass(self) -> None:
        if self._done == self._sampler.steps:
            self._pass, self._done = self._pass + 1, 0

    def rows(self, steps: Sequence[Sequence[Shard]]) -> BatchRows:
        """Ask the feed."""
        assert self._feed is not None
        return self._feed.rows(steps)

    def keep(self) -> bool:
        """Samples that are all on the device stay there."""
        return isinstance(self._feed, ResidentFeed)

    def close(self) -> None:
        """Close the feed."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None


def warn_of_the_end() -> None:
    """Warn as Keras does where an epoch has fewer steps than it was to have."""
    warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset or generator can generate at "
        "least `steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your "
        "dataset."
    )
