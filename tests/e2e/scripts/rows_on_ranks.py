"""Trains by losses of all pairs of rows on the CUDA backend, this rank's rows of them; prints the state on rank 0.
Arguments: how messages travel; the rows of each rank."""

import sys

import numpy as np

from dptrain import comm, ops
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable

transport, shards = sys.argv[1], [int(count) for count in sys.argv[2:]]
rng, rows = np.random.default_rng(0), sum(shards)
weights = Variable(rng.normal(size=(4, 6)).astype(np.float32), "weights")
x, y = rng.normal(size=(rows, 4)).astype(np.float32), rng.integers(0, 3, rows)


def step(x, y):
    z = x @ weights
    z = z / ops.sqrt(ops.sum(ops.square(z), -1, keepdims=True) + 1e-6)
    logits = z[:, :3] @ ops.transpose(z[:, 3:]) * 4
    contrast = ops.mean(ops.sparse_categorical_crossentropy(ops.arange(ops.shape(x)[0]), logits, from_logits=True))
    distances = ops.sum(ops.square(ops.expand_dims(z, 0) - ops.expand_dims(z, 1)), -1)
    same = ops.equal(ops.expand_dims(y, 0), ops.expand_dims(y, 1))
    farthest, nearest = ops.max(ops.where(same, distances, 0.0), 1), ops.min(ops.where(same, 9.0, distances), 1)
    attended, _ = ops.scan(lambda c, t: (ops.softmax(c @ ops.transpose(c)) @ c + t, None), z, ops.stack([z, -z]))
    loss = contrast + ops.mean(ops.relu(farthest - nearest + 1)) + ops.mean(attended[::-1] * ops.cumsum(z, 0))
    loss.backward()
    weights.assign(weights - 0.1 * weights.value.grad)
    return {"loss": loss}


ranks = comm.current()
inputs = {"x": ((Dim.rows(rows), 4), "float32"), "y": ((Dim.rows(rows),), "int64")}
program = place(trace(step, inputs), alone=ranks.size == 1)
first = sum(shards[: ranks.rank])
own = slice(first, first + shards[ranks.rank])
backend = CudaBackend()
backend.transport = transport
executable = backend.executable(
    program, {"x": x[own], "y": y[own]}, rows=shards[ranks.rank], first_row=first, comm=ranks
)
executable.run([0] * 3)
assert len(set(ranks.allgather_bytes(weights.numpy().tobytes()))) == 1
if ranks.rank == 0:
    print(*(f"{value:.5f}" for value in (float(executable.outputs["loss"]), *weights.numpy().reshape(-1))))
