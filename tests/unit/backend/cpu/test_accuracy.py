"""How exact long sums are: far beyond the tolerances that other tests allow."""

import math

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory
from dptrain.program.program import trace

MANY = 2_000_000
# What is summed, of which shape, and the numbers that are added up.
SUMS = {
    "of rows": (lambda x: ops.sum(x), (MANY,), lambda x: x),
    "of rows of two columns": (lambda x: ops.sum(x, 0), (MANY, 2), lambda x: x[:, 0]),
    "of squares": (lambda x: ops.sum(x * x), (MANY,), lambda x: x * x),
    "of products": (lambda x: ops.matmul(ops.transpose(x), x), (MANY, 1), lambda x: x * x),
    "of a row": (lambda x: ops.sum(x, 1), (1, MANY), lambda x: x),
}


@pytest.mark.sample(7)
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_two_million(name):
    """One running sum in float32 is off by four times as much, one of blocks of rows by half of it."""
    compute, shape, terms = SUMS[name]
    x = (np.random.default_rng(0).random(shape) * 0.1 + 1).astype(np.float32)
    program = trace(lambda x: {"y": compute(x)}, {"x": ((Dim.rows(shape[0]), *shape[1:]), "float32")})
    executable = CompiledExecutable(program, HostMemory(), {"x": x})
    executable.run()
    expected = math.fsum(terms(x.astype(np.float64)).ravel())
    assert executable.outputs["y"].ravel()[0] == pytest.approx(expected, rel=1e-5)
