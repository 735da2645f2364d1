"""Tensors, variables and the reverse pass, eagerly and while a step is traced."""

import tracemalloc

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops.common import broadcast_shape, common_dtype, elementwise
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.op import Op
from dptrain.program.program import trace
from dptrain.program.tape import GradientTape
from dptrain.program.tensor import Variable, constant, differentiable


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
        (None, (1, 2, 3, 4)),
        ((slice(None), None), (2, 1, 3, 4)),
        ((slice(None), slice(None), None, None), (2, 3, 1, 1, 4)),
        ((..., None), (2, 3, 4, 1)),
        ((None, 1, ..., None, slice(1, 3)), (1, 3, 1, 2)),
        ([1, 0, 1], (3, 3, 4)),
        (np.array([[0, -1]]), (1, 2, 3, 4)),
        ((slice(None), [2, 0]), (2, 2, 4)),
        ((..., np.array([[1], [3]])), (2, 3, 2, 1)),
        (([0, 1], [2, 0]), (2, 4)),
        ((slice(None), [[2], [0]], [1, 3]), (2, 2, 2)),
        (([0, 1], slice(None), [3, 0]), (2, 3)),
        ((1, slice(None), [3, 0]), (2, 3)),
        ((slice(None), None, [2, 0]), (2, 1, 2, 4)),
        ([], (0, 3, 4)),
        (np.array([True, False]), (1, 3, 4)),
        ((slice(None), np.array([True, False, True])), (2, 2, 4)),
        (np.arange(6).reshape(2, 3) % 2 == 0, (3, 4)),
        (slice(None, None, -1), (2, 3, 4)),
        ((slice(None), slice(2, None, -2), slice(-2, 0, -1)), (2, 2, 2)),
        ((0, slice(0, 2, -1)), (0, 4)),
    ],
)
def test_slices(key, expected):
    array = np.arange(24.0).reshape(2, 3, 4)
    part = constant(array)[key]
    assert part.shape == array[key].shape == expected
    np.testing.assert_array_equal(part, array[key])

    def step(x):
        ops.sum(w[key] * x[key]).backward()
        return {"part": w[key] + 0, "slope": w.value.grad}

    w = Variable(array, "w")
    outputs, _ = evaluate(trace(step, {"x": (array.shape, array.dtype)}), {"x": array})
    np.testing.assert_array_equal(outputs["part"], array[key])
    slope = np.zeros_like(array)
    np.add.at(slope, key, array[key])
    np.testing.assert_array_equal(outputs["slope"], slope)


def test_what_is_no_slice():
    x = constant(np.zeros((2, 3)))
    for wrong, words in (
        (2, "out of range"),
        ((0, 0, 0), "too many indices: 3"),
        (slice(None, None, 0), "slice step cannot be zero"),
        ([2], "index 2 is out of range for a length of 2"),
        (([0], [0], [0]), "too many indices: 3"),
        ((..., ...), "a single ellipsis"),
        ([0.5], "an index of float32"),
        (np.array([True]), r"a boolean index of shape \(1,\) for axes of shape \(2,\)"),
        (True, "a single boolean cannot be an index"),
    ):
        with pytest.raises(ConfigError, match=words):
            x[wrong]


def test_backward_adds_up_in_grad():
    w = Variable(np.array([1.0, 2.0]), "w")
    frozen = Variable(np.array([3.0, 4.0]), "frozen", trainable=False)
    ops.sum(w * w * frozen).backward()
    np.testing.assert_array_equal(w.value.grad, [6, 16])
    np.testing.assert_array_equal(w.value.grad, [6, 16])
    assert frozen.value.grad is None
    ops.sum(w).backward()
    np.testing.assert_array_equal(w.value.grad, [7, 17])


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
    x = differentiable(np.array(2.0))
    (first,) = gradients(x**3, [x])
    (second,) = gradients(first, [x])
    assert float(first) == 12
    assert float(second) == 12


def test_no_gradient():
    x, y = differentiable(np.array([1.0])), constant(np.array([1]))
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

    with pytest.raises(ConfigError, match=r"not known while a step is traced.*run_eagerly=True"):
        trace(step, {"x": ((Dim.rows(3),), np.float64)})


def test_a_trace_reads_and_writes_state():
    total, read = Variable(np.zeros(2), "total"), Variable(np.ones(1), "read")

    def step(x):
        total.assign(total + ops.sum(x, 0) + read)
        return {"twice": total * 2}

    program = trace(step, {"x": ((Dim.rows(3), 2), np.float64)})
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

    program = trace(step, {"x": ((Dim.rows(3), 2), np.float64)})
    assert (list(program.state), list(program.updates)) == ([last], [last])


def test_gradients_of_a_trace_are_its_own():
    w = Variable(np.array([1.0, 2.0]), "w")
    ops.sum(w * 3).backward()

    def step(x):
        assert w.value.grad is None
        ops.sum(w * x).backward()
        ops.sum(w * x).backward()
        gradient = w.value.grad
        w._gradient = None
        assert w.value.grad is None
        return {"grad": gradient}

    program = trace(step, {"x": ((2,), np.float64)})
    np.testing.assert_array_equal(evaluate(program, {"x": [5, 6]})[0]["grad"], [10, 12])
    np.testing.assert_array_equal(w.value.grad, [3, 3])


def test_the_number_of_rows_is_a_constant_that_says_so():
    """So that what is generated from a program can count the rows of another batch."""

    def step(x):
        return {"mean": ops.sum(x) / (2 * x.shape[0]), "rows": ops.cast(x.shape[0], "float64"), "more": x.shape[0] + 1}

    program = trace(step, {"x": ((Dim.rows(8), 2), "float64")})
    (counted,) = [tensor for tensor in program.outputs["mean"].inputs if tensor.op is None]
    assert (counted.counts_rows, counted.attributes["rows"], float(counted)) == (True, 2, 16)
    assert program.outputs["rows"].op.name == "cast_to"
    assert not program.derived.outputs["more"].counts_rows


def test_what_depends_on_no_placeholder_is_computed_once():
    def step(x):
        return {"y": x * ops.exp(constant(np.array(0.0))), "ones": ops.ones((x.shape[0], 1))}

    program = trace(step, {"x": ((Dim.rows(3),), np.float64)})
    assert [tensor.op.name for tensor in program.tensors if tensor.op] == ["multiply", "full"]


# What an eager tensor remembers


def test_a_loop_keeps_no_values():
    """Ten thousand steps on 40 kB would keep 400 MB."""
    w = Variable(np.ones(10_000, np.float32))
    for step in (lambda v: v + 1, lambda v: ops.softmax(v[::1]), lambda v: ops.stop_gradient(v * w)):
        v = step(constant(np.ones(10_000, np.float32)))
        tracemalloc.start()
        for _ in range(300):
            v = step(v)
        nbytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert nbytes < 300_000


def test_what_variables_and_open_tapes_are_asked_for_is_remembered():
    x, w = constant(np.array([2.0])), Variable(np.array([3.0]))
    assert (x * x).inputs == ()
    assert len((x * w).inputs) == 2
    w.trainable = False
    assert (x * w).inputs == ()
    with GradientTape() as tape:
        tape.watch([x, w])
        y = x * x * w
    assert float(tape.gradient(y, x)) == 12
    assert (x * x).inputs == (x * w).inputs == ()  # the tape is closed


def test_steps_on_an_input_keep_nothing():
    """As in gradient ascent on a picture."""
    x = constant(np.array([2.0]))
    for _ in range(3):
        with GradientTape() as tape:
            tape.watch(x)
            y = x * x
        x = x - 0.25 * tape.gradient(y, x)
        assert x.inputs == ()
    assert float(x) == 0.25


def test_a_tape_around_a_tape():
    x = constant(np.array(2.0))
    with GradientTape() as outer:
        outer.watch(x)
        with GradientTape() as inner:
            inner.watch(x)
            y = x**3
        first = inner.gradient(y, x)
        product = first * x
    assert (float(first), float(outer.gradient(product, x))) == (12, 36)


# As a sequence and as a number


def test_rows_one_by_one():
    x = constant(np.arange(6.0).reshape(3, 2))
    assert [row.numpy().tolist() for row in x] == [[0, 1], [2, 3], [4, 5]]
    first, *_, last = x
    assert (len(x), float(first[0]), float(last[1])) == (3, 0, 5)
    assert [float(element) for element in Variable(np.arange(2.0))] == [0, 1]
    for function in (len, list):
        with pytest.raises(TypeError, match="without dimensions has no length"):
            function(constant(1.0))


def test_a_batch_has_no_length_while_a_step_is_traced():
    for function in (len, list):
        with pytest.raises(ConfigError, match="over the rows of a batch"):
            trace(lambda x, function=function: {"y": function(x)}, {"x": ((Dim.rows(3), 2), np.float64)})
    program = trace(lambda x: {"y": sum(list(x))}, {"x": ((2, Dim.rows(3)), np.float64)})
    np.testing.assert_array_equal(evaluate(program, {"x": np.ones((2, 3))})[0]["y"], [2, 2, 2])


def test_numbers():
    x = constant(np.array([[2.5]]))
    assert (float(x), int(x), bool(x), f"{x[0, 0]:.2f}", f"{x}") == (2.5, 2, True, "2.50", repr(x))
    assert [10, 20, 30][constant(np.array(1))] == 20
    assert list(range(constant(3))) == [0, 1, 2]
    for wrong in (x, constant(np.array(1.0)), constant(np.array([1]))):
        with pytest.raises(TypeError, match="expected a single integer"):
            range(wrong)
    with pytest.raises(ValueError, match="array of size 1"):
        float(constant([1.0, 2.0]))


def test_memory_is_shared():
    x = constant(np.arange(3.0))
    assert np.shares_memory(np.asarray(x), x.value)
    assert np.shares_memory(np.from_dlpack(x), x.value)
    assert np.asarray(x, np.float32).dtype == np.float32


def test_operators_from_the_right():
    x, flags = constant(np.array([2, 3])), constant(np.array([True, False]))
    np.testing.assert_array_equal(7 // x, [3, 2])
    np.testing.assert_array_equal(7 % x, [1, 1])
    np.testing.assert_array_equal(flags ^ True, [False, True])
    np.testing.assert_array_equal(True & flags, [True, False])
    np.testing.assert_array_equal(False | flags, [True, False])


def test_arguments_by_name_and_by_place():
    np.testing.assert_allclose(ops.elu([-1.0], 0.5), 0.5 * np.expm1([-1.0]), rtol=1e-6)
    np.testing.assert_array_equal(ops.subtract(x1=[3.0], x2=[1.0]), [2])
    for wrong, words in (
        (lambda: ops.elu([1.0], 0.5, 1), r"elu\(\) takes 2 arguments: x, alpha; received 3"),
        (lambda: ops.add([1.0]), r"add\(\) is missing the arguments x2"),
        (lambda: ops.add([1.0], [1.0], x1=2), r"add\(\) got multiple values for argument 'x1'"),
    ):
        with pytest.raises(TypeError, match=words):
            wrong()


def test_no_gradient_goes_through_whole_numbers_traced_or_not():
    values = np.array([-3.0, 0.3, 2.6], np.float32)

    def slope(x):
        total = ops.cast(ops.absolute(x * 1.75), "uint8") + x
        return gradients(ops.sum(total * total), [x])[0]

    expected = 2 * (np.floor(np.abs(values * np.float32(1.75))) + values)
    np.testing.assert_array_equal(slope(differentiable(values)).numpy(), expected)
    program = trace(lambda x: {"slope": slope(x)}, {"x": ((3,), "float32")})
    np.testing.assert_array_equal(evaluate(program, {"x": values})[0]["slope"], expected)


def test_a_tensor_does_not_change():
    with pytest.raises(TypeError, match=r"instead of x\[...\] = y use ops.where"):
        constant(np.zeros(3))[0] = 1


def test_a_number_that_is_not_known_is_not_formatted():
    texts = []

    def step(x):
        texts.append(f"{x} {x:>40}")
        return {"y": f"{ops.sum(x):.2f}"}

    with pytest.raises(ConfigError, match="not known while a step is traced"):
        trace(step, {"x": ((3,), "float64")})
    assert texts == ["<tensor x (3,) float64>                  <tensor x (3,) float64>"]
