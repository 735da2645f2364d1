"""An op that needs the rows of all ranks gets them, and a rank keeps its own rows of what it computes from them."""

import inspect
import itertools

import numpy as np
import pytest

from dptrain import ops
from dptrain.distribution import all_gather
from dptrain.ops import random
from dptrain.ops.loops import remat
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.mesh import BATCH
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import OPS
from dptrain.random import _OPS
from tests.unit.program.sharding.test_placement import DATA, SHARDS, SPECS, compare, weights
from tests.unit.program.virtual_mesh import VirtualMesh, assert_same_on_mesh
from tests.unit.program.virtual_ranks import assert_rows_are_dims

VARIABLES = weights(v=(4, 4))


def sum_and_gradient(function):
    """Return a step with a function of rows, and the gradient of a weighted sum of it."""

    def step(x, y, sample_weight):
        variable = VARIABLES["v"]
        value = function(x @ variable, y, sample_weight)
        numbers = np.sin(np.arange(int(ops.size(value)))).reshape(value.shape)
        total = ops.sum(ops.tanh(value) * numbers)
        total.backward()
        return {"total": total, "mean": ops.mean(value), "gradient": variable.value.grad}

    return step


def normal(shape):
    return random.normal(shape, seed=3, dtype="float64")


def info_nce(x, y, w):
    a, b = unit(x[:, :2]), unit(x[:, 2:])
    logits = a @ ops.transpose(b) / 0.1
    numbers = ops.arange(ops.shape(x)[0])
    both = [ops.sparse_categorical_crossentropy(numbers, part, from_logits=True) for part in (logits, logits.T)]
    return (both[0] + both[1]) / 2


def simclr(x, y, w):
    """The two views as halves of one batch of 2n rows."""
    n = ops.shape(x)[0]
    z = unit(ops.concatenate([x[:, :2], x[:, 2:]], axis=0))
    logits = z @ ops.transpose(z) * 2 - 1e9 * ops.eye(2 * n, dtype="float64")
    positives = ops.concatenate([ops.arange(n) + n, ops.arange(n)], axis=0)
    return -ops.take_along_axis(ops.log_softmax(logits), ops.expand_dims(positives, 1), axis=1)


def unit(x):
    return x / ops.sqrt(ops.sum(ops.square(x), -1, keepdims=True) + 1e-6)


def distances(x):
    return ops.sum(ops.square(ops.expand_dims(x, 0) - ops.expand_dims(x, 1)), -1)


def triplets(x, y, w):
    """The farthest of the same label and the nearest of another."""
    far = distances(x)
    same = ops.equal(ops.expand_dims(y, 0), ops.expand_dims(y, 1))
    positive = ops.max(ops.where(same, far, 0.0), 1)
    negative = ops.min(ops.where(same, 1e6, far), 1)
    return ops.maximum(positive - negative + 1.0, 0.0)


def supervised_contrastive(x, y, w):
    n, z = ops.shape(x)[0], unit(x)
    itself = ops.eye(n, dtype="float64")
    logits = z @ z.T / 0.5 - 1e9 * itself
    same = ops.cast(ops.equal(ops.reshape(y, (-1, 1)), ops.reshape(y, (1, -1))), "float64") - itself
    return -ops.sum(same * ops.log_softmax(logits), 1) / ops.maximum(ops.sum(same, 1), 1.0)


def barlow_twins(x, y, w):
    a, b = (part - ops.mean(part, 0) for part in (x[:, :2], x[:, 2:]))
    correlation = ops.transpose(a) @ b / ops.shape(x)[0]
    return ops.square(correlation - ops.eye(2, dtype="float64"))


def scanned(step, first, x):
    """Return the last carry of three steps, which have multiples of x as slices."""
    return ops.scan(lambda c, t: (step(c, t), None), first, ops.stack([x, 2 * x, -x]))[0]


def scanned_beside(pairs, x):
    return scanned(lambda c, t: ops.tanh(pairs @ c * 0.1 + t), x, x)


MEETINGS = {
    "gram": lambda x, y, w: ops.matmul(x, ops.transpose(x)),
    "gram of columns": lambda x, y, w: ops.einsum("id,jd->ij", x, x * 2),
    "first three": lambda x, y, w: x[:3],
    "first half": lambda x, y, w: x[: x.shape[0] // 2] - x[x.shape[0] // 2 : 2 * (x.shape[0] // 2)],
    "every second": lambda x, y, w: x[::2],
    "reversed": lambda x, y, w: ops.flip(x, 0) * x,
    "rolled": lambda x, y, w: ops.roll(x, 2, 0) - x,
    "rows before": lambda x, y, w: ops.concatenate([x[-1:], x[:-1]], 0) * x,
    "pairs": lambda x, y, w: ops.ones((x.shape[0], x.shape[0]), "float64") * ops.expand_dims(w, 1) * ops.sum(x),
    "differences": lambda x, y, w: distances(x),
    "sorted": lambda x, y, w: ops.sort(x, 0) * x,
    "order": lambda x, y, w: ops.take(x, ops.argsort(w), 0) * x,
    "backwards": lambda x, y, w: x[::-1] * x + x[::-2][:1],
    "from the end": lambda x, y, w: ops.take(x, [-1, 0, -2], 0),
    "last row": lambda x, y, w: x[-1] * x,
    "several indices": lambda x, y, w: x[ops.argsort(w), y],
    "along the rows": lambda x, y, w: ops.take_along_axis(x, ops.argsort(x, 0), 0) * x,
    "reflected": lambda x, y, w: ops.pad(x, ((2, 1), (0, 0)), mode="reflect"),
    "padded": lambda x, y, w: ops.pad(x, ((2, 1), (0, 0)), constant_values=3.0),
    "shifted": lambda x, y, w: ops.pad(x, ((1, 0), (0, 0)))[:-1] * x,
    "greatest": lambda x, y, w: ops.top_k(ops.transpose(x), 3)[0],
    "cumulative": lambda x, y, w: ops.cumsum(x, 0) * x,
    "numbers": lambda x, y, w: x * ops.expand_dims(ops.cast(ops.arange(ops.shape(x)[0]), "float64"), 1),
    "one-hot numbers": lambda x, y, w: ops.one_hot(ops.arange(x.shape[0]), int(x.shape[0]), dtype="float64") @ x,
    "off the diagonal": lambda x, y, w: (x @ x.T) * (1 - ops.eye(x.shape[0], dtype="float64")),
    "triangle": lambda x, y, w: ops.tril(x @ x.T) @ x,
    "attention": lambda x, y, w: ops.softmax(x @ x.T) @ x,
    "tiled": lambda x, y, w: ops.tile(ops.ones((1, 2, 3), "float64"), [ops.shape(x)[0], 1, 1]) * x[:, :1, None],
    "tiled token": lambda x, y, w: ops.tile(ops.sum(x, 0, keepdims=True), [x.shape[0], 2]) * ops.tile(x, [1, 2]),
    "repeated token": lambda x, y, w: ops.repeat(ops.sum(x, 0, keepdims=True), ops.shape(x)[0], axis=0) * x,
    "repeated beside joined": lambda x, y, w: ops.repeat(x, 2, axis=0) * ops.concatenate([x, x * 2], 0),
    "draws beside joined": lambda x, y, w: ops.concatenate([x, x * 2], 0) * normal((2 * x.shape[0], 4)),
    "draws of pairs": lambda x, y, w: (x @ x.T) * normal((x.shape[0], x.shape[0])),
    "two rows as one": lambda x, y, w: ops.reshape(ops.concatenate([x, x * 2], 0), (-1, 8)) * ops.tile(x, [1, 2]),
    "half of repeated": lambda x, y, w: ops.repeat(x, 2, axis=0)[: x.shape[0]] * x,
    "views as axis": lambda x, y, w: ops.reshape(ops.concatenate([x, x * 2], 0), (2, *x.shape))[1] * x,
    "outer product": lambda x, y, w: ops.outer(w, w) @ x,
    "no rows": lambda x, y, w: ops.concatenate([x[:0], x, (x @ x.T)[:0] @ x], 0),
    "gathered by hand": lambda x, y, w: ops.softmax(x @ all_gather(x).T) @ x + ops.mean(all_gather(x), 0),
    "median": lambda x, y, w: x - ops.median(x, 0),
    "integers": lambda x, y, w: ops.cast(ops.equal(ops.expand_dims(y, 0), ops.expand_dims(y, 1)), "float64") @ x,
    "whole, then rows": lambda x, y, w: ops.mean(x @ x.T, 0) * ops.sum(x, 1),
    "attention in each step": lambda x, y, w: scanned(lambda c, t: ops.tanh(ops.softmax(c @ c.T) @ c + t), x, x),
    "captured pairs": lambda x, y, w: scanned_beside(x @ x.T, x),
    "captured rows of all": lambda x, y, w: scanned(lambda c, t: ops.tanh(ops.softmax(c @ x.T) @ x + t), x, x),
    "a carry of pairs": lambda x, y, w: scanned(lambda c, t: ops.tanh(c * 0.5 + t @ t.T), x @ x.T, x),
    "a carry of zero pairs": lambda x, y, w: scanned(lambda c, t: c * 0.5 + t @ t.T, ops.zeros_like(x @ x.T), x),
    "a carry of all rows": lambda x, y, w: scanned(lambda c, t: ops.tanh(c + t[::-1]), x[:], x),
    "a flipped carry": lambda x, y, w: scanned(lambda c, t: ops.tanh(c[::-1] + t), ops.zeros_like(x), x),
    "a carry of numbers": lambda x, y, w: scanned(
        lambda c, t: c + ops.sum(t @ t.T, 0), ops.zeros((int(x.shape[0]),), "float64"), x
    ),
    "counted steps": lambda x, y, w: ops.fori_loop(0, 3, lambda i, c: ops.tanh(ops.softmax(c @ c.T) @ c), x),
    "a branch": lambda x, y, w: ops.cond(ops.sum(x) > 0, lambda: ops.softmax(x @ x.T) @ x, lambda: x[::-1] * 2),
    "a branch that is not taken": lambda x, y, w: ops.cond(ops.sum(w) < 0, lambda: x @ x.T, lambda: x @ (2 * x.T)),
    "recomputed": lambda x, y, w: remat(lambda x: ops.softmax(x @ x.T) @ x)(x),
    "InfoNCE": info_nce,
    "SimCLR": simclr,
    "triplets": triplets,
    "SupCon": supervised_contrastive,
    "Barlow twins": barlow_twins,
}


@pytest.mark.parametrize("name", MEETINGS)
def test_what_needs_the_rows_of_all_ranks_gets_them(name):
    step = sum_and_gradient(MEETINGS[name])
    for shards in SHARDS:
        _, placed = compare(step, VARIABLES, shards)
        assert_rows_are_dims(placed)
    program = trace(step, SPECS)
    on_mesh = assert_same_on_mesh(program, DATA, {VARIABLES["v"]: (BATCH, "model")}, VirtualMesh([7, 0, 4], model=2))
    assert_rows_are_dims(on_mesh)


@pytest.mark.parametrize("name", MEETINGS)
def test_a_rank_without_others_gathers_nothing(name):
    program = trace(sum_and_gradient(MEETINGS[name]), SPECS)
    placed = place(program, alone=True)
    assert_rows_are_dims(placed)
    scattered, scattered_before = (
        sum(tensor.op is OPS["add_rows"] for tensor in tensors) for tensors in (placed.tensors, program.tensors)
    )
    assert scattered == scattered_before
    (expected, _), (outputs, _) = evaluate(program, DATA), evaluate(placed, DATA)
    for key, value in outputs.items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-13, atol=1e-14, err_msg=key)


# Draws of 2n rows, by name; the others need no shape.
DRAWS = {
    "beta": lambda shape, **options: random.beta(shape, 2.0, 3.0, **options),
    "binomial": lambda shape, **options: random.binomial(shape, 5, 0.4, **options),
    "gamma": lambda shape, **options: random.gamma(shape, 2.0, **options),
    "normal": random.normal,
    "randint": lambda shape, **options: random.randint(shape, 0, 9, **options | {"dtype": "int32"}),
    "truncated_normal": random.truncated_normal,
    "uniform": random.uniform,
    "dropout": lambda shape, seed, dtype: random.dropout(ops.ones(shape, dtype), 0.5, seed=seed),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_beside_other_rows_are_those_of_one_rank(name):
    """Of the 2n rows of a draw a rank has its part as a whole, of joined ones its part of each half."""

    generator = random.SeedGenerator(3)

    def drawn(x):
        return ops.cast(DRAWS[name]((2 * x.shape[0], 4), seed=generator, dtype="float64"), "float64")

    for function in (
        lambda x, y, w: ops.concatenate([x, x * 2], 0) * drawn(x),
        lambda x, y, w: drawn(x) + ops.repeat(x, 2, axis=0) * ops.concatenate([x, x * 2], 0),
        lambda x, y, w: ops.where(drawn(x) > 0.5, ops.concatenate([x, x * 2], 0), 0.0),
    ):
        for shards in SHARDS:
            compare(sum_and_gradient(function), VARIABLES | {"draws": generator.count}, shards)


def test_every_draw_of_a_shape_is_tried():
    names = [name for name in _OPS if inspect.isfunction(getattr(random, name))]
    assert {name for name in names if "shape" in inspect.signature(getattr(random, name)).parameters} <= DRAWS.keys()


# What needs all of an axis, and keeps its length.
ALONG = {
    "cumulative": ops.cumsum,
    "reversed": ops.flip,
    "rolled": lambda x, axis: ops.roll(x, 2, axis),
    "sorted": ops.sort,
    "normalized": ops.softmax,
    "greatest": lambda x, axis: x - ops.max(x, axis, keepdims=True),
    "the first": lambda x, axis: x - ops.take(x, [0], axis),
}


@pytest.mark.parametrize("name", ALONG)
def test_rows_are_gathered_along_any_axis(name):
    """The rows, and all pairs of rows, as each axis of a tensor of three, that no op hands through as it is."""

    def step(x, y, sample_weight):
        variable = VARIABLES["v"]
        wide, values = x @ variable, []
        cubes = [ops.reshape(wide, (-1, 2, 2)), ops.expand_dims(wide, 1) * ops.expand_dims(wide, 0)]
        for cube, order in itertools.product(cubes, itertools.permutations(range(3))):
            turned = ops.tanh(ops.transpose(cube, order))
            for axis in range(3):
                back = ops.transpose(ALONG[name](turned, axis=axis), np.argsort(order))
                values.append(ops.mean(ops.cos(back) * ops.sin(cube * (axis + 1))))
        total = ops.mean(ops.stack(values) * np.linspace(0.5, 1, len(values)))
        total.backward()
        return {"total": total, "gradient": variable.value.grad} | {str(n): value for n, value in enumerate(values)}

    compare(step, VARIABLES, [4, 0, 7])


# Means, weighted in three ways: how numerators, and then denominators, come together.
MEANS = {
    "a quotient of sums": lambda x, w: ops.sum(x) / ops.sum(w),
    "a sum of quotients": lambda x, w: ops.sum(x / ops.sum(w)),
    "a safe quotient": lambda x, w: ops.divide_no_nan(ops.sum(x), ops.sum(w)),
    "a sum of safe quotients": lambda x, w: ops.sum(ops.divide_no_nan(x, ops.sum(w))),
}


@pytest.mark.parametrize("second", MEANS)
@pytest.mark.parametrize("first", MEANS)
def test_each_mean_has_its_own_denominator(first, second):
    def step(x, y, sample_weight):
        variable = VARIABLES["v"]
        values = ops.sum(ops.square(x @ variable), 1)
        weights = [sample_weight, sample_weight * sample_weight + 1, ops.cast(y, "float64") + 1]
        means = {
            f"{one} {other}": MEANS[first](values * one, weights[one]) + 3 * MEANS[second](values, weights[other])
            for one, other in itertools.product(range(3), repeat=2)
        }
        total = ops.mean(ops.stack(list(means.values())) * np.linspace(0.5, 1, 9))
        total.backward()
        return means | {"total": total, "gradient": variable.value.grad}

    compare(step, VARIABLES, [4, 0, 7])
