"""Requests that are joined, those that are not, and what waits for too long or in too long a queue."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.cli.server.batcher import Batcher, QueueFullError


@dataclass(eq=False)
class Doubling:
    """Stands for a served model: doubles rows, and refuses negative ones."""

    joins_rows: bool = True
    seen: list[int] = field(default_factory=list)
    may_go: threading.Event = field(default_factory=threading.Event)

    def predict(self, arrays):
        assert self.may_go.wait(60)
        (x,) = arrays
        self.seen.append(len(x))
        if (x < 0).any():
            raise ValueError("negative")
        return [2 * x]


def answers(served, requests, **options):
    """Return what each of some requests gets that arrive together while the predictor is busy with a first one."""
    options = {"max_rows": 8, "wait": 0, "queue": 100} | options

    async def ask():
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(executor, observe=lambda *_: None, **options)
            runs = asyncio.create_task(batcher.run())
            first = asyncio.create_task(batcher.predict(served, [np.zeros((1, 1))]))
            while len(batcher) or not first:  # until the first is with the predictor
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            tasks = [asyncio.create_task(batcher.predict(served, [x])) for x in requests]
            await asyncio.sleep(0.01)
            served.may_go.set()
            results = await asyncio.gather(first, *tasks, return_exceptions=True)
            runs.cancel()
            return results[1:]

    return asyncio.run(ask())


def rows(*lengths, width=1, value=1.0):
    return [np.full((length, width), value * index) for index, length in enumerate(lengths, 1)]


def test_what_waits_is_joined_up_to_a_number_of_rows():
    served, requests = Doubling(), rows(3, 4, 2, 1, 20)
    for x, (y,) in zip(requests, answers(served, requests), strict=True):
        np.testing.assert_array_equal(y, 2 * x)
    assert served.seen == [1, 8, 2, 20]  # 3 + 4 + 1, then what did not fit; 20 rows alone, as they came


def test_rows_that_depend_on_each_other_are_not_joined():
    served = Doubling(joins_rows=False)
    answers(served, rows(3, 4, 2))
    assert served.seen == [1, 3, 4, 2]


def test_samples_of_other_shapes_are_not_joined():
    served = Doubling()
    answers(served, [*rows(1, 2), *rows(3, width=2)])
    assert served.seen == [1, 3, 3]


def test_only_the_request_at_fault_gets_the_error():
    good, bad = rows(2), rows(1, value=-1.0)
    first, second, third = answers(Doubling(), [*good, *bad, *good])
    assert isinstance(second, ValueError)
    for (y,) in (first, third):
        np.testing.assert_array_equal(y, 2 * good[0])


def test_more_than_may_wait_are_told_so():
    results = answers(Doubling(), rows(1, 1, 1, 1), queue=2)
    assert [isinstance(result, QueueFullError) for result in results] == [False, False, True, True]


def test_a_request_waits_for_others_to_join_it():
    served = Doubling()
    served.may_go.set()

    async def ask():
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(executor, max_rows=3, wait=60, queue=9, observe=lambda *_: None)
            runs = asyncio.create_task(batcher.run())
            tasks = []
            for x in rows(1, 1, 1):
                tasks.append(asyncio.create_task(batcher.predict(served, [x])))
                await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
            runs.cancel()

    asyncio.run(ask())
    assert served.seen == [3]


def test_who_has_gone_is_not_predicted():
    served = Doubling()

    async def ask():
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(executor, max_rows=8, wait=0, queue=9, observe=lambda *_: None)
            runs = asyncio.create_task(batcher.run())
            tasks = [asyncio.create_task(batcher.predict(served, [x])) for x in rows(1, 2)]
            tasks[1].cancel()
            served.may_go.set()
            await tasks[0]
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            runs.cancel()

    asyncio.run(ask())
    assert sum(served.seen) == 1


@dataclass(eq=False)
class Reloaded:
    """Stands for a version of a model: multiplies rows by it; all versions have one name."""

    version: int
    joins_rows: bool
    name: str = "model"
    seen: list[int] = field(default_factory=list)

    def predict(self, arrays):
        self.seen.append(len(arrays[0]))
        return [self.version * array for array in arrays]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 2)), min_size=1, max_size=12),
    st.integers(1, 8),
    st.tuples(*[st.booleans()] * 3),
)
def test_each_request_has_the_answer_of_its_version_in_batches_of_limited_rows(requests, max_rows, joins):
    versions = {number: Reloaded(number, joins_rows) for number, joins_rows in enumerate(joins, 1)}
    asked = [(number, np.full((rows, width), float(index))) for index, (number, rows, width) in enumerate(requests)]

    async def ask():
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(executor, max_rows=max_rows, wait=0, queue=99, observe=lambda *_: None)
            tasks = [asyncio.create_task(batcher.predict(versions[number], [x])) for number, x in asked]
            runs = asyncio.create_task(batcher.run())
            results = await asyncio.gather(*tasks)
            runs.cancel()
            return results

    for (number, x), (y,) in zip(asked, asyncio.run(ask()), strict=True):
        np.testing.assert_array_equal(y, number * x)
    for number, served in versions.items():
        lengths = [len(x) for version, x in asked if version == number]
        assert sum(served.seen) == sum(lengths)
        assert all(rows <= max_rows or rows in lengths for rows in served.seen)
        assert served.joins_rows or sorted(served.seen) == sorted(lengths)
