"""Three products by tensor maps on two ranks, the last beside a message: prints each one's blocks, and the messages."""

import numpy as np

from dptrain import comm, ops
from dptrain.backend.cuda import products, tma
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.ops.test_half_products_on_cuda import product

ROWS, WIDTH = 272, 264
products._WANTED_BLOCKS = 1
tma.SCHEDULE = tma.SCHEDULES["pingpong, clusters of 2"]
ranks, backend = comm.current(), CudaBackend()
backend.transport = "nccl"
rng = np.random.default_rng(0)
x = rng.integers(-2, 3, (ROWS, WIDTH)).astype(np.float32)
values = [rng.integers(-1, 2, (WIDTH, WIDTH)).astype(np.float32) for _ in range(3)]
weights = [Variable(value, f"w{number}") for number, value in enumerate(values)]


def step(x):
    sums, y = None, x
    for weight in weights:
        y = ops.relu(product(ops.cast(y, "bfloat16"), ops.cast(weight, "bfloat16"), "bfloat16") / 16)
        sums = ops.sum(y, 0) if sums is None else sums
    return {"sums": sums, "y": y}


program = place(trace(step, {"x": ((Dim.rows(ROWS), WIDTH), "float32")}))
rows = ROWS // 2
own = x[rows * ranks.rank :][:rows]
executable = backend.executable(program, {"x": own}, rows=rows, first_row=rows * ranks.rank, comm=ranks)
executable.run([0])


def halved(array):
    return array.astype("bfloat16").astype(np.float32)


expected = x
for number, value in enumerate(values):
    expected = np.maximum(halved(expected) @ value / 16, 0)
    if number == 0:
        np.testing.assert_allclose(executable.outputs["sums"], expected.sum(0), rtol=1e-6)
np.testing.assert_allclose(executable.outputs["y"], expected[rows * ranks.rank :][:rows], rtol=0.02, atol=0.5)

assert set(executable._resident.values()) == {20}, "blocks that this GPU holds"
shown = []
for launch in executable._stages[0][0].launches:
    name = executable._kernel_names.get(id(launch))
    if name in executable._resident:
        shown.append(f"product:{launch.args[1]}")
    elif name is None:
        shown.append(launch.args[0].__name__)
if ranks.rank == 0:
    print(*shown)
