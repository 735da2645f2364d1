"""Trains by programs that are placed on a mesh, each rank with the CUDA backend and its own parts of weights, and
compares with one device. Arguments: how messages travel; the rows of each part of the batch, joined by "+"; forms of
`test_local.FORMS`, with "/bfloat16" behind one whose gradients travel in that type, and "/late" behind one whose step
reads no weight once its new value is known: their gathers travel beside the next step; "/again" behind one whose step
computes with the new weights."""

import math
import sys
from dataclasses import replace

import numpy as np

from dptrain import comm, ops
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.backend.cuda.transfers.links import LateGather
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


class Again(Perceptron):
    """One that computes with the new weights at once."""

    def step(self, x, y, weights):
        logs = super().step(x, y, weights)
        w1, b1, w2, b2 = (weight.value for weight in self.weights.values())
        return {**logs, "late": ops.mean(ops.square(ops.relu(x @ w1 + b1) @ w2 + b2))}


def near(value, expected, scale=1.0):
    """Assert what a training in float32 allows, or one whose gradients are rounded, and squared in Adam's slots."""
    if comm_dtype:
        np.testing.assert_allclose(value, expected, rtol=0.03, atol=0.003 * np.abs(expected).max(initial=0))
    else:
        assert_near(value, expected, "float32", scale)


def check_schedule(executable):
    """Check that a further step begins with gathers, and that no op waits for a later layer's weights."""
    late = [message for message in executable._messages if isinstance(message, LateGather)]
    assert len(late) == 4, "a gather for each weight and bias"
    calls = [launch.args[0] for launch in executable._further]
    names = [call.__name__ for call in calls[:4]]
    assert names == ["gather"] * 4, names
    arrivals = {call.__self__: number for number, call in enumerate(calls) if getattr(call, "__name__", "") == "arrive"}
    order = [arrivals[call.__self__] for call in calls[:4]]
    if rows:  # else its updates alone read weights
        assert order == sorted(order), "in the order of their first readers"
        # A kernel, the first layer's, precedes the second layer's weights.
        between = executable._further[order[0] : order[-1]]
        assert any(id(launch) in executable._kernel_names for launch in between)
    firsts, ends = executable._stages[0][0].launches, executable._end
    assert [launch.args[0].__name__ for launch in ends] == ["gather"] * 4 + ["arrive"] * 4
    assert len(firsts) == len(calls) - 8


shards = [int(count) for count in sys.argv[2].split("+")]
world, backend = comm.current(), CudaBackend()
backend.transport = transport = sys.argv[1]


def trained_alone(alone):
    """Return the last outputs, and the state, of one device."""
    outputs, state = {}, {variable: variable.numpy() for variable in alone.program.state}
    for _ in range(STEPS):
        outputs, updates = evaluate(alone.program, alone.data, state)
        state |= updates
    return outputs, state


for name in sys.argv[3:]:
    form, _, option = name.partition("/")
    comm_dtype = "bfloat16" if option == "bfloat16" else ""
    weights, slots, lengths = FORMS[form]
    if math.prod(lengths.values()) != world.size:  # along its one axis as many as there are
        lengths = {axis: n if n == 1 else world.size for axis, n in lengths.items()}
    ranks = MeshCommunicator(world, lengths)
    kind = {"late": Perceptron, "again": Again}.get(option, Step)
    alone, step = kind(), kind(dtype="float32")
    outputs, state = trained_alone(alone)
    layouts = step.layouts(weights, slots)
    at = MeshPosition(ranks.lengths, ranks.coordinates)
    program, parts = of_rank(step, layouts, at, comm_dtype or None)
    if option == "late":
        program = replace(program, bucket_bytes=1)  # a message for each weight
    own_shards = shards if ranks.replicas > 1 else [sum(shards)]
    first, rows = sum(own_shards[: ranks.replica]), own_shards[ranks.replica]
    local_data = {name: array[first : first + rows] for name, array in step.data.items()}
    executable = backend.executable(program, local_data, rows=rows, first_row=first, comm=ranks)
    executable.run([0] * STEPS)
    if option == "late":
        check_schedule(executable)
    for output in {"loss", "late"} & outputs.keys():
        near(executable.outputs[output], outputs[output])
    near(executable.outputs["logits"], outputs["logits"][first : first + rows], 10)
    for mine, expected in zip(step.program.state, alone.program.state, strict=True):
        key = at.key(mine.shape, layouts[mine]) if mine in parts else ()
        near(parts.get(mine, mine).numpy(), state[expected][key], 10)
