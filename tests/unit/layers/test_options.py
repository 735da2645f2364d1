"""Options of layers that are drawn together, beside plain NumPy; see `tests/options`."""

import itertools

import numpy as np
import pytest

from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.execute import HostMemory
from tests.options.check import eagerly, program_of, wrong, wrong_of_program
from tests.options.kinds import KINDS
from tests.programs.check import not_optimized
from tests.sample import examples, sample

# Draws of each kind of layers, enough for all combinations; those that are compiled, and in one program.
DRAWS, COMPILED, TOGETHER = 96, 72, 6
# Of values, and of derivatives, in float64.
TOLERANCE = 1e-10


@pytest.mark.parametrize("name", KINDS)
def test_all_combinations_of_options_are_drawn(name):
    kind, rng = KINDS[name], np.random.default_rng(1)
    possible = set().union(*(kind.combinations(kind.random(rng)) for _ in range(examples(4000))))
    assert possible <= set().union(*map(kind.combinations, kind.together(DRAWS)))


@pytest.mark.parametrize("name", KINDS)
def test_each_call_by_itself(name):
    for call in KINDS[name].calls(0, examples(DRAWS), 3, "float64"):
        assert not wrong(call, eagerly(call), TOLERANCE)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("part", "name"), sample(itertools.product(range(COMPILED // TOGETHER), KINDS), 13))
def test_compiled(part, name):
    rows = (3, 1, 33)[part % 3]
    calls = KINDS[name].calls(part * TOGETHER, TOGETHER, rows, "float64")
    program, values = program_of(calls, rows)

    def run():
        executable = CompiledExecutable(program, HostMemory(), values)
        executable.run()
        return executable.outputs

    assert not wrong_of_program(calls, not_optimized(run), TOLERANCE)
