"""Penalties by NumPy."""

import numpy as np
import pytest

from dptrain import ops, regularizers
from dptrain.errors import ConfigError
from dptrain.program.tensor import Variable


@pytest.mark.parametrize("mode", ["rows", "columns"])
def test_a_penalty_of_what_is_not_orthogonal(mode):
    x = np.random.default_rng(0).normal(size=(4, 3))
    vectors = x if mode == "rows" else x.T
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = [abs(vector @ other) for n, vector in enumerate(vectors) for other in vectors[:n]]
    weight, penalty = Variable(x), regularizers.get({"class_name": "OrthogonalRegularizer", "config": {"mode": mode}})
    loss = penalty(weight)
    assert float(loss) == pytest.approx(0.01 * np.mean(pairs), rel=1e-12)
    loss.backward()
    # The length of a vector makes no difference.
    np.testing.assert_allclose(ops.sum(weight.value.grad * weight, 1 if mode == "rows" else 0), 0, atol=1e-15)
    assert np.abs(weight.value.grad.numpy()).max() > 1e-4


def test_orthogonal_vectors_and_single_ones_cost_nothing():
    penalty = regularizers.orthogonal_regularizer(1.0)
    assert float(penalty(np.diag([3.0, -2.0, 0.5]))) == 0
    assert float(penalty(np.ones((1, 4)))) == 0
    assert float(penalty(np.ones((5, 4)))) == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: regularizers.OrthogonalRegularizer(-1.0), "argument factor: expected a non-negative float"),
        (lambda: regularizers.OrthogonalRegularizer(1.0, "all"), "Received: mode=all"),
        (lambda: regularizers.OrthogonalRegularizer()(np.ones(3)), "must have rank 2"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
