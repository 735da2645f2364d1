"""Reductions of half precision over more elements than a half counts to: finite, and near those of float64."""

import numpy as np
import pytest

from dptrain import ops

COUNT = 80_000
X = np.random.default_rng(0).uniform(-1, 1, (COUNT, 2))
WITH_NAN = np.where(np.random.default_rng(1).random(X.shape) < 0.1, np.nan, X)
WEIGHTS = np.random.default_rng(2).uniform(0, 1, X.shape)


def deviations(x, axis):
    return np.sqrt(np.mean(np.square(x - x.mean(axis, keepdims=True)), axis))


# By name: ours, and NumPy's of float64.
REDUCTIONS = {
    "sum": (ops.sum, np.sum, X),
    "mean": (ops.mean, np.mean, X),
    "var": (ops.var, np.var, X),
    "std": (ops.std, deviations, X),
    "average": (
        lambda x, axis: ops.average(x, axis, weights=ops.cast(WEIGHTS, x.dtype)),
        lambda x, axis: np.average(x, axis, weights=WEIGHTS),
        X,
    ),
    "norm": (lambda x, axis: ops.norm(x, axis=axis), lambda x, axis: np.linalg.norm(x, axis=axis), X),
    "logsumexp": (ops.logsumexp, lambda x, axis: np.log(np.exp(x).sum(axis)), X),
    "moments": (lambda x, axis: ops.moments(x, [axis])[1], np.var, X),
    "median": (ops.median, np.median, X),
    "nansum": (ops.nansum, np.nansum, WITH_NAN),
    "nanmean": (ops.nanmean, np.nanmean, WITH_NAN),
    "nanvar": (ops.nanvar, np.nanvar, WITH_NAN),
    "nanstd": (ops.nanstd, np.nanstd, WITH_NAN),
    "nanmedian": (ops.nanmedian, np.nanmedian, WITH_NAN),
    "count_nonzero": (ops.count_nonzero, np.count_nonzero, X),
    "mean of a softmax": (lambda x, axis: ops.sum(ops.softmax(x, axis), axis), lambda x, axis: np.ones(2), X),
    "a normalised layer": (
        lambda x, axis: ops.std(ops.layer_normalization(x, axis=axis), axis),
        lambda x, axis: np.ones(2),
        X,
    ),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_values(name, dtype):
    ours, reference, x = REDUCTIONS[name]
    halves = ops.cast(x, dtype)
    exact = np.asarray(ops.cast(halves, "float64"))
    result = np.asarray(ops.cast(ours(halves, axis=0), "float64"))
    np.testing.assert_allclose(result, reference(exact, axis=0), rtol=2e-2, atol=2e-3)
