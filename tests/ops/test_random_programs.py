"""Random programs on the CUDA backend: alone, on ranks and in packs; see `tests/programs`."""

import os

import pytest

from tests.programs.check import wrong_on_cuda
from tests.programs.corpus import CORPUS
from tests.programs.draw import program, seeds_of
from tests.sample import sample

# Programs in each of four tests; more of them by DPTRAIN_PROGRAMS.
EACH = int(os.environ.get("DPTRAIN_PROGRAMS", "3"))


@pytest.mark.parametrize("part", sample(range(4), 4))
def test_random_programs(cuda_backend, another, part):
    for seed in range(part * EACH, (part + 1) * EACH):
        case = program(seed, "cuda")
        assert not (problem := wrong_on_cuda(case, cuda_backend, another)), f"{problem}\n{case}"


@pytest.mark.parametrize("part", sample(range(4), 4, 1))
def test_random_parts_of_tensors(cuda_backend, part):
    # Values that are loaded and never used may come from anywhere: `EMULATOR_SANITIZE` alone notices.
    for seed in seeds_of("parts", 4 * EACH)[part::4]:
        case = program(seed, "cuda")
        assert not (problem := wrong_on_cuda(case, cuda_backend)), f"{problem}\n{case}"


@pytest.mark.parametrize("name", sample(CORPUS, 4))
def test_corpus(cuda_backend, another, name):
    assert not wrong_on_cuda(CORPUS[name], cuda_backend, another)
