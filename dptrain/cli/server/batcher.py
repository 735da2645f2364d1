"""Joins requests to batches: rows that arrive within a given wait are predicted together, on one thread.

A row's answer is to the bit that of its request alone, or else (`ServedModel.joins_rows`) requests are not joined. If a
joined prediction fails, each of its requests is predicted alone, so that only the one at fault gets the error.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain.cli.server.served_model import ServedModel
from dptrain.errors import DptrainError

Array = npt.NDArray[Any]
T = TypeVar("T")


class QueueFullError(DptrainError):
    """As many requests wait as may."""


@dataclass(eq=False)
class _Waiting:
    """A request in the queue."""

    served: ServedModel
    arrays: Sequence[Array]
    answer: "asyncio.Future[list[Array]]"
    since: float  # by the monotonic clock

    @property
    def rows(self) -> int:
        return len(self.arrays[0])

    def joins(self, other: "_Waiting") -> bool:
        """Whether both may be in one batch: the same model, and samples of the same shapes."""
        return self.served is other.served and all(
            array.shape[1:] == another.shape[1:] for array, another in zip(self.arrays, other.arrays, strict=True)
        )


class Batcher:
    """A queue of requests, predicted in batches.

    Args:
        executor: of one thread, which makes all predictions (a GPU belongs to one thread).
        max_rows: of a joined batch.
        wait: seconds that a request waits for others to join it.
        queue: requests that may wait.
        observe: called with each batch's requests and rows.
    """

    def __init__(
        self, executor: Executor, *, max_rows: int, wait: float, queue: int, observe: Callable[[int, int], None]
    ) -> None:
        self._executor, self._max_rows, self._wait, self._queue = executor, max_rows, wait, queue
        self._observe = observe
        self._waiting: deque[_Waiting] = deque()
        self._in_parts = 0
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        """Number of requests that wait, or run in parts."""
        return len(self._waiting) + self._in_parts

    async def predict(self, served: ServedModel, arrays: Sequence[Array]) -> list[Array]:
        """Return a model's outputs for a request's inputs.

        Raises:
            QueueFullError: too many requests wait.
            DataError: the model refuses the inputs' values.
        """
        self._require_room()
        answer: asyncio.Future[list[Array]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(served, arrays, answer, time.monotonic()))
        self._arrival.set()
        return await answer

    def begin_parts(self) -> Callable[[], None]:
        """Count a request that computes its answer in parts, by `compute`; return what ends it, or QueueFullError."""
        self._require_room()
        self._in_parts += 1
        ended: list[bool] = []

        def end() -> None:
            if not ended:
                ended.append(True)
                self._in_parts -= 1

        return end

    async def compute(self, function: Callable[[], T]) -> T:
        """Run a function on the thread of predictions."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _require_room(self) -> None:
        if len(self) >= self._queue:
            raise QueueFullError(f"busy: {len(self)} requests wait; try again later")

    async def run(self) -> None:
        """Predict what arrives, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                self._arrival.clear()
                await self._arrival.wait()
            await self._gather()
            batch = self._take()
            if not batch:  # their clients are gone
                continue
            self._observe(len(batch), sum(request.rows for request in batch))
            results = await loop.run_in_executor(self._executor, _predict, batch)
            for request, result in zip(batch, results, strict=True):
                if request.answer.done():  # cancelled meanwhile
                    continue
                if isinstance(result, Exception):
                    request.answer.set_exception(result)
                else:
                    request.answer.set_result(result)

    async def _gather(self) -> None:
        """Wait until the first request has waited long enough, or a batch is full."""
        first = self._waiting[0]
        while first.served.joins_rows and self._joined_rows(first) < self._max_rows:
            left = first.since + self._wait - time.monotonic()
            if left <= 0:
                return
            self._arrival.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), left)

    def _joined_rows(self, first: _Waiting) -> int:
        return sum(request.rows for request in self._waiting if request.joins(first))

    def _take(self) -> list[_Waiting]:
        """Remove the next batch from the queue: the first request, and those after it that join and fit."""
        batch: list[_Waiting] = []
        rest: deque[_Waiting] = deque()
        rows = 0
        for request in self._waiting:
            if request.answer.done():
                continue
            fits = not batch or (
                batch[0].served.joins_rows and rows + request.rows <= self._max_rows and request.joins(batch[0])
            )
            if fits:
                batch.append(request)
                rows += request.rows
            else:
                rest.append(request)
        self._waiting = rest
        return batch


def _predict(batch: Sequence[_Waiting]) -> list[list[Array] | Exception]:
    """Return each request's outputs, or its error. On the thread of predictions."""
    first = batch[0]
    if len(batch) == 1:
        try:
            return [first.served.predict(first.arrays)]
        except Exception as error:  # a user's layer may raise anything
            return [error]
    try:
        joined = [np.concatenate(arrays) for arrays in zip(*(request.arrays for request in batch), strict=True)]
        outputs = first.served.predict(joined)
    except Exception:
        return [result for request in batch for result in _predict([request])]
    ends = np.cumsum([request.rows for request in batch])[:-1]
    return [list(parts) for parts in zip(*(np.split(output, ends) for output in outputs), strict=True)]
