"""Loops of unknown length on the CUDA backend, whose condition the host reads: beside NumPy in float64."""

import numpy as np
import pytest

from dptrain import ops, random
from dptrain.backend.cuda.compose import Composition
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable

X = np.linspace(-1, 2, 6).reshape(3, 2)


def doubled(x, n):
    i, y = ops.while_loop(lambda i, y: ops.sum(y) < 20, lambda i, y: (i + 1, 2 * y), (0, x))
    return {"i": i, "y": y}


def counted(x, n):
    """Carries change places; one is unread."""
    _, a, b, _ = ops.while_loop(
        lambda i, a, b, _: i < n, lambda i, a, b, c: (i + 1, b, a + ops.sum(a), c * 2), (0, x, -x, x)
    )
    return {"a": a, "b": b}


def nested(x, n):
    def outer(carry, part):
        inner = ops.fori_loop(0, n, lambda i, a: a * 0.5 + part, carry)
        grown = ops.while_loop(lambda a: ops.sum(a * a) < 9, lambda a: a * 1.5 + 0.5, inner)
        return grown, grown

    last, every = ops.scan(outer, x[0], x)
    return {"last": last, "all": every, "around": ops.fori_loop(0, n, lambda i, a: ops.scan(outer, a, x)[0], x[0])}


def products(x, n):
    w = ops.reshape(x[:2], (2, 2))
    return {
        "y": ops.fori_loop(0, n, lambda i, a: ops.tanh(a @ w + x), x),
        "sum": ops.fori_loop(0, n, lambda i, a: a @ w, w),
    }


def of_several_launches(x, n):
    """Two loops, whose steps are graphs of their own."""
    w = ops.reshape(x[:2], (2, 2))

    def steps(function):
        return ops.fori_loop(0, n, lambda i, a: function(function(a @ w) @ w) @ w + x, x)

    return {"sin": steps(ops.sin), "tanh": steps(ops.tanh)}


def on_the_host(x, n):
    eye = ops.eye(2, dtype=x.dtype)
    return {"y": ops.fori_loop(0, n, lambda i, a: ops.linalg.inv(a + eye) + ops.cast(i, a.dtype), eye)}


def branches(x, n):
    """The loop of the branch that is not taken would never end."""

    def loop():
        return ops.while_loop(lambda i, a: i < 3, lambda i, a: (i + n - 1, a + x), (0, x))[1]

    return {"y": ops.cond(n > 1, loop, lambda: x - 1)}


LOOPS = (doubled, counted, nested, products, of_several_launches, on_the_host, branches)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("function", LOOPS, ids=lambda function: function.__name__)
def test_a_loop_computes_what_numpy_does(cuda_backend, monkeypatch, function, graph):
    monkeypatch.setattr(cuda_backend, "graph", graph)
    program = trace(function, {"x": ((3, 2), np.float32), "n": ((), np.int32)})
    exact = trace(function, {"x": ((3, 2), np.float64), "n": ((), np.int32)})
    n = np.array(0, np.int32)
    n_on_device = cuda_backend.upload(np.array(0, np.int32))
    executable = cuda_backend.executable(program, {"x": X.astype(np.float32), "n": n_on_device})
    assert executable.pack_key is None
    for times in (2, 0, 1, 5, 2):
        cuda_backend.write(n_on_device, np.array(times, np.int32))
        executable.run()
        expected = evaluate(exact, {"x": X, "n": n + times})[0]
        for name, value in expected.items():
            np.testing.assert_allclose(executable.outputs[name], value, rtol=2e-4, atol=1e-5, err_msg=f"{name} {times}")


def test_variables_and_random_numbers_over_several_steps(cuda_backend):
    def made():
        total, seeds = Variable(np.zeros((), np.float32), "total", trainable=False), random.SeedGenerator(3)

        def step(x):
            def body(i, drawn):
                total.assign_add(1)
                return i + 1, drawn + random.uniform((4,), seed=seeds)

            _, drawn = ops.while_loop(
                lambda i, _: ops.cast(i, "float32") < ops.sum(x) + total * 0.25, body, (0, ops.zeros(4))
            )
            return {"drawn": drawn, "total": total + 0}

        return trace(step, {"x": ((2,), np.float32)}), total

    x = np.array([1, 1.5], np.float32)
    (program, total), (other, _) = made(), made()
    executable = cuda_backend.executable(program, {"x": x})
    executable.run([0, 0, 0])
    state = {}
    for _ in range(3):
        outputs, updates = evaluate(other, {"x": x}, state)
        state |= updates
    np.testing.assert_allclose(executable.outputs["drawn"], outputs["drawn"], rtol=1e-6)
    assert total.numpy() == outputs["total"] > 9


ROWS = {"x": ((Dim.rows(4), 2), np.float32)}


def test_what_a_gpu_cannot_do_is_refused_before_it_starts():
    def communicating(x):
        return {"y": ops.while_loop(lambda y: ops.sum(y * y) < 9, lambda y: y * 2, x)}

    def in_a_branch(x):
        def loops(carry, part):
            return ops.while_loop(lambda a: ops.sum(a) < 9, lambda a: a + part, carry), None

        steps = ops.reshape(ops.arange(4.0), (4, 1))
        return {
            "y": ops.cond(ops.sum(steps) > ops.sum(x), lambda: ops.scan(loops, steps[0], steps)[0], lambda: steps[1])
        }

    with pytest.raises(ConfigError, match="in which ranks communicate, on a GPU; pass maximum_iterations"):
        Composition(place(trace(communicating, ROWS)), 2, 0, alone=False)
    Composition(place(trace(communicating, ROWS)))
    with pytest.raises(ConfigError, match="in a loop in a branch, on a GPU; pass maximum_iterations"):
        Composition(trace(in_a_branch, {"x": ((4,), np.float32)}))
