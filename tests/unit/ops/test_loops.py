"""Control flow: what is known is decided, loops are unrolled."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.tensor import Variable

X = np.arange(6.0).reshape(3, 2)


def test_branches():
    assert ops.cond(True, lambda: 1, lambda: 2) == 1
    assert ops.cond(ops.sum(X) > 99, lambda: 1, lambda: 2) == 2
    branches = [lambda x: x, lambda x: -x]
    assert [float(ops.switch(n, branches, 3.0)) for n in (-1, 0, 1, 5)] == [3, 3, -3, -3]


def test_loops():
    assert ops.fori_loop(1, 4, lambda i, total: total + i, 10) == 16
    assert ops.while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, 2 * x), (0, 1)) == (3, 8)
    assert ops.while_loop(lambda n: n < 3, lambda n: n + 1, 0, maximum_iterations=2) == 2


def test_parts_one_by_one():
    np.testing.assert_array_equal(ops.map(lambda row: ops.sum(row), X), [1, 5, 9])
    both = ops.vectorized_map(lambda one: {"sum": one[0] + one[1], "first": one[0]}, (X, 2 * X))
    np.testing.assert_array_equal(both["sum"], 3 * X)
    np.testing.assert_array_equal(both["first"], X)


def test_scan_carries_and_stacks():
    for reverse in (False, True):
        last, sums = ops.scan(lambda carry, x: (carry + x, carry + x), np.zeros(2), X, reverse=reverse)
        expected = np.cumsum(X[::-1], 0)[::-1] if reverse else np.cumsum(X, 0)
        np.testing.assert_array_equal(sums, expected)
        np.testing.assert_array_equal(last, X.sum(0))
    last, none = ops.scan(lambda carry, x: (carry + 1, None), 0, length=4)
    assert (last, none) == (4, None)


def test_a_traced_loop_has_a_gradient():
    w = Variable(np.array(2.0))
    ops.fori_loop(0, 3, lambda i, x: x * w, ops.convert_to_tensor(1.0)).backward()
    assert float(w.grad) == 12
    program = trace(lambda x: {"y": ops.map(lambda row: row * row, x)}, {"x": ((3, 2), np.float64)})
    np.testing.assert_array_equal(evaluate(program, {"x": X})[0]["y"], X * X)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ops.map(lambda one: one[0], (X, X[:2])), r"tensors of \[2, 3\]: expected one length"),
        (lambda: ops.map(lambda one: one, X[:0]), "no parts to stack"),
        (lambda: ops.scan(lambda carry, x: (carry, x), 0, X, length=2), "length=2 for 3 parts"),
        (
            lambda: trace(lambda x: {"y": ops.cond(ops.sum(x) > 0, lambda: x, lambda: -x)}, {"x": ((3,), np.float64)}),
            "is asked for while a step is traced",
        ),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
