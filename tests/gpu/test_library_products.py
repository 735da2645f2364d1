"""Programs whose products cuBLASLt computes: with the stand-in of tests/standins, on the emulated driver."""

import sys

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, inside_emulator

PATH = f"{ROOT}:{ROOT / 'tests' / 'standins'}"
pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")

SCRIPT = """
import numpy as np
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from tests.ops.test_products_of_views import step_of
from tests.ops.test_programs_on_cuda import check, check_state, mlp, shapes_program
backend, rng = CudaBackend(gemm="cublaslt"), np.random.default_rng(0)
for rows in (700, 0):
    program, values = shapes_program(rng, 700)
    values["x"] = values["x"][:rows]
    executable = backend.executable(program, values, rows=rows)
    executable.run()
    expected, _ = evaluate(program, values, rows=rows)
    for name in program.outputs:
        np.testing.assert_allclose(executable.outputs[name], expected[name], rtol=1e-3, atol=1e-3, err_msg=name)
program, data = mlp(rng)
order, state = rng.integers(0, 50, 24), {}
for start in (0, 6, 12, 18):
    found, new = evaluate(program, data | {"rows": order[start : start + 6]}, state)
    state |= new
executable = backend.executable(program, data | {"rows": order})
executable.run([0, 6, 12, 18])
check_state(state)
assert executable._table.graphs, "products are parts of graphs"
chains = [("transpose", "reshape"), ("reshape", "transpose"), ("transpose", "fold")]
shapes = {"x": (4, 6, 8), "y": (12, 8), "left": (8, 192), "right": (192, 8)}
values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
program = trace(step_of(chains), {name: (shape, "float32") for name, shape in shapes.items()})
executable = backend.executable(program, values)
executable.run()
expected, _ = evaluate(program, values)
for name in program.outputs:
    np.testing.assert_allclose(executable.outputs[name], expected[name], rtol=1e-3, atol=1e-2, err_msg=name)
for dtype in ("bfloat16", "float16"):
    program, data = mlp(rng, compute=dtype)
    data["rows"] = rng.integers(0, 50, 6)
    found, state = evaluate(program, data)
    executable = backend.executable(program, data)
    assert "product_" not in executable.source
    executable.run([0])
    check_state(state, 0.02)
print(backend.numerics)
"""


@pytest.mark.long
def test_products_of_a_library():
    finished = emulated(sys.executable, "-c", SCRIPT, PYTHONPATH=PATH)
    assert (finished.code, finished.err) == (0, "")
    assert "products by cublaslt" in finished.out


# Products whose last rows, or whose workspace, lie beyond what was allocated.
BEYOND = """
import numpy as np
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.backend.cuda.libraries.providers import Problem
from dptrain.errors import DeviceError
small = {small}
if small:
    workspace = CudaBackend.workspace
    CudaBackend.workspace = lambda backend, nbytes: workspace(backend, nbytes - 256)
backend = CudaBackend(gemm="cublaslt")
a, b, c = (backend.zeros((rows, 8)) for rows in (4, 8, 4 if small else 3))
try:
    problem = Problem("gemm", "float32", "float32", (0, 0, 1, 4, 8, 8))
    backend.libraries["gemm"].prepared(problem, a.pointer, b.pointer, c.pointer)()
except DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("small", "message"),
    [(True, "the workspace of 33554432 bytes at"), (False, "matrix c of 128 bytes at")],
    ids=["workspace", "result"],
)
def test_the_standin_notices_what_lies_beyond_an_allocation(small, message):
    finished = emulated(sys.executable, "-c", BEYOND.format(small=small), PYTHONPATH=PATH)
    assert (finished.code, finished.err) == (0, "")
    assert f"out of bounds: {message}" in finished.out
