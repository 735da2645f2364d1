"""Every function of elements at 0, at corners, ties and infinities: eager, as a program, and compiled."""

import pytest

from dptrain import activations
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.execute import HostMemory, evaluate
from tests.unit.ops import points

DTYPES = ["float32", "float64"]


def test_every_op_of_elements_is_tried():
    assert points.untried() == set()
    assert set(activations.BY_NAME) - set(points.UNARY) - set(points.OF_ROWS) == {"exponential", "linear"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_computes_what_eager_calls_do(dtype):
    outputs, _ = evaluate(points.program(dtype), points.operands(dtype))
    assert points.wrong(outputs, dtype, exact=True) == {}


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_computes_what_numpy_does(dtype):
    executable = CompiledExecutable(points.program(dtype), HostMemory(), points.operands(dtype))
    executable.run()
    assert points.wrong(executable.outputs, dtype) == {}
