"""The table of programs on the CUDA backend, alone, on ranks and in packs; see `tests/programs/table.py`."""

import dataclasses

import pytest

from tests.programs.check import wrong_on_cuda
from tests.programs.table import TABLE

ALONE = [pytest.param(name, marks=pytest.mark.long if case.is_long else ()) for name, case in TABLE.items()]


@pytest.mark.parametrize("name", ALONE)
def test_alone(cuda_backend, name):
    alone = dataclasses.replace(TABLE[name], shards=(), pack=False)
    assert not wrong_on_cuda(alone, cuda_backend)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, case in TABLE.items() if case.shards or case.pack])
def test_on_ranks_and_in_packs(cuda_backend, another, name):
    assert not wrong_on_cuda(TABLE[name], cuda_backend, another)
