"""What calling an op outside of a trace costs nothing of: marks of rows, bits, warnings, watchers."""

import re
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import basic_indices

from dptrain import ops
from dptrain.errors import ConfigError, DivergenceError
from dptrain.ops import random
from dptrain.program import op as calls
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.lowering import Element
from dptrain.program.program import trace
from dptrain.program.tensor import OPS, Tensor, Variable, constant, watching
from tests.sample import examples

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def rows_of(array):
    """Return a batch as a step that runs eagerly gets it."""
    return Tensor(None, (), {}, (Dim.rows(len(array)), *array.shape[1:]), array.dtype, array)


# What is remembered of earlier calls


def test_rows_stay_marked_after_plain_tensors_of_their_shape():
    assert ops.exp(constant(X)).shape == (6, 4)
    assert isinstance(ops.exp(rows_of(X)).shape[0], Dim)
    assert isinstance((constant(X) + rows_of(X)).shape[0], Dim)
    assert not isinstance((constant(X) + constant(X)).shape[0], Dim)


def test_types_and_shapes_are_told_apart():
    for a, b in (("int32", "float32"), ("float32", "float64"), ("int32", "int32"), ("bool", "bool")):
        for shape in ((6, 4), (4,), (6, 1)):
            total = ops.add(X.astype(a), np.ones(shape, b))
            assert (total.shape, total.dtype.name) == ((6, 4), b)


def test_what_does_not_go_together_is_refused_every_time():
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be broadcast together"):
            constant(X) + constant(X[:, :3])


def test_no_more_than_so_many_shapes_are_remembered(monkeypatch):
    monkeypatch.setattr(calls, "_KINDS", len(ops.tanh._kinds) + 1)
    for length in (101, 102, 103):
        assert ops.tanh(np.zeros(length)).shape == (length,)
    assert len(ops.tanh._kinds) == calls._KINDS


# Infinities and NaNs are results


def test_nothing_warns_and_numpy_is_left_as_it_was():
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = [ops.log(np.zeros(2)), constant(X) / 0, ops.softmax(np.full((1, 2), np.inf)), -ops.sqrt(-np.ones(1))]
        assert not any(np.isfinite(tensor.numpy()).any() for tensor in tensors)
        with pytest.raises(FloatingPointError):
            np.log(np.zeros(2))


def test_a_function_of_a_user_may_call_ops():
    @ops.op(source="", arguments="PPq")
    def squares_of_logs(x, y):
        y[...] = ops.square(ops.log(x))

    np.testing.assert_array_equal(squares_of_logs(np.array([0.0, 1.0])), [np.inf, 0])


def test_threads_do_not_meet():
    totals = []

    def work():
        totals.extend(float(ops.sum(ops.log(np.ones(100)))) for _ in range(100))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == [0.0] * 300


# One NumPy function for several ops


@pytest.mark.parametrize("axis", [-1, 0, (0, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_softmax_has_the_bits_of_its_ops(dtype, axis):
    x = (np.random.default_rng(1).normal(size=(5, 37, 3)) * 9).astype(dtype)
    if x.dtype.kind == "f":
        x[0, 0], x[1, 1, 1], x[2, 2] = -np.inf, np.inf, np.nan
    program = trace(lambda x: {"y": ops.softmax(x, axis)}, {"x": (x.shape, x.dtype)})
    expected = evaluate(program, {"x": x})[0]["y"]
    eager = ops.softmax(x, axis)
    assert (eager.numpy().tobytes(), eager.dtype) == (expected.tobytes(), expected.dtype)
    assert ops.softmax(Variable(x)).numpy().tobytes() == ops.softmax(x).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("draw", [random.normal, random.uniform])
def test_random_numbers_have_the_bits_of_their_ops(draw, dtype):
    seed = random.SeedGenerator(3)
    program = trace(lambda: {"y": draw((9, 5), 0.5, 2, dtype, seed=seed)}, {})
    expected = evaluate(program, {})[0]["y"]
    eager = draw((9, 5), 0.5, 2, dtype, seed=seed).numpy()
    assert (eager.tobytes(), eager.dtype) == (expected.tobytes(), dtype)
    assert draw((), dtype=dtype).numpy().shape == ()


def test_a_watcher_sees_every_op():
    with watching(), pytest.raises(DivergenceError, match="op 'subtract' is the first to produce a NaN"):
        ops.softmax(np.array([np.inf, 1.0]))
    op_names = []
    with watching(lambda tensor: op_names.append(tensor.op.name)):
        constant(X)[1:3]
    assert op_names == ["getitem"]


# Parts


@given(basic_indices((4, 3, 2), allow_newaxis=True, allow_ellipsis=True))
@settings(max_examples=examples(50))
def test_parts_are_those_of_numpy(key):
    array = np.arange(24.0).reshape(4, 3, 2)
    for part in (constant(array)[key], Variable(array)[key]):
        assert part.shape == array[key].shape
        np.testing.assert_array_equal(part.numpy(), array[key])


@pytest.mark.parametrize("key", [6, (0, 4), (0, 0, 0), slice(0, 2, 0)], ids=str)
def test_a_part_that_is_not_there(key):
    messages = []
    for x in (constant(X), Variable(X)):
        with pytest.raises(ConfigError) as caught:
            x[key]
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_part_up_to_the_number_of_rows_counts_them():
    assert isinstance(constant(X)[: Dim.rows(3)].shape[0], Dim)


# What records say


def test_functions_and_divisions_are_expensive():
    """Or a GPU computes them again wherever they are used."""
    cheap = {"dp_absolute", "dp_maximum", "dp_minimum", "dp_sign", "ceil", "floor", "rint"}
    cheap |= {"dp_left_shift", "dp_right_shift", "dp_signbit", "dp_nextafter"}
    elements = {name: op for name, op in OPS.items() if isinstance(op.lowering, Element)}
    costly = {
        name
        for name, op in elements.items()
        if " / " in op.lowering.c or set(re.findall(r"(\w+)\(", op.lowering.c)) - cheap
    }
    assert costly == {name for name, op in elements.items() if op.expensive}
    assert {"erf", "divide", "divide_no_nan", "power"} <= costly
    assert {"add", "relu", "maximum"}.isdisjoint(costly)


WITH_UFUNC = [name for name, op in OPS.items() if op.ufunc is not None]


@pytest.mark.parametrize("name", WITH_UFUNC)
def test_a_ufunc_makes_what_the_function_makes(name):
    op, rng = OPS[name], np.random.default_rng(3)
    x = rng.normal(0, 3, (4, 3)).astype(np.float32)
    x[0, :2] = np.inf, np.nan
    pairs = [(x, x[::-1]), (x, x[1]), (x, x[:, :1]), (x.T, x.T), (x[:0], x[1]), (x[0, 2], x[1, 0]), (x, x[1, 1])]
    types = ["float32", "float64", "int8", "int64", "bool", "uint8", "float16"]
    with np.errstate(invalid="ignore"):
        pairs += [(x[1:].astype(dtype), x[2].astype(other)) for dtype in types for other in types]
    if name == "subtract":  # which NumPy has not for booleans
        pairs = [pair for pair in pairs if not pair[0].dtype == pair[1].dtype == bool]
    for a, b in pairs:
        values = [ops.convert_to_tensor(operand) for operand in (a, b)]
        first, second = op(*values), op(*values)  # the second call knows what comes out
        out = np.empty(first.shape, first.dtype)
        if first.dtype != np.float16:
            with np.errstate(all="ignore"):
                op.compute(a, b, out=out)
            assert first.value.tobytes() == out.tobytes()
        assert (second.shape, second.dtype) == (first.shape, first.dtype)
        assert isinstance(second.value, np.ndarray)
        assert second.value.flags.c_contiguous
        assert second.value.tobytes() == first.value.tobytes()


def test_arithmetic_at_once_is_seen_by_tapes_and_watchers():
    x, tensors = ops.convert_to_tensor(np.ones((2, 3), np.float32)), []
    with watching(tensors.append):
        for _ in range(2):
            ops.add(x, x)
    assert [tensor.op.name for tensor in tensors] == ["add", "add"]
    variable = Variable(np.ones((2, 3), np.float32))
    for _ in range(2):
        product = variable * x
    product.backward()
    np.testing.assert_array_equal(variable.value.grad, np.ones((2, 3)))
