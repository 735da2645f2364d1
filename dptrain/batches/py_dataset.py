"""Base class of datasets that the user indexes by batch."""

import itertools
from collections.abc import Iterator
from typing import Any

from dptrain.runtime.failure import warn


class PyDataset:
    """Base of data sets that make their own batches, as `keras.utils.PyDataset` (and `Sequence` before it).

    A subclass has `__getitem__`, which returns a whole global batch: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`
    with x (rows, *input_shape), y and weights as in `Sequential.fit`; and `__len__` or the property `num_batches`, the
    number of batches, None for an endless set. Optional are:

    - `on_epoch_begin()` and `on_epoch_end()`, called on every rank where Keras calls them: `on_epoch_end` also once
    before
      a training or an evaluation, and around a first look at one batch if the model is new.
    - `on_pass_begin(number)` (not in Keras), called on every rank before the first batch of pass `number`, counted from
    0,
      also in a resumed training: with `steps_per_epoch`, an epoch may begin within a pass.
    - `shard(index, part, parts)` (not in Keras): returns the `part`-th of `parts` contiguous parts of batch `index`, in
    the
      form of `__getitem__`; the parts in order are the batch. If it exists and `parts` > 1 ranks train, each rank makes
      only its part. Otherwise every rank makes the same whole batch, and takes its part of it.
    - `keeps_order` (not in Keras): whether `fit` leaves the order of the batches alone although it shuffles.
    - `describe_order()` (not in Keras): returns what decides which samples a batch has, in JSON: ranks and resumed
      trainings must agree on it.

    Threads make batches while the device works on earlier ones, in the order of their numbers, or in an order
    f(seed, epoch) that is the same on all ranks if `fit` shuffles.

    Args:
        workers: threads that call `__getitem__`, concurrently if more than 1; 0 counts as 1.
        use_multiprocessing: not supported by `fit`, which says so: processes forked under MPI may hang.
        max_queue_size: the most batches that several threads are ahead; a single thread is ahead by two.
    """

    def __init__(self, workers: int = 1, use_multiprocessing: bool = False, max_queue_size: int = 10) -> None:
        self._workers = workers
        self._use_multiprocessing = use_multiprocessing
        self._max_queue_size = max_queue_size

    @property
    def workers(self) -> int:
        """Threads that make batches."""
        self._default_what_is_missing()
        return self._workers

    @workers.setter
    def workers(self, value: int) -> None:
        self._workers = value

    @property
    def use_multiprocessing(self) -> bool:
        """Whether processes should make batches, which `fit` refuses."""
        self._default_what_is_missing()
        return self._use_multiprocessing

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        self._use_multiprocessing = value

    @property
    def max_queue_size(self) -> int:
        """The most batches that several threads are ahead."""
        self._default_what_is_missing()
        return self._max_queue_size

    @max_queue_size.setter
    def max_queue_size(self, value: int) -> None:
        self._max_queue_size = value

    def __getitem__(self, index: int) -> Any:
        """Return batch `index`, counted from 0."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        batches = self.num_batches
        for index in itertools.count() if batches is None else range(batches):
            yield self[index]

    @property
    def num_batches(self) -> int | None:
        """Number of batches, None for an endless set; NotImplementedError without this property and `__len__`."""
        if hasattr(self, "__len__"):
            return len(self)
        raise NotImplementedError(
            "You need to implement the `num_batches` property:\n\n@property\ndef num_batches(self):\n  return ..."
        )

    def on_epoch_begin(self) -> None:
        """Called at the beginning of every epoch."""

    def on_epoch_end(self) -> None:
        """Called at the end of every epoch."""

    def _default_what_is_missing(self) -> None:
        defaults = {"_workers": 1, "_use_multiprocessing": False, "_max_queue_size": 10}
        missing = {name: value for name, value in defaults.items() if name not in vars(self)}
        if missing:
            vars(self).update(missing)
            warn(
                "Your `PyDataset` class should call `super().__init__(**kwargs)` in its constructor. `**kwargs` can "
                "include `workers`, `use_multiprocessing`, `max_queue_size`. Do not pass these arguments to `fit()`, "
                "as they will be ignored."
            )


class PassDataset(PyDataset):
    """Base of data sets that make any part of a batch, in an order of each pass."""

    def __init__(self, workers: int = 1, max_queue_size: int = 10) -> None:
        super().__init__(workers=workers, max_queue_size=max_queue_size)
        self._loops = itertools.count()

    def __getitem__(self, index: int) -> Any:
        """Return batch `index`."""
        return self.shard(index, 0, 1)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass; each iteration is another pass."""
        self.on_pass_begin(next(self._loops))
        return super().__iter__()

    def on_pass_begin(self, number: int) -> None:
        """Take the order of pass `number`."""
        raise NotImplementedError

    def shard(self, index: int, part: int, parts: int) -> Any:
        """Return a part of a batch."""
        raise NotImplementedError
