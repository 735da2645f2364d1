"""The table of programs on the CUDA backend, alone, on ranks and in packs; see `tests/programs/table.py`."""

import dataclasses

import pytest

from tests.programs.check import wrong_on_cuda
from tests.programs.table import TABLE
from tests.sample import sample

OFTEN = [name for name, case in TABLE.items() if not case.is_long]
LONG = [pytest.param(name, marks=pytest.mark.long) for name in TABLE if name not in OFTEN]


@pytest.mark.parametrize("name", [*sample(OFTEN, 5, first=1), *LONG])
def test_alone(cuda_backend, name):
    alone = dataclasses.replace(TABLE[name], shards=(), pack=False)
    assert not wrong_on_cuda(alone, cuda_backend)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in OFTEN if TABLE[name].pack or TABLE[name].shards])
def test_on_ranks_and_in_packs(cuda_backend, another, name):
    assert not wrong_on_cuda(TABLE[name], cuda_backend, another)
