"""A step with BatchNormalization and sample weights, placed on the ranks that there are; prints what is left of it."""

import numpy as np

from dptrain import comm as comms
from dptrain import ops
from dptrain.comm.parts import cut
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable

ROWS = 5
comm = comms.current()
rng = np.random.default_rng(0)
data = {"x": rng.normal(size=(ROWS, 4)), "y": rng.normal(size=(ROWS, 2)), "weights": rng.random(ROWS)}
variables = [
    Variable(rng.normal(size=(4, 6)), "w1"),
    Variable(np.ones(6), "gamma"),
    Variable(rng.normal(size=(6, 2)), "w2"),
]


def step(x, y, weights):
    w1, gamma, w2 = variables
    hidden = x @ w1
    centered = hidden - ops.mean(hidden, 0)
    hidden = ops.relu(centered / ops.sqrt(ops.mean(ops.square(centered), 0) + 1e-3) * gamma)
    losses = ops.sum(ops.square(hidden @ w2 - y), -1)
    loss = ops.sum(losses * weights) / ops.sum(weights)
    loss.backward()
    for variable in variables:
        variable.assign(variable - 0.05 * variable.value.grad)
    return {"loss": loss}


specs = {name: ((Dim.rows(ROWS), *array.shape[1:]), array.dtype) for name, array in data.items()}
program = place(trace(step, specs))
start, stop = cut(0, ROWS, comm.size)[comm.rank]
local_data = {name: array[start:stop] for name, array in data.items()}
for _ in range(20):
    outputs, updates = evaluate(program, local_data, rows=stop - start, first_row=start, comm=comm)
    for variable, value in updates.items():
        variable.assign(value)
numbers = [float(outputs["loss"]), *(float(np.abs(variable.numpy()).sum()) for variable in variables)]
if comm.rank == 0:
    print(*(f"{number:.12g}" for number in numbers))
comm.require_same("the ranks computed something else", {"results": [f"{number:.12g}" for number in numbers]})
