"""Loops whose rows need no others, and what a nest may overwrite."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda.policy import POLICY
from dptrain.program.body import has_body
from dptrain.program.dims import Dim
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.schedule.fuse import fuse
from dptrain.program.schedule.loops import repeat_of
from dptrain.program.schedule.nest import may_overwrite
from dptrain.program.schedule.rows import RowLoop
from dptrain.program.steps import step_of
from dptrain.program.tensor import Variable

ROWS = Dim.rows(6)


def loops_of(step, **shapes):
    """Return the loops of a program, by the nests of their steps."""
    program = trace(step, {name: (shape, "float32") for name, shape in shapes.items()})
    loops = {tensor.node: tensor for tensor in program.tensors if has_body(tensor)}
    repeats = map(repeat_of, loops.values())
    return [RowLoop(repeat, fuse(step_of(repeat.body, program.rows), POLICY).nests) for repeat in repeats]


STEPS = {
    "elements": (lambda h, x, w: ops.tanh(h + x), True),
    "a product": (lambda h, x, w: ops.tanh(h @ w + x), True),
    "a reduction of each row": (lambda h, x, w: h - ops.max(h, 1, keepdims=True) + x, True),
    "half of a row": (lambda h, x, w: ops.concatenate([h[:, 2:], x[:, :2]], 1), True),
    "rows that move": (lambda h, x, w: ops.concatenate([h[1:], h[:1]], 0) + x, False),
    "the first row": (lambda h, x, w: h + h[:1] + x, False),
    "a sum of all rows": (lambda h, x, w: h + ops.sum(h, 0) + x, False),
    "a product of the transposed": (lambda h, x, w: h + x @ ops.transpose(ops.transpose(h) @ h), False),
    "a product by what changes": (lambda h, x, w: h @ (ops.transpose(h) @ h) + x, False),
}


@pytest.mark.parametrize("name", STEPS)
def test_which_rows_need_no_others(name):
    advance, apart = STEPS[name]

    def step(x, h, w):
        def body(h, x):
            h = advance(h, x, w)
            return h, h

        return {"h": ops.scan(body, h, ops.transpose(x, (1, 0, 2)))[0]}

    (loop,) = loops_of(step, x=(ROWS, 5, 4), h=(ROWS, 4), w=(4, 4))
    assert loop.are_apart == apart
    assert not loop.sums


def test_sums_over_rows_are_added_after_the_last_step():
    """The gradients of weights, to which each step adds."""

    def step(x, h, b):
        def body(h, x):
            h = ops.tanh(h * b + x)
            return h, h

        last = ops.scan(body, h, ops.transpose(x, (1, 0, 2)))[0]
        return {"db": gradients(ops.sum(last), [b])[0]}

    _, backward = loops_of(step, x=(ROWS, 5, 4), h=(ROWS, 4), b=(4,))
    assert [tensor.shape for tensor in backward.sums] == [(4,)]
    assert backward.are_apart


def updated(new_value, shape=(6, 4)):
    """Return whether the nest of a variable's new value may overwrite the old one."""
    variable = Variable(np.ones(shape, np.float32), "w")

    def step(x):
        variable.assign(new_value(variable.value, x))
        return {}

    program = trace(step, {"x": ((6, 4), "float32")})
    (new,) = program.updates.values()
    return may_overwrite(fuse(program, POLICY).nest_of[new], new, program.state[variable])


@pytest.mark.parametrize(
    ("new_value", "allowed"),
    [
        (lambda w, x: w - x, True),
        (lambda w, x: w - ops.max(w * x, 1, keepdims=True), True),
        (lambda w, x: w[::-1] - x, False),
        (lambda w, x: w - w[:1], False),
        (lambda w, x: ops.transpose(ops.reshape(w, (4, 6))) + x, False),
    ],
    ids=["its own element", "its own row", "another row", "the first row", "another element"],
)
def test_what_reads_no_other_element_may_overwrite(new_value, allowed):
    assert updated(new_value) == allowed


@pytest.mark.parametrize(
    ("shape", "new_value", "allowed"),
    [
        ((), lambda w, x: w + ops.sum(x * w), True),
        ((4,), lambda w, x: w + ops.sum(x * w, 0), True),
        ((4,), lambda w, x: w + ops.sum(x * ops.concatenate([w[1:], w[:1]], 0), 0), False),
        ((6,), lambda w, x: w + ops.sum(x * w[:, None], 1), True),
        ((6,), lambda w, x: w[::-1] + ops.max(x, 1), False),
        ((), lambda w, x: ops.sum(ops.max(x * w, 1)), False),
    ],
    ids=["a total", "its column", "another column", "its row", "another row", "a number that each row reads"],
)
def test_what_reductions_may_overwrite(shape, new_value, allowed):
    assert updated(new_value, shape) == allowed
