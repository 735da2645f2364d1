"""The table of programs by NumPy and by C++, alone and on ranks; see `tests/programs/table.py`."""

import pytest

from dptrain.backend.cpu.codegen import NativeFunction, generate
from dptrain.backend.cpu.compile import compiler
from dptrain.program.codegen.fuse import fuse
from dptrain.program.steps import without_ranks
from tests.programs.check import wrong_on_cpu
from tests.programs.table import TABLE
from tests.sample import sample, taken

OFTEN = [name for name, case in TABLE.items() if not case.is_long]
LONG = [pytest.param(name, marks=pytest.mark.long) for name in TABLE if name not in OFTEN]
# Which are optimized, and compiled without fusion as well, where samples are taken.
THOROUGH = taken(OFTEN, 4)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", [*sample(OFTEN, 3), *LONG])
def test_cpu(name):
    case = TABLE[name]
    assert not wrong_on_cpu(case, case.is_long or name in THOROUGH, case.rows + 2, case.eager)


@pytest.mark.parametrize("name", [*OFTEN, *LONG])
def test_no_python_between_its_ops(name):
    """An op that has no code of its own would be called."""
    parts = generate(fuse(without_ranks(TABLE[name].trace()))).parts
    assert {type(part) for part in parts} <= {NativeFunction}
    assert len(parts) <= 1
