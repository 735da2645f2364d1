"""Which memory a product reads, for every order of views in front of it."""

import itertools

import numpy as np
import pytest

from dptrain.backend.cuda.groups import operand_of
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import Program, trace
from tests.ops.test_products_of_views import VIEWS, viewed


@pytest.mark.parametrize("shape", [(4, 6, 8), (12, 8), (Dim.rows(4), 6, 8), (4, 4, 4)], ids=str)
def test_memory_that_is_read_holds_the_factor(shape):
    for chain in (one for length in range(4) for one in itertools.product(VIEWS, repeat=length)):
        program = trace(lambda x, chain=chain: {"factor": viewed(x * 1, chain)}, {"x": (shape, "float32")})
        factor = program.outputs["factor"]
        base, transposed = operand_of(factor)
        both = Program(program.inputs, {}, {"factor": factor, "base": base}, {}, rows=program.rows)
        found, _ = evaluate(both, {"x": np.arange(np.prod(shape), dtype=np.float32).reshape(shape)})
        *batch, rows, columns = factor.shape
        read = found["base"].reshape((*batch, columns, rows) if transposed else factor.shape)
        np.testing.assert_array_equal(
            np.swapaxes(read, -1, -2) if transposed else read, found["factor"], err_msg=str(chain)
        )


def test_transposes_are_looked_through():
    program = trace(lambda x: {"y": VIEWS["transpose"](x * 1)}, {"x": ((4, 6, 8), "float32")})
    base, transposed = operand_of(program.outputs["y"])
    assert transposed
    assert base is program.outputs["y"].inputs[0]
