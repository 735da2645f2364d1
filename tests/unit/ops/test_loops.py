"""Control flow: what is known is decided, loops are unrolled."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.errors import ConfigError
from dptrain.layers import Input
from dptrain.ops.loops import remat
from dptrain.program.execute import HostMemory, ReferenceExecutable, evaluate
from dptrain.program.gradient import gradients
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
    assert ops.while_loop(lambda n: n < 20_000, lambda n: n + 1, 0) == 20_000


def test_parts_one_by_one():
    np.testing.assert_array_equal(ops.map(lambda row: ops.sum(row), X), [1, 5, 9])
    results = ops.vectorized_map(lambda pair: {"sum": pair[0] + pair[1], "first": pair[0]}, (X, 2 * X))
    np.testing.assert_array_equal(results["sum"], 3 * X)
    np.testing.assert_array_equal(results["first"], X)


def test_scan_carries_and_stacks():
    for reverse in (False, True):
        last, sums = ops.scan(lambda carry, x: (carry + x, carry + x), np.zeros(2), X, reverse=reverse)
        expected = np.cumsum(X[::-1], 0)[::-1] if reverse else np.cumsum(X, 0)
        np.testing.assert_array_equal(sums, expected)
        np.testing.assert_array_equal(last, X.sum(0))
    last, none = ops.scan(lambda carry, x: (carry + 1, None), 0, length=4)
    assert (last, none) == (4, None)


@pytest.mark.parametrize("xs", [None, (), {}, (None,), {"x": None, "y": ()}], ids=str)
def test_scan_over_no_tensors_takes_a_length(xs):
    def step(x):
        def add(carry, part):
            assert part == xs
            return carry + x, ops.sum(carry)

        last, sums = ops.scan(add, x, xs, length=4)
        return {"last": last, "sums": sums}

    outputs = traced_and_eager(step)
    np.testing.assert_array_equal(outputs["last"], 5 * X)
    np.testing.assert_array_equal(outputs["sums"], X.sum() * np.arange(1, 5))


def test_scan_passes_on_what_is_none_beside_tensors():
    def step(x):
        return {"sum": ops.scan(lambda sum_, part: (sum_ + part["x"], part["none"]), x[0], {"x": x, "none": None})[0]}

    np.testing.assert_array_equal(traced_and_eager(step)["sum"], X[0] + X.sum(0))


def test_loop_variables_of_a_bounded_loop_may_be_nested():
    def step(x):
        state, n = ops.while_loop(
            lambda state, n: ops.sum(state["x"]) < 100,
            lambda state, n: ({"x": 2 * state["x"], "none": None}, n + 1),
            [{"x": x, "none": None}, 0],
            maximum_iterations=9,
        )
        return {"x": state["x"], "n": n + 0 * ops.sum(x)}

    outputs = traced_and_eager(step)
    np.testing.assert_array_equal(outputs["x"], 8 * X)
    assert outputs["n"] == 3


def positive(x):
    return ops.any(x > 0)


def count(x):
    return ops.cast(ops.sum(x), "int32")


# Each with a step that it refuses, in a traced step and outside one.
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: ops.scan(lambda c, v: ((c, c), v), x, x), "scan: f must keep the structure of the carry"),
        (lambda x: ops.scan(lambda c, v: (c, v), x, length=2.5), "scan: length=2.5; expected an integer >= 0"),
        (lambda x: ops.scan(lambda c, v: (c, v), x, 3.0), "scan: a number has no parts"),
        (lambda x: ops.fori_loop(0, 2, lambda n, y: (y, y), x), "fori_loop: body_fun must keep the structure"),
        (lambda x: ops.fori_loop(0, count(x), lambda n, y: (y, y), x), "fori_loop: body_fun must keep the structure"),
        (lambda x: ops.while_loop(positive, lambda y: None, x), "while_loop: body must keep the structure of the loop"),
        (lambda x: ops.while_loop(positive, lambda y: None, x, 3), "while_loop: body must keep the structure of the"),
        (lambda x: ops.while_loop(lambda y: y > 0, lambda y: y, x), r"while_loop: cond returns shape \(3, 2\)"),
        (lambda x: ops.while_loop(lambda y: y > 0, lambda y: y, x, 3), r"while_loop: cond returns shape \(3, 2\)"),
        (lambda x: ops.map(lambda pair: pair[0], (x, x[:2])), "map: expected equal lengths"),
        (lambda x: ops.vectorized_map(lambda pair: pair[0], (x, x[:2])), "vectorized_map: expected equal lengths"),
        (lambda x: ops.vectorized_map(lambda part: part, 1.0), "vectorized_map: a number has no parts"),
        (
            lambda x: ops.associative_scan(lambda a, b: (a, b), x),
            "associative_scan: f must keep the structure of elems",
        ),
        (
            lambda x: ops.associative_scan(lambda a, b: ops.sum(a), x),
            r"associative_scan: f changes the shape of its elements from \(1, 2\) to \(\)",
        ),
        (lambda x: ops.switch(count(x), [lambda: x, x]), "switch: branches must be a list of callables"),
    ],
)
def test_errors_name_the_function(build, message):
    for call in (lambda: build(ops.convert_to_tensor(X)), lambda: traced(build)):
        with pytest.raises(ConfigError, match=f"^{message}"):
            call()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda x: ops.fori_loop(0, 2, lambda n, y: y[:1], x),
            r"fori_loop: body_fun changes the shape of value 0 from \(3, 2\) to \(1, 2\)",
        ),
        (
            lambda x: ops.fori_loop(0, count(x), lambda n, y: ops.cast(y, "int32"), x),
            "fori_loop: body_fun changes the type of value 0 from float64 to int32",
        ),
        (lambda x: ops.cond(positive(x), lambda: x, lambda: None), "cond: the branches must return equal structures"),
        (lambda x: ops.cond(positive(x), lambda: x, lambda: x[:2]), "cond: the branches must return equal shapes"),
        (lambda x: ops.switch(count(x), [lambda: x, lambda: (x, x)]), "switch: the branches must return equal struct"),
        (lambda x: ops.switch(count(x), [lambda: x, lambda: x[:2]]), "switch: the branches must return equal shapes"),
    ],
)
def test_errors_of_a_traced_step_name_the_function(build, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        traced(build)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: ops.fori_loop(0, 2, X, X), "body_fun"),
        (lambda: ops.while_loop(X, lambda y: y, X), "cond"),
        (lambda: ops.while_loop(lambda y: False, X, X), "body"),
        (lambda: ops.map(X, X), "f"),
        (lambda: ops.vectorized_map(X, X), "function"),
        (lambda: remat(X), "f"),
    ],
)
def test_what_is_not_callable_is_refused(call, name):
    with pytest.raises(TypeError, match=f"^`{name}` should be a callable. Received: {name}="):
        call()


def test_a_traced_loop_has_a_gradient():
    w = Variable(np.array(2.0))
    ops.fori_loop(0, 3, lambda i, x: x * w, ops.convert_to_tensor(1.0)).backward()
    assert float(w.value.grad) == 12
    program = trace(lambda x: {"y": ops.map(lambda row: row * row, x)}, {"x": ((3, 2), np.float64)})
    np.testing.assert_array_equal(evaluate(program, {"x": X})[0]["y"], X * X)


@pytest.mark.parametrize("length", [0, 1, 2, 5])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_traced_loop_of_any_length(length, reverse):
    """Over nothing too, where the shape of what is stacked is known before a step runs."""
    x = np.random.default_rng(0).normal(size=(length, 2))

    def step(x):
        last, sums = ops.scan(
            lambda carry, part: (carry + part, carry * part), ops.ones((2,), "float64"), x, reverse=reverse
        )
        squares = ops.map(lambda part: part * part, x)
        grad = gradients(ops.sum(last) + ops.sum(sums) + ops.sum(squares), [x])[0]
        return {"last": last, "sums": sums, "squares": squares, "grad": grad + 0 * x}

    ordered = x[::-1] if reverse else x
    carries = 1 + np.concatenate([np.zeros((1, 2)), ordered.cumsum(0)])
    later = np.concatenate([ordered[::-1].cumsum(0)[::-1][1:], np.zeros((1, 2))])[:length]
    sums, grad = ordered * carries[:-1], 1 + carries[:-1] + later + 2 * ordered
    expected = {"last": carries[-1], "squares": x * x} | {
        name: value[::-1] if reverse else value for name, value in (("sums", sums), ("grad", grad))
    }
    program = trace(step, {"x": (x.shape, np.float64)})
    for executable in (ReferenceExecutable, *([CompiledExecutable] if compiler() else [])):
        run = executable(program, HostMemory(), {"x": x})
        run.run()
        for name, value in expected.items():
            assert run.outputs[name].shape == value.shape
            np.testing.assert_allclose(run.outputs[name], value, rtol=1e-13, err_msg=name)


def traced(f):
    return trace(lambda x: {"y": f(x)}, {"x": ((3, 2), np.float64)})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ops.map(lambda pair: pair[0], (X, X[:2])), r"equal lengths along the first axis, found \[2, 3\]"),
        (lambda: ops.map(lambda part: 1, []), r"expected equal lengths along the first axis, found \[\]"),
        (lambda: ops.map(lambda part: part, X[:0]), "map: a loop of 0 steps has no outputs to stack"),
        (lambda: ops.scan(lambda carry, x: (carry, x), 0, X, length=2), "length=2, but xs has length 3"),
        (lambda: ops.scan(lambda carry, x: (carry, x), 0), "Got no `xs` to scan over and `length` not provided"),
        (lambda: ops.scan(lambda carry, x: carry, X[0], X), r"f must return \(carry, output\), but returned ndarray"),
        (lambda: ops.while_loop(lambda a, b: a < 1, lambda a, b: a + 1, (0, 0)), r"1 value\(s\) for 2 loop"),
        (lambda: ops.cond(X[0] > 0, lambda: 1, lambda: 2), r"pred has shape \(2,\); expected a single boolean"),
        (lambda: traced(lambda x: ops.scan(lambda c, v: ((c, c), v), x, x)), "f must keep the structure of the carry"),
        (
            lambda: traced(lambda x: ops.scan(lambda c, v: (x > 0, v), x, x)[0]),
            r"carry 0 .* to bool \(3, 2\); expected",
        ),
        (lambda: traced(lambda x: ops.fori_loop(0, ops.sum(x), lambda n, y: y, x)), "lower and upper are float64"),
        (lambda: traced(lambda x: ops.fori_loop(0, 2, lambda n, y: None, x)), "Expected <tensor .*>, found None"),
        (lambda: traced(lambda x: ops.cond(ops.any(x > 0), lambda: (x, x), lambda: x)), "must return equal structures"),
        (lambda: traced(lambda x: ops.cond(ops.any(x > 0), lambda: None, lambda: x)), "Expected None, found <tensor"),
        (
            lambda: traced(lambda x: ops.cond(ops.any(x > 0), lambda: x[:2], lambda: x)),
            r"must return equal shapes, found \(2, 2\) and \(3, 2\)$",
        ),
        (lambda: ops.cond(True, X, X), "true_fn and false_fn must be callable, found ndarray and ndarray"),
        (lambda: traced(lambda x: ops.switch(ops.argmax(x), [])), "switch: expected at least one branch"),
        (
            lambda: traced(lambda x: ops.fori_loop(0, 2, lambda n, y: y + ops.sum(x[n : n + 2]), x)),
            r"a slice between ends that a step computes.*; use ops.slice",
        ),
        (
            lambda: traced(lambda x: ops.while_loop(lambda y: ops.any(y > 0), lambda y: y[:1, :1], x, 3)),
            r"the shape of loop variable 0 from \(3, 2\) to \(1, 1\)",
        ),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


STEP = {"x": ((3, 2), np.float64)}


def traced_and_eager(step, x=X):
    """Return what a step makes of x, the same traced and eager."""
    outputs = evaluate(trace(step, {"x": (x.shape, np.float64)}), {"x": x})[0]
    for name, value in step(ops.convert_to_tensor(x)).items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-13)
    return outputs


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_conditions_that_are_not_known(sign):
    calls = Variable(np.array([0.0, 0]), "calls", trainable=False)

    def step(x):
        def yes():
            calls.assign_add([1.0, 0])
            return {"y": x * 2, "none": None}

        def no():
            calls.assign_add([0, 10.0])
            return {"y": -x, "none": None}

        chosen = ops.cond(ops.sum(x) > 0, yes, no)
        assert chosen["none"] is None
        return {"y": chosen["y"]}

    x = sign * X
    outputs, updates = evaluate(trace(step, STEP), {"x": x})
    np.testing.assert_array_equal(outputs["y"], 2 * x if sign > 0 else -x)
    np.testing.assert_array_equal(updates[calls], [1, 0] if sign > 0 else [0, 10])


@pytest.mark.parametrize("number", [-3, 0, 1, 2, 9])
def test_a_branch_by_a_number_that_is_not_known(number):
    branches = [lambda x: x, lambda x: -x, lambda x: x * x]
    step = {"x": ((3, 2), np.float64), "n": ((), np.int64)}
    program = trace(lambda x, n: {"y": ops.switch(n, branches, x)}, step)
    expected = branches[min(max(number, 0), 2)](X)
    np.testing.assert_array_equal(evaluate(program, {"x": X, "n": number})[0]["y"], expected)


@pytest.mark.parametrize("most", [0, 1, 3, 20])
def test_a_loop_while_a_condition_holds_that_is_not_known(most):
    def step(x):
        n, y = ops.while_loop(lambda n, y: ops.sum(y) < 100, lambda n, y: (n + 1, 2 * y), (0, x), most)
        return {"n": n + 0 * ops.sum(x), "y": y}

    outputs = traced_and_eager(step)
    assert outputs["n"] == min(most, 3)
    np.testing.assert_array_equal(outputs["y"], X * 2 ** min(most, 3))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_sums_of_an_associative_function(length, reverse, axis):
    x = np.random.default_rng(0).normal(size=(length, 2) if axis == 0 else (2, length))

    def step(x):
        pair = ops.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, x + 1), reverse, axis)
        return {"sum": ops.associative_scan(ops.add, x, reverse, axis), "product": pair[0], "line": pair[1]}

    outputs = traced_and_eager(step, x)
    turned = np.flip(x, axis) if reverse else x
    for name, function in (("sum", np.cumsum), ("product", np.cumprod)):
        expected = function(turned, axis)
        np.testing.assert_allclose(outputs[name], np.flip(expected, axis) if reverse else expected, rtol=1e-12)
    steps, state = np.moveaxis(turned, axis, 0), np.zeros(2)
    for number, part in enumerate(steps):
        state = part * state + part + 1
        at = length - 1 - number if reverse else number
        np.testing.assert_allclose(np.moveaxis(outputs["line"], axis, 0)[at], state, rtol=1e-11, atol=1e-12)


def test_a_loop_of_symbolic_tensors_that_does_not_end_is_refused():
    x = Input((3,))

    def times(most):
        return ops.while_loop(lambda n, x: n < most, lambda n, x: (n + 1, x), (0, x))[0]

    assert times(10_000) == 10_000
    with pytest.raises(ConfigError, match=r"still true after 10000 iterations on symbolic tensors"):
        times(10_001)
    with pytest.raises(ConfigError, match="pass maximum_iterations"):
        ops.while_loop(lambda x: True, lambda x: x + 1, x)


def test_a_tensor_outside_its_loop_has_no_value():
    kept = []

    def keep(carry, part):
        kept.append(carry)
        return carry, part

    traced(lambda x: ops.scan(keep, x, x)[1])
    for tensor in (kept[0], Input((3,))):
        with pytest.raises(ConfigError, match=r"^<tensor .* has no value: it is symbolic .* belongs to a traced step"):
            np.asarray(tensor)


def test_an_associative_scan_of_other_lengths_is_refused():
    with pytest.raises(ConfigError, match="same first dimension"):
        ops.associative_scan(lambda a, b: (a[0] + b[0], a[1] + b[1]), (np.ones((3, 2)), np.ones((4, 2))))
