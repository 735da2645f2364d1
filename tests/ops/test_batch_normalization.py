"""The ops of batch normalization against NumPy float64: statistics, normalization, gradients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.conftest import poisoned
from tests.ops.test_ops import SEEDS, draw, relaxed
from tests.tolerances import assert_near

# Edges of the 256 rows and 32 columns of a block among them.
ROWS = st.sampled_from([1, 2, 7, 8, 9, 64, 255, 256, 257, 600])
FEATURES = st.sampled_from([1, 2, 31, 32, 33, 65])
EPSILON = 1e-3


def statistics(ops, x, other_rows=0, other_sum=0.0, momentum=0.99):
    """Return (totals, squares, mean, variance, moving mean, moving variance) after the ops that make them."""
    B, F = x.shape
    totals, squares = poisoned(ops, (F + 1,), np.float64), poisoned(ops, (F,), np.float64)
    ops.batch_sums(x, totals[:F])
    ops.fill(totals[F:], B)
    if other_rows:  # as if another rank had these
        ops.write(totals, ops.download(totals) + np.append(np.full(F, other_sum), other_rows))
    ops.batch_squares(x, totals, squares)
    moving_mean, moving_variance = ops.zeros((F,)), ops.zeros((F,))
    ops.fill(moving_mean, 0.5)
    ops.fill(moving_variance, 2.0)
    mean, variance = poisoned(ops, (F,)), poisoned(ops, (F,))
    ops.batch_statistics(totals, squares, momentum, moving_mean, moving_variance, mean, variance)
    return totals, squares, mean, variance, moving_mean, moving_variance


@relaxed
@given(B=ROWS, F=FEATURES, seed=SEEDS, momentum=st.sampled_from([0.99, 0.5, 0.0]))
def test_statistics_and_moving_averages(ops, B, F, seed, momentum):
    x, x64 = draw(ops, seed, B, F)
    _, squares, mean, variance, moving_mean, moving_variance = statistics(ops, x, momentum=momentum)
    assert_near(ops.download(squares), ((x64 - x64.mean(0)) ** 2).sum(0), "float64", scale=B)
    assert_near(ops.download(mean), x64.mean(0), ops.dtype)
    assert_near(ops.download(variance), x64.var(0), ops.dtype)
    assert_near(ops.download(moving_mean), 0.5 * momentum + x64.mean(0) * (1 - momentum), ops.dtype)
    assert_near(ops.download(moving_variance), 2 * momentum + x64.var(0) * (1 - momentum), ops.dtype)


def test_the_mean_is_that_of_all_ranks(ops):
    x, x64 = draw(ops, 3, 10, 4)
    _, squares, mean, *_ = statistics(ops, x, other_rows=6, other_sum=12.0)
    expected = (x64.sum(0) + 12) / 16
    assert_near(ops.download(mean), expected, ops.dtype)
    assert_near(ops.download(squares), ((x64 - expected) ** 2).sum(0), "float64", scale=10)


@pytest.mark.parametrize("offset", [1e3, 3e5])
def test_the_variance_of_numbers_far_from_zero_does_not_cancel(ops, offset):
    """E[x^2] - E[x]^2 in float32 would be noise: x^2 is 10^6 to 10^11 times the variance."""
    x = ops.empty((700, 3))
    ops.write(x, (np.random.default_rng(0).standard_normal((700, 3)) + offset).astype(ops.dtype))
    x64 = ops.download(x).astype(np.float64)  # what float32 makes of them
    _, _, _, variance, *_ = statistics(ops, x)
    np.testing.assert_allclose(ops.download(variance), x64.var(0), rtol=1e-6 if ops.dtype == np.float32 else 1e-9)


@pytest.mark.parametrize("features", [1, 33])
def test_a_batch_without_rows_gives_zeros(ops, features):
    x, sums, both = (
        ops.empty((0, features)),
        poisoned(ops, (features,), np.float64),
        poisoned(ops, (2 * features,), np.float64),
    )
    totals = ops.zeros((features + 1,), np.float64)
    ops.fill(totals, 3.0)
    mean, variance, dgamma, dbeta = (ops.zeros((features,)) for _ in range(4))
    ops.fill(dgamma, 9.0)
    ops.fill(dbeta, 9.0)
    ops.batch_sums(x, sums)
    assert not ops.download(sums).any()
    ops.fill(sums, 5.0)
    ops.batch_squares(x, totals, sums)
    assert not ops.download(sums).any()
    ops.batch_gradient_sums(x, x, mean, variance, EPSILON, both, dgamma, dbeta)
    assert not any(ops.download(one).any() for one in (both, dgamma, dbeta))
    ops.batch_normalize(x, mean, variance, None, None, EPSILON, x)
    ops.batch_normalize_backward(x, x, mean, variance, None, EPSILON, both, totals, x)


@relaxed
@given(B=ROWS, F=FEATURES, seed=SEEDS, scale=st.booleans(), center=st.booleans())
def test_normalize_and_its_gradients(ops, B, F, seed, scale, center):
    x, x64 = draw(ops, seed, B, F)
    dy, dy64 = draw(ops, seed + 1, B, F)
    gamma, gamma64 = draw(ops, seed + 2, F)
    beta, beta64 = draw(ops, seed + 3, F)
    gamma, gamma64 = (gamma, gamma64) if scale else (None, np.ones(F))
    beta, beta64 = (beta, beta64) if center else (None, np.zeros(F))
    totals, _, mean, variance, *_ = statistics(ops, x)
    y = poisoned(ops, (B, F))
    ops.batch_normalize(x, mean, variance, gamma, beta, EPSILON, y)
    deviation64 = np.sqrt(x64.var(0) + EPSILON)
    xhat64 = (x64 - x64.mean(0)) / deviation64
    # Of few rows the deviation can be small, which magnifies what the mean has lost to rounding.
    magnified = 40 if ops.dtype == np.float32 else 400
    assert_near(ops.download(y), gamma64 * xhat64 + beta64, ops.dtype, scale=magnified)

    sums = poisoned(ops, (2 * F,), np.float64)
    dgamma, dbeta = poisoned(ops, (F,)) if scale else None, poisoned(ops, (F,)) if center else None
    ops.batch_gradient_sums(x, dy, mean, variance, EPSILON, sums, dgamma, dbeta)
    expected = np.concatenate([dy64.sum(0), (dy64 * xhat64).sum(0)])
    assert_near(ops.download(sums), expected, ops.dtype, scale=magnified * B)
    if dgamma is not None:
        assert_near(ops.download(dgamma), expected[F:], ops.dtype, scale=magnified * B)
    if dbeta is not None:
        assert_near(ops.download(dbeta), expected[:F], ops.dtype, scale=B)

    dx, frozen = poisoned(ops, (B, F)), poisoned(ops, (B, F))
    ops.batch_normalize_backward(x, dy, mean, variance, gamma, EPSILON, sums, totals, dx)
    expected = gamma64 / deviation64 * (dy64 - dy64.mean(0) - xhat64 * (dy64 * xhat64).mean(0))
    assert_near(ops.download(dx), expected, ops.dtype, scale=32 * magnified)
    ops.batch_normalize_backward(x, dy, mean, variance, gamma, EPSILON, None, None, frozen)
    assert_near(ops.download(frozen), gamma64 / deviation64 * dy64, ops.dtype, scale=32 * magnified)
