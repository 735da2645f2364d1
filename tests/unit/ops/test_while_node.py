"""Loops of unknown length as nodes of a program: their values, what ends them, where ranks place them."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops, random
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.errors import ConfigError
from dptrain.program.body import body_of, has_body, steps_of, with_steps
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.programs import check
from tests.programs.check import by_numpy
from tests.programs.interpreted import InterpretedExecutable
from tests.unit.program.virtual_ranks import on_ranks, run_on_ranks

X = np.arange(6.0).reshape(3, 2)
INPUTS = {"x": ((3, 2), np.float64), "n": ((), np.int32)}


def both(function, x, n=0):
    """Return what NumPy computes, and C++ by one thread and by three, which must agree."""
    program, values = trace(lambda x, n: function(x, n), INPUTS), {"x": x, "n": np.int32(n)}
    outputs, updates = evaluate(program, values)
    for threads in (1, 3) if compiler() is not None else ():
        executable = CompiledExecutable(program, HostMemory(), values, threads=threads)
        executable.run()
        for name, value in outputs.items():
            np.testing.assert_allclose(executable.outputs[name], value, rtol=1e-13)
        for variable, value in updates.items():
            np.testing.assert_allclose(variable.numpy(), value, rtol=1e-13)
    return outputs


def loops_in(program):
    return {tensor.node for tensor in with_steps(program.tensors) if has_body(tensor) and steps_of(tensor) is None}


@pytest.mark.parametrize(("scale", "times"), [(1.0, 3), (9.0, 0), (3.0, 2), (1e-3, 13)])
def test_it_ends_when_the_condition_is_false(scale, times):
    outputs = both(
        lambda x, n: dict(
            zip(
                "ny",
                ops.while_loop(lambda n, y: ops.sum(y) < 100, lambda n, y: (n + 1, 2 * y), (0, x)),
                strict=True,
            )
        ),
        X * scale,
    )
    assert outputs["n"] == times
    np.testing.assert_array_equal(outputs["y"], X * scale * 2**times)


@pytest.mark.parametrize("times", [-2, 0, 1, 2, 7])
def test_a_for_loop_up_to_an_unknown_number(times):
    def function(x, n):
        return {"y": ops.fori_loop(1, n + 1, lambda i, y: y + x * ops.cast(i, x.dtype), x)}

    np.testing.assert_array_equal(both(function, X, times)["y"], X * (1 + sum(range(times + 1))))


def test_values_may_be_nested_and_of_several_types():
    def function(x, n):
        values = ({"x": x, "none": None}, [ops.sum(x) > 99, n])
        a, (b, c) = ops.while_loop(
            lambda a, b: b[1] < 4,
            lambda a, b: ({"x": a["x"] - 1, "none": None}, [ops.any(a["x"] < 0), b[1] + 1]),
            values,
        )
        assert a["none"] is None
        return {"a": a["x"], "b": b, "c": c}

    outputs = both(function, X, 2)
    np.testing.assert_array_equal(outputs["a"], X - 2)
    assert (outputs["b"], outputs["c"]) == (True, 4)
    assert not both(function, X, 4)["b"]


def test_carries_may_change_places():
    def function(x, n):
        _, a, b = ops.while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, b, a), (0, x, -x))
        return {"a": a, "b": b}

    for times in range(4):
        np.testing.assert_array_equal(both(function, X, times)["a"], X if times % 2 == 0 else -X)


def test_a_body_assigns_variables_as_often_as_it_runs():
    for times in (0, 1, 5):
        total, last = Variable(np.array(3.0), "total"), Variable(np.zeros(2), "last")

        def function(x, n, total=total, last=last):
            def body(i):
                total.assign_add(ops.sum(x))
                last.assign(x[0] * ops.cast(i, x.dtype))
                return i + 1

            return {"i": ops.while_loop(lambda i: i < n, body, 0), "total": total + 0}

        program = trace(lambda x, n: function(x, n), INPUTS)
        outputs, updates = evaluate(program, {"x": X, "n": np.int32(times)})
        assert outputs["total"] == updates[total] == 3 + 15 * times
        np.testing.assert_array_equal(updates[last], X[0] * max(times - 1, 0))


def test_random_numbers_differ_between_iterations_and_executions():
    seeds = random.SeedGenerator(5)

    def function(x, n):
        drawn = ops.zeros((4, 3))
        _, drawn = ops.while_loop(
            lambda i, drawn: i < n,
            lambda i, drawn: (i + 1, ops.where(ops.arange(4)[:, None] == i, random.uniform((3,), seed=seeds), drawn)),
            (0, drawn),
        )
        return {"drawn": drawn}

    program, values = trace(function, INPUTS), {"x": X, "n": np.int32(3)}
    (first, updates), state = evaluate(program, values), {}
    state |= updates
    second = evaluate(program, values, state)[0]["drawn"]
    assert len(np.unique([first["drawn"][:3], second[:3]])) == 18
    assert not first["drawn"][3].any()
    if compiler() is not None:
        executable = CompiledExecutable(program, HostMemory(), values)
        executable.run()
        np.testing.assert_array_equal(executable.outputs["drawn"], first["drawn"])
        executable.run()
        np.testing.assert_array_equal(executable.outputs["drawn"], second)


def test_loops_in_loops():
    def function(x, n):
        def outer(carry, part):
            inner = ops.while_loop(lambda a: ops.sum(a) < ops.sum(part) * 4, lambda a: a * 2 + 1, carry + part)
            return inner, inner

        def around(i, a):
            return i + 1, ops.scan(outer, a, x)[0]

        scanned = ops.scan(outer, x[0], x, reverse=True)
        return {
            "last": scanned[0],
            "all": scanned[1],
            "around": ops.while_loop(lambda i, a: i < n, around, (0, x[0]))[1],
        }

    def by_python(carry, parts):
        for part in parts:
            carry = carry + part
            while carry.sum() < part.sum() * 4:
                carry = carry * 2 + 1
        return carry

    for times in range(3):
        outputs = both(function, X + 1, times)
        np.testing.assert_array_equal(outputs["last"], by_python(X[0] + 1, X[::-1] + 1))
        np.testing.assert_array_equal(outputs["all"][0], outputs["last"])
        expected = X[0] + 1
        for _ in range(times):
            expected = by_python(expected, X + 1)
        np.testing.assert_array_equal(outputs["around"], expected)


def test_what_nobody_reads_is_not_carried_but_the_condition_is():
    def function(x, n):
        _, _, y, _ = ops.while_loop(
            lambda i, unread, y, same: i < n + same,
            lambda i, unread, y, same: (i + 1, unread * 2, y + x, same),
            (0, x, x, 1),
        )
        return {"y": y}

    program = trace(lambda x, n: function(x, n), INPUTS)
    (loop,) = loops_in(program)
    assert len(body_of(loop).carries) == 3  # condition, i, y
    np.testing.assert_array_equal(both(function, X, 3)["y"], 5 * X)


def test_a_loop_whose_condition_is_no_value_of_it_runs_once():
    goes_on = iter([True, False])
    outputs = both(
        lambda x, n: {"y": ops.while_loop(lambda y: ops.sum(x) > 1 if next(goes_on) else False, lambda y: 2 * y, x)}, X
    )
    np.testing.assert_array_equal(outputs["y"], 2 * X)


def test_it_has_no_gradient_but_may_stand_beside_one():
    w = Variable(np.array(2.0))

    def function(x, n, reads):
        w._gradient = None
        y = ops.while_loop(lambda y: ops.sum(y) < 100, lambda y: y * w, x)
        (ops.sum(reads(y) * w)).backward()
        return {"grad": w.value.grad}

    with pytest.raises(ConfigError, match=r"^while_loop without maximum_iterations and fori_loop .* no gradient"):
        trace(lambda x, n: function(x, n, lambda y: y), INPUTS)
    program = trace(lambda x, n: function(x, n, ops.stop_gradient), INPUTS)
    assert evaluate(program, {"x": X, "n": np.int32(0)})[0]["grad"] == 15 * 8


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda n, y: (n, y[:1]), r"body changes the shape of loop variable 1 from \(3, 2\) to \(1, 2\)"),
        (lambda n, y: (n * 0.5, y), "body changes the type of loop variable 0 from int32 to float"),
        (lambda n, y: (n, (y, y)), "body must keep the structure of the loop variables"),
        (lambda n, y: n, r"body returned 1 value\(s\) for 2 loop variable\(s\)"),
    ],
)
def test_a_body_must_return_what_it_takes(body, message):
    with pytest.raises(ConfigError, match=f"^while_loop: {message}"):
        trace(lambda x, n: {"y": ops.while_loop(lambda n, y: ops.sum(y) > n, body, (n, x))[1]}, INPUTS)


def test_a_condition_is_a_single_boolean():
    with pytest.raises(ConfigError, match=r"^while_loop: cond returns shape \(3, 2\); expected a single boolean"):
        trace(lambda x, n: {"y": ops.while_loop(lambda y: y > 0, lambda y: y, x)}, INPUTS)
    both(
        lambda x, n: {"y": ops.while_loop(lambda y: n + ops.cast(ops.sum(y[:1, :1]) < 3, n.dtype), lambda y: y + 1, x)},
        X,
    )
    with pytest.raises(
        ConfigError, match=r"^fori_loop: lower and upper are float64 \(\), int32 \(\); expected integers"
    ):
        trace(lambda x, n: {"y": ops.fori_loop(ops.sum(x), n, lambda i, y: y, x)}, INPUTS)


class Sampler(layers.Layer):
    """Iterates until a sum that all ranks know is large enough."""

    def build(self, shape):
        self.w = self.add_weight((shape[-1],), "ones", name="w")

    def call(self, x):
        return ops.while_loop(lambda n, y, w: ops.sum(w) < 9, lambda n, y, w: (n + 1, y + w, w * 1.5), (0, x, self.w))[
            1
        ]


def test_a_model_predicts_with_it_and_says_that_it_does():
    model = dp.Sequential([layers.Input((3,)), Sampler()], seed=0)
    model.compile(loss="mse", optimizer="sgd", device="cpu")
    x = np.ones((5, 3), np.float32)
    np.testing.assert_allclose(model.predict(x, verbose=0), x + 1 + 1.5 + 2.25, rtol=1e-6)
    assert "while(" in model.explain(step="predict", code=True)
    with pytest.raises(ConfigError, match="pass maximum_iterations"):
        model.fit(x, x, verbose=0)


ROWS = {"x": ((Dim.rows(5), 2), np.float64)}


def test_ranks_agree_on_the_length():
    """Carries are rows, a condition and a number that all have."""
    w = Variable(np.array([1.0, 2.0]), "w")

    def step(x):
        n, y, total = ops.while_loop(
            lambda n, y, total: ops.sum(total) < 50, lambda n, y, total: (n + 1, y + w, total * 2), (0, x, w + 0)
        )
        return {"n": n, "y": y, "total": total, "sum": ops.sum(y)}

    x = np.arange(10.0).reshape(5, 2)
    program = trace(step, ROWS)
    expected = evaluate(program, {"x": x})[0]
    assert expected["n"] == 5
    for outputs, _ in run_on_ranks(place(program), {"x": x}, [3, 0, 2], {"x": 0})[0]:
        for name in ("n", "total", "sum"):
            np.testing.assert_allclose(outputs[name], expected[name], rtol=1e-13)


def test_a_sum_over_rows_is_made_whole_before_it():
    def step(x):
        n, total = ops.while_loop(lambda n, total: total < 500, lambda n, total: (n + 1, total * 2), (0, ops.sum(x)))
        return {"n": n, "total": total}

    x = np.arange(10.0).reshape(5, 2)
    program = trace(step, ROWS)
    expected = evaluate(program, {"x": x})[0]
    for outputs, _ in run_on_ranks(place(program), {"x": x}, [3, 0, 2], {"x": 0})[0]:
        assert outputs == expected


def test_ranks_meet_in_a_loop_whose_condition_needs_all_rows():
    """By NumPy and by C++, where ranks communicate between steps, and alone; an op that only NumPy has beside it."""
    w = Variable(np.array([1.0, 2.0]), "w")

    def step(x):
        def body(n, y, matrix):
            return n + 1, ops.tanh(y @ matrix) * 0.7, ops.linalg.inv(matrix) * 0.5 + ops.mean(y) * 0.1

        n, y, matrix = ops.while_loop(lambda n, y, matrix: ops.sum(y * y) > 3, body, (0, x, ops.eye(2, dtype=x.dtype)))
        m, z = ops.while_loop(lambda m, z: ops.any(z < 8), lambda m, z: (m + 1, z * 2 + 1), (0, ops.abs(x)))
        added = ops.while_loop(lambda s, z: ops.sum(z * z) > 1, lambda s, z: (ops.sum(z), z * 0.5), (ops.sum(w), x))
        return {"n": n, "m": m, "y": ops.sum(y * y), "z": ops.sum(z), "matrix": matrix, "added": added[0]}

    x = np.arange(10.0).reshape(5, 2)
    program = trace(step, ROWS)
    expected = evaluate(program, {"x": x})[0]
    assert expected["n"] > 1
    assert expected["m"] == 4
    makes = [by_numpy] if compiler() is None else [by_numpy, check.compiled(), InterpretedExecutable]
    for make in makes:
        for shards in ([5], [3, 0, 2]):

            def work(comm, make=make, shards=shards):
                first = sum(shards[: comm.rank])
                rows = shards[comm.rank]
                memory = (HostMemory(),) if make is InterpretedExecutable else ()
                executable = make(
                    place(trace(step, ROWS)),
                    *memory,
                    {"x": x[first : first + rows]},
                    rows=rows,
                    first_row=first,
                    comm=comm,
                )
                for _ in range(2):
                    executable.run()
                return executable.outputs

            for outputs in on_ranks(len(shards), work):
                for name, value in expected.items():
                    np.testing.assert_allclose(outputs[name], value, rtol=1e-11, err_msg=f"{name} {make} {shards}")


def test_ranks_that_meet_in_a_loop_agree_on_its_condition():
    """Sums may differ in their last bits from rank to rank: all must go on, or none, from the first step on."""
    program = place(trace(lambda x: {"y": ops.while_loop(lambda y: ops.sum(y * y) > 3, lambda y: y * 0.5, x)}, ROWS))
    (loop,) = loops_in(program)
    for condition in (loop.inputs[0], body_of(loop).following[0]):
        assert condition.inputs[0].op is ALL_REDUCE
        assert condition.inputs[0].attributes["over"] == "max"


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_two_programs_that_differ_in_seeds_draw_their_own_numbers_where_python_executes_steps():
    def made(seed):
        seeds = random.SeedGenerator(seed)

        def body(i, drawn):
            return i + 1, ops.linalg.inv(ops.eye(2) + drawn) + random.uniform((2, 2), seed=seeds)

        program = trace(lambda x, n: {"y": ops.while_loop(lambda i, _: i < n, body, (0, ops.zeros((2, 2))))[1]}, INPUTS)
        values = {"x": X, "n": np.int32(2)}
        executable = CompiledExecutable(program, HostMemory(), values)
        expected = evaluate(program, values)[0]["y"]
        executable.run()
        np.testing.assert_allclose(executable.outputs["y"], expected, rtol=1e-6)
        return expected

    assert (made(1) != made(2)).all()


def test_symbolic_tensors_outside_a_layer_need_a_bound():
    with pytest.raises(ConfigError, match=r"pass maximum_iterations, .* or call it in a layer's call"):
        ops.while_loop(lambda x: ops.sum(x) > 0, lambda x: x - 1, layers.Input((3,)))


def test_operations_of_a_step_are_counted_once_for_all_values():
    def step(x, n):
        return dict(
            zip("ny", ops.while_loop(lambda n, y: ops.sum(y) < 9, lambda n, y: (n + 1, 2 * y), (n, x)), strict=True)
        )

    (node,) = loops_in(trace(step, INPUTS))
    counts = [value.op.operations(value) for value in node.values]
    within = [tensor for tensor in with_steps(node.values) if tensor.op is not None and not has_body(tensor)]
    assert sum(counts) == sum(tensor.op.operations(tensor) for tensor in within if not tensor.op.is_view) > 0
    assert sum(map(bool, counts)) == 1
