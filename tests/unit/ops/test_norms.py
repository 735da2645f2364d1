"""Norms of vectors and matrices, against NumPy's."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.execute import evaluate
from dptrain.program.program import trace

RNG = np.random.default_rng(0)
X, M = RNG.normal(size=(2, 3, 4)), RNG.normal(size=(3, 4))


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("ord", [None, "fro", 1, -1, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [(0, 1), (-1, 0), (2, 1)])
def test_of_matrices(ord, axis, keepdims):
    expected = np.linalg.norm(X, ord, axis, keepdims)
    np.testing.assert_allclose(ops.norm(X, ord, axis, keepdims), expected, rtol=1e-12)
    assert ops.norm(X, ord, axis, keepdims).shape == expected.shape


@pytest.mark.parametrize("ord", [None, 1, 2, 3, 2.5, -1, 0, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [0, -1, (1,)])
def test_of_vectors(ord, axis):
    np.testing.assert_allclose(ops.norm(X, ord, axis), np.linalg.norm(X, ord, axis), rtol=1e-12)
    np.testing.assert_allclose(ops.norm(M[0], ord), np.linalg.norm(M[0], ord), rtol=1e-12)


def test_a_matrix_without_an_axis():
    for ord in (None, "fro", 1, -1, np.inf, -np.inf):
        np.testing.assert_allclose(ops.norm(M, ord), np.linalg.norm(M, ord), rtol=1e-12)
    np.testing.assert_allclose(ops.norm(X), np.linalg.norm(X), rtol=1e-12)


def test_of_integers():
    norm = ops.norm(np.array([[3, -4], [0, 1]]), 1)
    assert (norm.dtype, float(norm)) == (np.float32, 5)
    assert float(ops.norm(np.array([200, 100], np.uint8), 1)) == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((M, 3), "ord=3; expected None, 'fro', 'nuc', 1"),
        ((M, "fro", 0), "ord='fro'; expected None or a number for vectors"),
        ((X, 1), "ord=1 over 3 axes; expected one axis or two"),
        ((M, 1, (0, 0)), "expected different axes"),
    ],
)
def test_what_there_is_not(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ops.norm(*arguments)


def test_normalize():
    np.testing.assert_allclose(ops.normalize(M), M / np.linalg.norm(M, axis=-1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(ops.normalize(M, 0, 1), M / np.abs(M).sum(0), rtol=1e-12)
    np.testing.assert_allclose(ops.normalize(M, -1, 3), M / np.linalg.norm(M, 3, -1, keepdims=True), rtol=1e-12)
    expected = X / np.linalg.norm(X, 1, (1, 2), keepdims=True)
    np.testing.assert_allclose(ops.normalize(X, (1, 2), 1), expected, rtol=1e-12)
    np.testing.assert_array_equal(ops.normalize(np.zeros(3)), np.zeros(3))
    np.testing.assert_array_equal(ops.normalize(-2.0), [-1])
    with pytest.raises(ConfigError, match="`order` must be an int >= 1"):
        ops.normalize(M, order=0)


@pytest.mark.parametrize("ord", [2, -2, "nuc"])
@pytest.mark.parametrize("keepdims", [False, True])
def test_norms_of_singular_values(ord, keepdims):
    x = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    norm = ops.norm(x, ord, (0, 2), keepdims)
    np.testing.assert_allclose(norm.numpy(), np.linalg.norm(x, ord, (0, 2), keepdims), rtol=1e-5)
    assert norm.dtype.name == "float32"
    program = trace(lambda y: {"y": ops.norm(y, ord, (0, 2), keepdims)}, {"y": (x.shape, "float32")})
    np.testing.assert_array_equal(evaluate(program, {"y": x})[0]["y"], norm.numpy())
