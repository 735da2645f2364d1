"""Functions of matrices, against NumPy's and SciPy's in float64; gradients are those of the records."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.gradient import gradients
from dptrain.program.tensor import differentiable

RNG = np.random.default_rng(0)
X, M = RNG.normal(size=(3, 4, 5)), RNG.normal(size=(4, 4)) + 3 * np.eye(4)
SPD = M @ M.T + np.eye(4)


def close(actual, expected):
    assert actual.shape == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10)


def test_factors_multiply_to_the_matrix():
    for x in (X, X.swapaxes(1, 2), M):
        for mode in ("reduced", "complete"):
            q, r = ops.qr(x, mode)
            close(q @ r, x)
            close(r.numpy(), np.linalg.qr(x, mode)[1])
        for full in (False, True):
            u, s, vt = (tensor.numpy() for tensor in ops.svd(x, full))
            k = s.shape[-1]
            close(ops.svd(x, compute_uv=False), s)
            close(u[..., :k] * s[..., None, :] @ vt[..., :k, :], x)
        lu, pivots = (tensor.numpy() for tensor in ops.lu_factor(x))
        m, n = x.shape[-2:]
        lower = np.tril(lu, -1)[..., : min(m, n)] + np.eye(m, min(m, n))
        product = lower @ np.triu(lu)[..., : min(m, n), :]
        for place in np.ndindex(pivots.shape[:-1]):
            permuted = x[place].copy()
            for row, other in enumerate(pivots[place]):
                permuted[[row, other]] = permuted[[other, row]]
            close(product[place], permuted)
        assert pivots.dtype == np.int32
    values, vectors = ops.eigh(SPD)
    close(vectors * values @ ops.transpose(vectors), SPD)
    close(ops.cholesky(SPD), np.linalg.cholesky(SPD))
    close(ops.cholesky(SPD, upper=True), np.linalg.cholesky(SPD).T)


def test_solutions():
    b = RNG.normal(size=(4, 2))
    close(ops.solve(M, b), np.linalg.solve(M, b))
    close(ops.solve(M, b[:, 0]), np.linalg.solve(M, b[:, 0]))
    close(ops.solve_triangular(M, b), np.linalg.solve(np.triu(M), b))
    close(ops.solve_triangular(M, b, lower=True), np.linalg.solve(np.tril(M), b))
    close(ops.inv(M), np.linalg.inv(M))
    close(ops.det(M), np.linalg.det(M))
    sign, log = ops.slogdet(M)
    close(sign, np.linalg.slogdet(M)[0])
    close(log, ops.logdet(M).numpy())
    close(ops.cholesky_inverse(np.linalg.cholesky(SPD)), np.linalg.inv(SPD))
    close(ops.cholesky_inverse(np.linalg.cholesky(SPD).T, upper=True), np.linalg.inv(SPD))
    close(ops.pinv(X), np.linalg.pinv(X))
    close(ops.lstsq(X[0].T, np.ones(5)), np.linalg.lstsq(X[0].T, np.ones(5), rcond=None)[0])
    close(ops.lstsq(X[0], b), np.linalg.lstsq(X[0], b, rcond=None)[0])
    assert ops.matrix_rank(np.stack([np.eye(3), np.ones((3, 3))])).numpy().tolist() == [3, 1]


def test_gradient_of_least_squares():
    a, b = differentiable(X[0].T), differentiable(np.arange(5.0))
    da, db = gradients(ops.sum(ops.lstsq(a, b) ** 2), [a, b])
    for source, gradient in ((a, da), (b, db)):
        for place in np.ndindex(source.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [tensor.numpy().copy() for tensor in (a, b)]
                moved[0 if source is a else 1][place] += step
                ends.append(float(ops.sum(ops.lstsq(*moved) ** 2)))
            np.testing.assert_allclose(gradient.numpy()[place], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6)


def test_what_has_no_answer():
    inverse = ops.inv(np.stack([np.ones((2, 2)), np.eye(2)])).numpy()
    assert np.isnan(inverse[0]).all()
    np.testing.assert_array_equal(inverse[1], np.eye(2))
    assert float(ops.det(np.ones((2, 2)))) == 0
    for call, message in (
        (lambda: ops.cholesky(-np.eye(2)), "Cholesky decomposition failed"),
        (lambda: ops.inv(np.ones((2, 3))), "expected a square matrix"),
        (lambda: ops.qr(np.ones(3)), "expected at least 2 dimensions"),
        (lambda: ops.qr(M, "r"), "`mode` argument value not supported"),
        (lambda: ops.solve(M, np.ones((3, 2))), "are incompatible"),
        (lambda: ops.lstsq(X, X), "expected \\(m, n\\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    x = differentiable(X)
    for call in (lambda: ops.qr(ops.transpose(x, (0, 2, 1)), "complete")[0], lambda: ops.svd(x)[0]):
        with pytest.raises(ConfigError, match="no gradient with"):
            gradients(call(), [x])
    assert gradients(ops.svd(x)[1], [x])[0] is not None


def test_half_precision_is_computed_in_float32():
    x = ops.cast(SPD, "bfloat16")
    assert ops.inv(x).dtype.name == "bfloat16"
    close(
        ops.cast(ops.inv(x), "float32").numpy(),
        ops.cast(ops.cast(ops.inv(ops.cast(x, "float32")), "bfloat16"), "float32").numpy(),
    )


def test_one_singular_matrix_for_a_batch_of_right_sides_gives_nan():
    solved = ops.solve(np.zeros((2, 2)), np.ones((3, 2, 1))).numpy()
    assert solved.shape == (3, 2, 1)
    assert np.isnan(solved).all()
