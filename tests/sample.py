"""Which cases of a search every run of the tests takes: a sample. `pytest --long` and chosen files take all.

Searches that generate code, plant bugs, compile for hardware or repeat a case for each network, width or number of
ranks find most of what they ever will in a few cases. The others are for whoever changes what they search, and for a
release.
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

# Set by `tests/conftest.py` for all processes of a run that takes samples.
SAMPLED = "DPTRAIN_TEST_SAMPLE"
# How many cases are many, and each how manieth of them every run takes, by folder: more where code is generated.
MANY = 4
OF_MANY = {"unit": 3, "unit/backend": 2, "unit/program": 2}


def sample(cases: Iterable[Any], every: int, first: int = 0, single: bool = False) -> list[Any]:
    """Return cases for `parametrize`, all of which are long but each `every`-th, from number `first` on.

    A tuple is the values of several arguments, unless they are of a single one.
    """
    return [
        case if number % every == first % every else pytest.param(*_values(case, single), marks=pytest.mark.long)
        for number, case in enumerate(cases)
    ]


def taken(cases: Iterable[T], every: int, first: int = 0) -> list[T]:
    """Return the cases that this run takes, all or as `sample` does, for what makes them before the tests."""
    sampled = bool(os.environ.get(SAMPLED))
    return [case for number, case in enumerate(cases) if not sampled or number % every == first % every]


def mark_long(items: Iterable[pytest.Item], folder: Path) -> None:
    """Mark as long what a run of samples leaves out of tests' cases: all but each so many-th.

    `@pytest.mark.sample(every, first)` says how many, or `OF_MANY` of tests of a folder that have `MANY` cases, unless
    some are long anyway. Tests begin at different ones, so that those of a table's rows take different rows; each
    keeps one.
    """
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for name, every_case in tests.items():
        cases = [item for item in every_case if item.get_closest_marker("long") is None]
        mark = every_case[0].get_closest_marker("sample")
        if mark is not None:
            every = mark.args[0]
        else:
            is_whole = len(every_case) == len(cases) >= MANY
            every = _every(every_case[0].path.relative_to(folder)) if is_whole else 1
        first = mark.args[1] if mark is not None and len(mark.args) > 1 else zlib.crc32(name.encode())
        for number, item in enumerate(cases):
            if number % every != first % min(every, len(cases)):
                item.add_marker(pytest.mark.long)


def _every(path: Path) -> int:
    parents = (parent.as_posix() for parent in path.parents)
    return next((OF_MANY[parent] for parent in parents if parent in OF_MANY), 1)


def _values(case: Any, single: bool) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) and not single else (case,)


def examples(number: int) -> int:
    """Return how many examples of so many a property test takes: a quarter in a run of samples."""
    return max(number // 4, 1) if os.environ.get(SAMPLED) else number
