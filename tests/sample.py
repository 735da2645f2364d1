"""Which cases of a search every run of the tests takes: a sample. `pytest --long` and chosen files take all.

Searches that generate code, plant bugs, compile for hardware or repeat a case for each network, width or number of
ranks find most of what they ever will in a few cases. The others are for whoever changes what they search, and for a
release.
"""

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

# Set by `tests/conftest.py` for all processes of a run that takes samples.
SAMPLED = "DPTRAIN_TEST_SAMPLE"


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


def _values(case: Any, single: bool) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) and not single else (case,)


def examples(number: int) -> int:
    """Return how many examples of so many a property test takes: a quarter in a run of samples."""
    return max(number // 4, 1) if os.environ.get(SAMPLED) else number
