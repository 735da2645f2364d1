"""Whole programs on the CUDA backend: state, fusion, launches, and random ones, against NumPy."""

import os

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.evaluate import evaluate
from dptrain.program.program import trace
from dptrain.program.shapes import Rows
from dptrain.program.tensor import Variable

B, F = 6, 5
# Random programs; more of them by DPTRAIN_PROGRAMS.
SEEDS = int(os.environ.get("DPTRAIN_PROGRAMS", "6"))


def both(cuda_backend, program, values, steps=1, rows=None, first_row=0):
    """Return outputs and state after some steps, by the executable and by NumPy."""
    state = {variable: variable.numpy() for variable in program.state}
    executable = cuda_backend.executable(program, values, rows=rows, first_row=first_row)
    expected = {}
    for _ in range(steps):
        expected, new = evaluate(program, values, state, rows=rows, first_row=first_row)
        state |= new
    executable.run([0] * steps)
    found = {name: executable.outputs[name] for name in program.outputs}
    return executable, found, {name: expected[name] for name in found}, state


def check(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=str(name))


def check_state(state, tolerance=1e-5):
    for variable, value in state.items():
        np.testing.assert_allclose(variable.numpy(), value, rtol=tolerance, atol=tolerance, err_msg=variable.path)


class Wild:
    """Draws a random step: ops on what there is already, on batches, matrices, vectors and numbers."""

    def __init__(self, seed, length):
        self.rng, self.length = np.random.default_rng(seed), length
        rng = self.rng
        shapes = [(F,), (F, F), (), (1, F)]
        self.state = [
            Variable(rng.normal(size=shapes[n % 4]).astype(np.float32), f"w{n}", trainable=False) for n in range(8)
        ]

    def pick(self, pool, *ranks):
        fitting = [one for one in pool if not ranks or one.ndim in ranks]
        return fitting[self.rng.integers(len(fitting))]

    def tame(self, x):
        """Keep numbers small, whatever comes."""
        return ops.tanh(x) if self.rng.random() < 0.5 else x / (1 + ops.absolute(x))

    def draw(self, pool):
        rng, kind = self.rng, self.rng.integers(13)
        x = self.pick(pool)
        if kind <= 2:
            y = self.pick(pool)
            known = [one for one in (x.shape, y.shape) if len(one)]
            if len(known) == 2 and any(
                a != b and 1 not in (a, b) for a, b in zip(x.shape[::-1], y.shape[::-1], strict=False)
            ):
                y = ops.sum(y)
            return [x + y, x * y, ops.maximum(x, y), ops.where(x > y, x, y), x - y][rng.integers(5)]
        if kind == 3:
            return [ops.exp(-ops.absolute(x)), ops.relu(x), ops.sqrt(1 + x * x), ops.sigmoid(x)][rng.integers(4)]
        if kind <= 6 and x.ndim:
            axes = [axis for axis in range(x.ndim) if rng.random() < 0.5] or [int(rng.integers(x.ndim))]
            reduce = ops.sum if rng.random() < 0.7 else ops.max
            return reduce(x, tuple(axes), keepdims=bool(rng.random() < 0.5))
        if kind == 7 and x.ndim:
            return ops.softmax(x, axis=int(rng.integers(x.ndim)))
        if kind == 8 and x.ndim == 2:
            weights = self.pick(pool, 2)
            if weights.shape[0] == x.shape[1] and not isinstance(weights.shape[0], Rows):
                return x @ weights
            return ops.transpose(x) @ x if rng.random() < 0.5 else ops.transpose(x)
        if kind == 9 and x.ndim:
            return ops.concatenate([x, 2 * x], -1)[..., : x.shape[-1]] if x.ndim > 1 else x
        if kind == 10 and x.ndim == 2:
            return ops.cast(ops.argmax(x, -1), "float32")
        if kind == 11 and x.ndim:
            return ops.reshape(x, (1, *x.shape)) if rng.random() < 0.5 and x.ndim < 3 else ops.expand_dims(x, -1)
        if kind == 12 and x.ndim == 2 and x.shape[-1] > 1:
            return x[:, 1:3]
        return ops.cast(ops.cast(x, "float64") * 0.5, "float32")

    def step(self, x, y, labels):
        pool = [x, y, ops.one_hot(labels, F), *(one.value for one in self.state)]
        for _ in range(self.length):
            made = self.draw(pool)
            if made.ndim <= 3 and int(np.prod(made.shape)) <= 400:
                pool.append(self.tame(made))
        for one in self.state:
            fitting = [made for made in pool if made.shape == one.shape and made.dtype == one.dtype]
            one.assign(self.tame(fitting[self.rng.integers(len(fitting))] + 0.5))
        chosen = self.rng.permutation(len(pool))[:8]
        return {f"out{n}": pool[n] for n in chosen}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_programs(cuda_backend, seed):
    wild = Wild(seed, 40)
    specs = {"x": ((Rows(B), F), "float32"), "y": ((F, F), "float32"), "labels": ((Rows(B),), "int64")}
    program = trace(wild.step, specs)
    rng = np.random.default_rng(seed)
    values = {"x": rng.normal(size=(B, F)).astype(np.float32), "y": rng.normal(size=(F, F)).astype(np.float32)}
    values["labels"] = rng.integers(0, F, B)
    _, found, expected, state = both(cuda_backend, program, values, steps=3)
    check(found, expected, 1e-4)
    check_state(state, 1e-4)
