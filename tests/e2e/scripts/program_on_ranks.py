"""Runs a program of batch statistics, gradients and a maximum on the CUDA backend, this rank's rows of it; prints its
state on rank 0. Arguments: the type of a layer's product; bytes of a message at most, 0 for any number; the type in
which gradients travel, or none; how messages travel; the rows of each rank."""

import sys

import numpy as np

from dptrain import comm, ops
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable

compute, bucket_bytes, comm_dtype, transport = sys.argv[1], int(sys.argv[2]), *sys.argv[3:5]
shards = [int(count) for count in sys.argv[5:]]
rng = np.random.default_rng(0)
rows = sum(shards)
weights, slope = (
    Variable(rng.normal(size=shape).astype(np.float32), name) for shape, name in (((4, 3), "weights"), ((3,), "slope"))
)
greatest = Variable(np.zeros((), np.float32), "greatest", trainable=False)
x, t = rng.normal(size=(2, rows, 4)).astype(np.float32), rng.random((rows, 1)).astype(np.float32)
x = x[0]


def step(x, share):
    y = ops.cast(ops.cast(x, compute) @ ops.cast(weights, compute), "float32")
    centred = (y - ops.mean(y, 0)) / ops.sqrt(ops.var(y, 0) + 1e-3) * slope
    loss = ops.sum(share * ops.square(centred - 1.0)) / ops.sum(share)
    loss.backward()
    greatest.assign(ops.maximum(greatest, ops.max(ops.absolute(y))))
    for variable in (weights, slope):
        variable.assign(variable - 0.1 * variable.value.grad)
    return {"loss": loss}


inputs = {"x": ((Dim.rows(rows), 4), "float32"), "share": ((Dim.rows(rows), 1), "float32")}
program = place(
    trace(step, inputs), bucket_bytes=bucket_bytes or None, comm_dtype=None if comm_dtype == "none" else comm_dtype
)
ranks = comm.current()
first = sum(shards[: ranks.rank])
local_rows = slice(first, first + shards[ranks.rank])
backend = CudaBackend()
backend.transport = transport  # "cuda-aware" reaches the memory of the emulator, but does not know bfloat16
executable = backend.executable(
    program, {"x": x[local_rows], "share": t[local_rows]}, rows=shards[ranks.rank], first_row=first, comm=ranks
)
executable.run([0] * 4)
assert len(set(ranks.allgather_bytes(weights.numpy().tobytes() + slope.numpy().tobytes()))) == 1
if ranks.rank == 0:
    numbers = [float(executable.outputs["loss"]), float(greatest.numpy())]
    numbers += [
        float(np.sum(variable.numpy() * np.arange(variable.numpy().size).reshape(variable.shape)))
        for variable in (weights, slope)
    ]
    print(*(f"{value:.5f}" for value in numbers))
