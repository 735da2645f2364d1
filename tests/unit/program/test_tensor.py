"""Tensors, variables and the reverse pass, eagerly and while a step is traced."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops.sharing import broadcast_shape, common_dtype, elementwise
from dptrain.program.evaluate import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.shapes import Rows
from dptrain.program.tensor import Op, Variable, constant


def test_operators_are_ops():
    x = constant(np.array([1.0, 2.0]))
    np.testing.assert_array_equal((2 - x) * x / 2 + 1, [1.5, 1.0])
    np.testing.assert_array_equal(np.array([3.0, 4.0]) - x, [2, 2])
    np.testing.assert_array_equal(x**2, [1, 4])
    np.testing.assert_array_equal(np.eye(2) @ constant(np.eye(2)), np.eye(2))
    np.testing.assert_array_equal(x >= 2, [False, True])
    np.testing.assert_array_equal(x == [1, 3], [True, False])
    np.testing.assert_array_equal(x != constant(np.array([1, 3])), [False, True])
    np.testing.assert_array_equal((x > 1) & ~(x == 3) | (x < 0), [False, True])
    np.testing.assert_array_equal(abs(-x) % 2, [1, 0])
    np.testing.assert_array_equal(2**x, [2, 4])
    assert (x == None) is False  # noqa: E711
    assert x in {x: 1}


def test_numbers_take_the_type_that_they_meet():
    assert (constant(np.ones(2, np.float64)) * 0.1).dtype == np.float64
    assert (constant(np.ones(2, np.float32)) * 0.1).dtype == np.float32
    assert (constant(np.ones(2, np.float32)) + 1).dtype == np.float32
    assert constant(0.1).dtype == np.float32
    assert constant(np.float64(0.1)).dtype == np.float64
    with pytest.raises(ConfigError, match="expected real numbers"):
        constant(["a"])


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (0, (3, 4)),
        (-1, (3, 4)),
        (slice(1, None), (1, 3, 4)),
        ((slice(None), 1), (2, 4)),
        ((..., slice(0, 4, 3)), (2, 3, 2)),
        ((slice(None), slice(-2, None), 3), (2, 2)),
        (slice(5, 9), (0, 3, 4)),
    ],
)
def test_slices(key, expected):
    array = np.arange(24.0).reshape(2, 3, 4)
    found = constant(array)[key]
    assert found.shape == expected
    np.testing.assert_array_equal(found, array[key])


def test_what_is_no_slice():
    x = constant(np.zeros((2, 3)))
    for wrong, words in (
        (2, "out of range"),
        (slice(None, None, -1), "step -1"),
        ((0, 0, 0), "3 indices"),
        ([0], "take"),
    ):
        with pytest.raises(ConfigError, match=words):
            x[wrong]


def test_backward_adds_up_in_grad():
    w = Variable(np.array([1.0, 2.0]), "w")
    frozen = Variable(np.array([3.0, 4.0]), "frozen", trainable=False)
    ops.sum(w * w * frozen).backward()
    np.testing.assert_array_equal(w.grad, [6, 16])
    np.testing.assert_array_equal(w.value.grad, [6, 16])
    assert frozen.grad is None
    ops.sum(w).backward()
    np.testing.assert_array_equal(w.grad, [7, 17])


def test_a_variable_forgets_how_its_value_was_made():
    w = Variable(np.zeros(3), "w")
    for _ in range(3):
        w.assign(w + 1)
    assert w.value.inputs == ()
    np.testing.assert_array_equal(w.numpy(), [3, 3, 3])
    with pytest.raises(ConfigError, match=r"variable 'w' has shape \(3,\); assigned shape \(2,\)"):
        w.assign(np.zeros(2))


def test_a_variable_has_memory_of_its_own():
    array = np.zeros(3)
    w = Variable(array, "w")
    array[:] = 1
    np.testing.assert_array_equal(w.numpy(), [0, 0, 0])
    w.assign(array)
    array[:] = 2
    np.testing.assert_array_equal(w.numpy(), [1, 1, 1])


def test_gradients_of_gradients():
    x = constant(np.array(2.0))
    (first,) = gradients(x**3, [x])
    (second,) = gradients(first, [x])
    assert float(first) == 12
    assert float(second) == 12


def test_no_gradient():
    x, y = constant(np.array([1.0])), constant(np.array([1]))
    assert gradients(x * 2, [constant(np.array([5.0]))]) == [None]
    with pytest.raises(ConfigError, match="has no gradient"):
        gradients(y, [x])
    assert gradients(ops.cast(ops.argmax(x), "float64"), [x]) == [None]

    def rounded(x, *, out):
        np.round(x, out=out)

    with pytest.raises(ConfigError, match="op 'rounded' has no gradient"):
        gradients(Op(rounded, broadcast_shape, elementwise, common_dtype)(x), [x])


def test_deciding_by_a_value_while_a_step_is_traced():
    def step(x):
        return {"y": x if ops.sum(x) > 0 else -x}

    with pytest.raises(ConfigError, match=r"asked for while a step is traced.*run_eagerly=True"):
        trace(step, {"x": ((Rows(3),), np.float64)})


def test_a_trace_reads_and_writes_state():
    total, read = Variable(np.zeros(2), "total"), Variable(np.ones(1), "read")

    def step(x):
        total.assign(total + ops.sum(x, 0) + read)
        return {"twice": total * 2}

    program = trace(step, {"x": ((Rows(3), 2), np.float64)})
    assert list(program.state) == [total, read]
    assert list(program.updates) == [total]
    np.testing.assert_array_equal(total.numpy(), [0, 0])
    outputs, updates = evaluate(program, {"x": np.ones((3, 2))}, {total: np.ones(2)})
    np.testing.assert_array_equal(updates[total], [5, 5])
    np.testing.assert_array_equal(outputs["twice"], [10, 10])
    np.testing.assert_array_equal(evaluate(program, {"x": np.ones((3, 2))})[1][total], [4, 4])
    with pytest.raises(ConfigError, match="input 'x' is missing"):
        evaluate(program, {})
    with pytest.raises(ConfigError, match=r"input 'x' has shape \(4, 2\): expected \(3, 2\)"):
        evaluate(program, {"x": np.ones((4, 2))})


def test_a_variable_that_is_only_written_is_state():
    last = Variable(np.zeros(2), "last")

    def step(x):
        last.assign(ops.sum(x, 0))
        return {}

    program = trace(step, {"x": ((Rows(3), 2), np.float64)})
    assert (list(program.state), list(program.updates)) == ([last], [last])


def test_gradients_of_a_trace_are_its_own():
    w = Variable(np.array([1.0, 2.0]), "w")
    ops.sum(w * 3).backward()

    def step(x):
        assert w.grad is None
        ops.sum(w * x).backward()
        ops.sum(w * x).backward()
        found = w.grad
        w.grad = None
        assert w.grad is None
        return {"grad": found}

    program = trace(step, {"x": ((2,), np.float64)})
    np.testing.assert_array_equal(evaluate(program, {"x": [5, 6]})[0]["grad"], [10, 12])
    np.testing.assert_array_equal(w.grad, [3, 3])


def test_the_number_of_rows_is_a_constant_that_says_so():
    """So that what is generated from a program can count the rows of another batch."""

    def step(x):
        return {"mean": ops.sum(x) / (2 * x.shape[0]), "rows": ops.cast(x.shape[0], "float64"), "more": x.shape[0] + 1}

    program = trace(step, {"x": ((Rows(8), 2), "float64")})
    (counted,) = [one for one in program.outputs["mean"].inputs if one.op is None]
    assert (counted.counts_rows, counted.attributes["rows"], float(counted)) == (True, 2, 16)
    assert program.outputs["rows"].op.name == "cast_to"
    assert not program.readings.outputs["more"].counts_rows


def test_what_depends_on_no_placeholder_is_computed_once():
    def step(x):
        return {"y": x * ops.exp(constant(np.array(0.0))), "ones": ops.ones((x.shape[0], 1))}

    program = trace(step, {"x": ((Rows(3),), np.float64)})
    assert [one.op.name for one in program.tensors if one.op] == ["multiply", "full"]
