"""Functions made of other ops, against NumPy's; and gradients through them."""

import numpy as np
import pytest

from dptrain import GradientTape, ops
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable, differentiable
from tests.unit.program.virtual_ranks import run_on_ranks

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 3, 4)), RNG.normal(size=(6, 4, 2))
M, FLAGS = RNG.normal(size=(6, 4)), RNG.random((6, 4)) < 0.3
NAN = np.where(FLAGS, np.nan, M)

CUBE = np.random.default_rng(2).normal(size=(4, 4, 4))

# What is computed, and what NumPy says.
CASES = {
    "abs": (lambda: ops.abs(M), np.abs(M)),
    "all": (lambda: ops.all(FLAGS, 1), FLAGS.all(1)),
    "any": (lambda: ops.any(FLAGS, axis=0, keepdims=True), FLAGS.any(0, keepdims=True)),
    "arange": (lambda: ops.arange(2, 9, 3), np.arange(2, 9, 3)),
    "arange to": (lambda: ops.arange(1.5), np.arange(1.5)),
    "argmax": (lambda: ops.argmax(M), M.argmax()),
    "argmax along": (lambda: ops.argmax(X, 1, keepdims=True), X.argmax(1, keepdims=True)),
    "argmin": (lambda: ops.argmin(M, axis=0), M.argmin(0)),
    "average": (lambda: ops.average(M, 0, weights=M * M), np.average(M, 0, M * M)),
    "average of all": (lambda: ops.average(M), M.mean()),
    "ceil": (lambda: ops.ceil(M), np.ceil(M)),
    "concatenate": (lambda: ops.concatenate([M, M]), np.concatenate([M, M])),
    "count_nonzero": (lambda: ops.count_nonzero(FLAGS, 1), np.count_nonzero(FLAGS, 1)),
    "cumsum": (lambda: ops.cumsum(X, 1), X.cumsum(1)),
    "cumsum of all": (lambda: ops.cumsum(M), M.cumsum()),
    "dot": (lambda: ops.dot(M, M.T), M @ M.T),
    "dot of vectors": (lambda: ops.dot(M[0], M[1]), M[0] @ M[1]),
    "dot of many": (lambda: ops.dot(X, Y), np.dot(X, Y)),
    "eye": (lambda: ops.eye(3, 4, 1), np.eye(3, 4, 1)),
    "expand_dims": (lambda: ops.expand_dims(M, (0, -1)), np.expand_dims(M, (0, -1))),
    "flip": (lambda: ops.flip(X, (0, 2)), np.flip(X, (0, 2))),
    "floor": (lambda: ops.floor(M), np.floor(M)),
    "full": (lambda: ops.full((2, 3), 4), np.full((2, 3), 4)),
    "full of a row": (lambda: ops.full((2, 4), M[0]), np.full((2, 4), M[0])),
    "full_like": (lambda: ops.full_like(M, 7), np.full_like(M, 7)),
    "hstack": (lambda: ops.hstack([M, M]), np.hstack([M, M])),
    "hstack of vectors": (lambda: ops.hstack([M[0], M[1]]), np.hstack([M[0], M[1]])),
    "identity": (lambda: ops.identity(3), np.identity(3)),
    "isfinite": (lambda: ops.isfinite(np.array([1, np.inf, np.nan])), [True, False, False]),
    "isinf": (lambda: ops.isinf(np.array([1, np.inf, -np.inf, np.nan])), [False, True, True, False]),
    "isnan": (lambda: ops.isnan(NAN), np.isnan(NAN)),
    "isclose": (lambda: ops.isclose([1.0, 2.0, 0.0], [1.0, 2.1, 1e-9]), [True, False, True]),
    "linspace of vectors": (lambda: ops.linspace([0, 1], [2, 3], 4, axis=-1), np.linspace([0, 1], [2, 3], 4, axis=-1)),
    "linspace": (lambda: ops.linspace(0, 1, 5), np.linspace(0, 1, 5)),
    "log10": (lambda: ops.log10(M * M), np.log10(M * M)),
    "log2": (lambda: ops.log2(M * M), np.log2(M * M)),
    "logaddexp": (lambda: ops.logaddexp(M * 1000, M[0]), np.logaddexp(M * 1000, M[0])),
    "logical_xor": (lambda: ops.logical_xor(FLAGS, FLAGS[0]), np.logical_xor(FLAGS, FLAGS[0])),
    "mod": (lambda: ops.mod(M, 0.3), np.mod(M, 0.3)),
    "moveaxis": (lambda: ops.moveaxis(X, 0, -1), np.moveaxis(X, 0, -1)),
    "moveaxis of several": (lambda: ops.moveaxis(X, [0, 1], (-1, 0)), np.moveaxis(X, [0, 1], (-1, 0))),
    "nan_to_num": (lambda: ops.nan_to_num(NAN), np.nan_to_num(NAN)),
    "one_hot": (lambda: ops.one_hot([0, 2], 3, axis=0), np.eye(3)[[0, 2]].T),
    "outer": (lambda: ops.outer(M[0], M[1]), np.outer(M[0], M[1])),
    "prod": (lambda: ops.prod(X, (0, 2)), X.prod((0, 2))),
    "prod kept": (lambda: ops.prod(M, 0, keepdims=True), M.prod(0, keepdims=True)),
    "prod of all": (lambda: ops.prod(ops.shape(X)), 72),
    "prod of nothing": (lambda: ops.prod(np.ones((3, 0)), 1), np.ones(3)),
    "ravel": (lambda: ops.ravel(X), X.ravel()),
    "reciprocal": (lambda: ops.reciprocal(M), 1 / M),
    "repeat": (lambda: ops.repeat(X, 3, axis=1), np.repeat(X, 3, 1)),
    "repeat all": (lambda: ops.repeat(M, 2), np.repeat(M, 2)),
    "repeat each": (lambda: ops.repeat(X, [1, 0, 2], axis=1), np.repeat(X, [1, 0, 2], 1)),
    "repeat once for all": (lambda: ops.repeat(X, [2], axis=-1), np.repeat(X, 2, -1)),
    "reshape to a vector": (lambda: ops.reshape(X, -1), X.reshape(-1)),
    "round": (lambda: ops.round(M * 2), np.round(M * 2)),
    "round to": (lambda: ops.round(M, 2), np.round(M, 2)),
    "rsqrt": (lambda: ops.rsqrt(M * M), 1 / np.abs(M)),
    "swapaxes": (lambda: ops.swapaxes(X, 0, -1), X.swapaxes(0, -1)),
    "take": (lambda: ops.take(X, [[0, -1]], 1), np.take(X, [[0, -1]], 1)),
    "take of all": (lambda: ops.take(X, [-1, 3]), np.take(X, [-1, 3])),
    "tan": (lambda: ops.tan(M), np.tan(M)),
    "tensordot": (lambda: ops.tensordot(X, Y, [[0, 2], [0, 1]]), np.tensordot(X, Y, [[0, 2], [0, 1]])),
    "tensordot 1": (lambda: ops.tensordot(X, M.T, 1), np.tensordot(X, M.T, 1)),
    "tile": (lambda: ops.tile(M, (2, 1, 3)), np.tile(M, (2, 1, 3))),
    "tile once": (lambda: ops.tile(X, 2), np.tile(X, 2)),
    "tri": (lambda: ops.tri(3, 4, 1), np.tri(3, 4, 1)),
    "tril": (lambda: ops.tril(X, 1), np.tril(X, 1)),
    "triu": (lambda: ops.triu(X, -1), np.triu(X, -1)),
    "vdot": (lambda: ops.vdot(X, X), np.vdot(X, X)),
    "vstack": (lambda: ops.vstack([M[0], M[1]]), np.vstack([M[0], M[1]])),
    "where alone": (lambda: ops.where(FLAGS)[1], np.where(FLAGS)[1]),
    "zeros_like": (lambda: ops.zeros_like(M, "int32"), np.zeros_like(M)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_numpys(case):
    compute, expected = CASES[case]
    actual = compute()
    assert actual.shape == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "arrays"),
    [
        ("bij,bjk->bik", (X, Y)),
        ("bij,bjk->kb", (X, Y)),
        ("bij,bj->ib", (X, M)),
        ("ij,kj", (M, M)),
        ("bij,c->bc", (X, M[0])),
        ("bij,bij->", (X, X)),
        ("i,i->", (M[0], M[1])),
        ("bij -> jb", (X,)),
        ("bij", (X,)),
        ("ii", (M[:4],)),
        ("ii->i", (M[:4],)),
        ("bii->bi", (CUBE,)),
        ("iji->ji", (CUBE,)),
        ("iii", (CUBE,)),
        ("...ii->...i", (CUBE,)),
        ("bii,bj->jb", (CUBE, M[:4])),
        ("ij,kk->ij", (M, M[:4])),
        ("bij,bjk,bk->bi", (X, Y, M[:, :2])),
        ("ij,jk,kl,lm->im", (M[:4], M[:4], M[:4], M[:4])),
        ("i,j,k->kij", (M[0], M[1], M[2])),
        ("ii,i,i", (M[:4], M[0], M[1])),
    ],
)
def test_einsum(words, arrays):
    expected = np.einsum(words, *arrays)
    np.testing.assert_allclose(ops.einsum(words, *arrays), expected, rtol=1e-12, atol=1e-12)
    source, weights = differentiable(arrays[0]), np.random.default_rng(1).normal(size=expected.shape)
    (gradient,) = gradients(ops.einsum(words, source, *arrays[1:]), [source], weights)
    direction = RNG.normal(size=arrays[0].shape)
    slope = np.sum(np.einsum(words, direction, *arrays[1:]) * weights)  # it is linear
    np.testing.assert_allclose(np.sum(gradient.numpy() * direction), slope, rtol=1e-10)


def test_parts():
    for actual, expected in (
        (ops.split(X, 3), np.split(X, 3)),
        (ops.split(X, [1, 3], axis=-1), np.split(X, [1, 3], axis=-1)),
        (ops.unstack(X, axis=1), list(X.swapaxes(0, 1))),
        (ops.unstack(X, 6), list(X)),
    ):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_conversions():
    w = Variable(M, "w")
    assert (ops.shape(w), ops.ndim(X), ops.size([[1, 2]]), ops.shape([1, 2])) == ((6, 4), 3, 2, (2,))
    assert ops.convert_to_tensor([1.0, 2.0]).dtype == np.float32
    assert ops.convert_to_tensor([1, 2], "float64").dtype == np.float64
    np.testing.assert_array_equal(ops.convert_to_numpy(w), M)
    assert np.sum(ops.arange(4)) == 6  # NumPy takes tensors, but leaves operators to them
    assert type(M + ops.ravel(w)[0]) is type(ops.ravel(w))


@pytest.mark.parametrize("shards", [[6], [2, 4], [0, 5, 1]], ids=str)
def test_rows_stay_rows(shards):
    """They can be repeated, split and transposed on ranks; a loss of them has the gradients of one rank."""
    w = Variable(RNG.normal(size=(4, 3)), "w")

    def step(x):
        first, second = ops.split(ops.tile(x @ w, (2, 1)), 2)
        mixed = ops.einsum("bi,bj->ijb", first, second)
        loss = ops.norm(ops.cumsum(ops.moveaxis(mixed, -1, 0), 1)) + ops.cast(ops.any(x > 1), x.dtype)
        loss.backward()
        return {"loss": loss, "gradient": w.value.grad, "finite": ops.all(ops.isfinite(ops.repeat(x, 3, 0)))}

    program = trace(step, {"x": ((Dim.rows(6), 4), np.float64)})
    all_rows, _ = evaluate(program, {"x": M})
    for outputs, _ in run_on_ranks(place(program), {"x": M}, shards, {"x": 0})[0]:
        for name, value in all_rows.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ops.einsum("i->ii", M[0]), "not supported: einsum"),
        (lambda: ops.einsum("ii->i", M), "letter 'i' has the lengths 6 and 4 in one operand"),
        (lambda: ops.einsum("ij,jk->ik", X, Y), r"not supported: einsum\('ij,jk->ik'\) of shapes \(6, 3, 4\)"),
        (lambda: ops.where(FLAGS, 1.0), "expected both x1 and x2, or neither"),
        (lambda: ops.take(M, [6], 0), "index 6 is out of range for a length of 6"),
        (lambda: ops.take(M, [0.5]), "take: indices of float32; expected integers"),
        (lambda: ops.unstack(X, 2), r"num=2, but axis 0 of shape \(6, 3, 4\) has length 6"),
        (lambda: ops.repeat(M, [1, 2], 0), r"repeats=\[1, 2\] for a length of 6"),
        (lambda: ops.moveaxis(X, [0, 1], 0), "expected one destination for each source"),
        (lambda: ops.convert_to_tensor(M, sparse=True), "not supported: sparse"),
        (lambda: ops.split(M, 4), "a length of 6 cannot be split into 4 equal parts"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_number_is_an_index_whatever_type_the_tensor_has():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(ops.take(a, 1, axis=1), a[:, 1])


def test_the_operator_of_products_takes_vectors():
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)
    x, y = ops.convert_to_tensor(a), ops.convert_to_tensor(b)
    np.testing.assert_array_equal(x @ y, a @ b)
    np.testing.assert_array_equal(b @ ops.transpose(x), b @ a.T)


# Python numbers that single precision, half precision or their number type would round.
UNROUNDED = [0.1, 16777217.0, 2**24 + 1, 1e-300, [0.1, -0.2], [[0.1], [3]], (16777217.0, 1)]


@pytest.mark.parametrize("value", UNROUNDED, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32", "int64"])
def test_python_numbers_are_rounded_once(value, dtype):
    if dtype == "float16":
        value = 1e-9 + 0.1
    expected = np.asarray(value, np.float64).astype(dtype)
    for convert in (ops.convert_to_tensor, ops.array, ops.cast):
        tensor = convert(value, dtype=dtype)
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor, expected, strict=True)
    variable = Variable(np.zeros(expected.shape, dtype))
    variable.assign(value)
    np.testing.assert_array_equal(variable, expected)
    if dtype != "int32" and dtype != "int64":  # where a sum has the numbers' own type
        variable.assign_sub(value)
        np.testing.assert_array_equal(variable, np.zeros_like(expected))
        variable.assign_add(value)
        np.testing.assert_array_equal(variable, expected)


def test_tensors_within_lists_keep_their_type():
    single = ops.convert_to_tensor([ops.convert_to_tensor(0.1), ops.convert_to_tensor(0.2)], dtype="float64")
    np.testing.assert_array_equal(single, np.array([0.1, 0.2], np.float32).astype("float64"))
    assert ops.convert_to_tensor([0.1]).dtype == ops.convert_to_tensor(0.1).dtype == "float32"
    with GradientTape() as tape:
        x = ops.convert_to_tensor(2.0)
        tape.watch(x)
        y = ops.cast(x, "float64") * 3
    assert float(tape.gradient(y, x)) == 3
