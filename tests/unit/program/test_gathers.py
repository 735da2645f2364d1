"""Gathers of transposes are transposes of gathers."""

import itertools

import numpy as np

from dptrain import ops
from dptrain.program.execute import evaluate
from dptrain.program.gathers import gathered_in_order
from dptrain.program.local import Place, localized
from dptrain.program.mesh import ALL_GATHER, BATCH
from dptrain.program.passes import rewritten
from dptrain.program.placement import place
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.thread_ranks import on_mesh

SHAPE, LAYOUT = (3, 4, 5), (None, BATCH, None)


def views(x):
    found = {}
    for axes in itertools.permutations(range(3)):
        once = ops.transpose(x, axes)
        found |= {f"once {axes}": once, f"twice {axes}": ops.transpose(once, (1, 2, 0)), f"part {axes}": once[:, ::2]}
    return found


def test_every_order_of_axes():
    whole = Variable(np.arange(60.0).reshape(SHAPE), "x")
    expected = views(whole)
    copies = {name: Variable(np.zeros(one.shape), name) for name, one in expected.items()}

    def step():
        for name, one in views(whole).items():
            copies[name].assign(one)
        return {}

    program = trace(step, {})

    def on_rank(comm):
        at = Place(comm.lengths, comm.coordinates)
        part = Variable(whole.numpy()[at.key(SHAPE, LAYOUT)], "x")
        found = localized(place(program, layouts={whole: LAYOUT}), at, {whole: part})
        found = rewritten(found, gathered_in_order)
        taken = {one.inputs[0].op.name if one.inputs[0].op else "x" for one in found.tensors if one.op is ALL_GATHER}
        assert taken == {"x", expected["part (0, 1, 2)"].op.name}
        _, updates = evaluate(found, {}, comm=comm)
        for name, one in expected.items():
            np.testing.assert_array_equal(updates[copies[name]], one.numpy(), err_msg=name)

    on_mesh(on_rank, **{BATCH: 3})
