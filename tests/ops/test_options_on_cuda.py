"""Options of layers that are drawn together, on the CUDA backend, beside plain NumPy; see `tests/options`."""

import itertools

import pytest

from tests.options.check import program_of, wrong_of_program
from tests.options.kinds import KINDS

# Draws of each kind of layers, and those in one program.
DRAWS, TOGETHER = 48, 4


@pytest.mark.long
@pytest.mark.parametrize(("part", "name"), [*itertools.product(range(DRAWS // TOGETHER), KINDS)])
def test_options(cuda_backend, part, name):
    dtype, rows = ("float32", "float32", "float64")[part % 3], (3, 1, 5, 33)[part % 4]
    calls = KINDS[name].calls(part * TOGETHER, TOGETHER, rows, dtype)
    program, values = program_of(calls, rows)
    executable = cuda_backend.executable(program, values, rows=rows)
    executable.run()
    outputs = {name: executable.outputs[name] for name in program.outputs}
    assert not wrong_of_program(calls, outputs, 1e-9 if dtype == "float64" else 1e-4)
