"""Trains by programs that are placed on a mesh, each rank with the CUDA backend and its own parts of weights, and
compares with one device. Arguments: how messages travel; the rows of each part of the batch, joined by "+"; forms of
`test_local.FORMS`, with "/bfloat16" behind one whose gradients travel in that type."""

import math
import sys

import numpy as np

from dptrain import comm, ops
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.comm.mesh import MeshCommunicator
from dptrain.program.execute import evaluate
from dptrain.program.sharding.local import MeshPosition
from tests.tolerances import assert_near
from tests.unit.program.sharding.test_local import FORMS, of_rank
from tests.unit.program.sharding.test_mesh import Perceptron

STEPS = 3


class Step(Perceptron):
    """One that reads and gathers old weights, also every other column, when the new ones are known."""

    def step(self, x, y, weights):
        old, logs = [weight.value for weight in self.weights.values()], super().step(x, y, weights)
        late = logs["loss"]
        for _ in range(3):
            late = ops.sum(old[0] * ops.tanh(late))
        late = ops.mean(ops.square((x @ old[0][:, 1::2]) * ops.tanh(late) + old[1][::2]))
        return {**logs, "late": late}


def near(value, expected, scale=1.0):
    """Assert what a training in float32 allows, or one whose gradients are rounded, and squared in Adam's slots."""
    if comm_dtype:
        np.testing.assert_allclose(value, expected, rtol=0.03, atol=0.003 * np.abs(expected).max(initial=0))
    else:
        assert_near(value, expected, "float32", scale)


shards = [int(count) for count in sys.argv[2].split("+")]
world, backend = comm.current(), CudaBackend()
backend.transport = sys.argv[1]
alone = Step()
state = {variable: variable.numpy() for variable in alone.program.state}
for _ in range(STEPS):
    outputs, updates = evaluate(alone.program, alone.data, state)
    state |= updates

for name in sys.argv[3:]:
    form, _, comm_dtype = name.partition("/")
    weights, slots, lengths = FORMS[form]
    if math.prod(lengths.values()) != world.size:  # along its one axis as many as there are
        lengths = {axis: n if n == 1 else world.size for axis, n in lengths.items()}
    ranks = MeshCommunicator(world, lengths)
    step = Step(dtype="float32")
    layouts = step.layouts(weights, slots)
    at = MeshPosition(ranks.lengths, ranks.coordinates)
    program, parts = of_rank(step, layouts, at, comm_dtype or None)
    own_shards = shards if ranks.replicas > 1 else [sum(shards)]
    first, rows = sum(own_shards[: ranks.replica]), own_shards[ranks.replica]
    local_data = {name: array[first : first + rows] for name, array in step.data.items()}
    executable = backend.executable(program, local_data, rows=rows, first_row=first, comm=ranks)
    executable.run([0] * STEPS)
    for output in ("loss", "late"):
        near(executable.outputs[output], outputs[output])
    near(executable.outputs["logits"], outputs["logits"][first : first + rows], 10)
    for mine, expected in zip(step.program.state, alone.program.state, strict=True):
        key = at.key(mine.shape, layouts[mine]) if mine in parts else ()
        near(parts.get(mine, mine).numpy(), state[expected][key], 10)
