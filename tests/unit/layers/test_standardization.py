"""Normalization: mean and variance of data, given or adapted."""

import numpy as np
import pytest

from dptrain import layers
from dptrain.errors import ConfigError

X = np.array([[1.0, 10.0], [3.0, 10.0], [5.0, 40.0]], np.float32)


def test_adapted_columns_have_mean_0_and_variance_1():
    layer = layers.Normalization()
    layer.adapt(X)
    np.testing.assert_allclose(layer(X).numpy(), [[-1.2247449, -0.7071068], [0, -0.7071068], [1.2247449, 1.4142135]])


def test_batches_give_the_moments_of_their_rows_together():
    layer = layers.Normalization()
    layer.adapt([X[:1], (X[1:], "targets")])
    np.testing.assert_allclose(layer.adapt_mean.numpy(), [3, 20])
    np.testing.assert_allclose(layer.adapt_variance.numpy(), [8 / 3, 200])


def test_mean_and_variance_are_what_is_computed_with():
    layer = layers.Normalization()
    assert layer.mean is layer.variance is None
    layer.adapt(X)
    np.testing.assert_allclose(layer.mean, [[3, 20]])
    np.testing.assert_allclose(layer.variance, [[8 / 3, 200]])
    assert layer.get_config()["mean"] is None
    layer = layers.Normalization(mean=3.0, variance=4.0)
    layer.build((None, 2))
    np.testing.assert_array_equal(layer.mean, [[3, 3]])
    assert (layer.get_config()["mean"], layer.input_variance) == (3.0, 4.0)
    half = layers.Normalization(dtype="mixed_float16")
    half.adapt(X)
    assert half.mean.dtype == np.float16


@pytest.mark.parametrize("data", [X.tolist(), [X], iter([X[:1].tolist(), X[1:].tolist()]), iter([(X, X[:, 0])])])
def test_lists_of_numbers_are_one_array_and_other_iterables_batches(data):
    layer = layers.Normalization()
    layer.adapt(data)
    np.testing.assert_allclose(layer.adapt_mean.numpy(), [3, 20])


def test_one_pair_for_all_elements_without_an_axis():
    layer = layers.Normalization(axis=None)
    layer.adapt(X)
    assert layer.adapt_mean.numpy() == pytest.approx(X.mean())
    assert layer.adapt_variance.numpy() == pytest.approx(X.var())


def test_invert_undoes_it():
    forward, back = layers.Normalization(), layers.Normalization(invert=True)
    forward.adapt(X)
    back.adapt(X)
    np.testing.assert_allclose(back(forward(X)).numpy(), X, rtol=1e-6)


def test_a_column_without_variance_is_divided_by_epsilon():
    layer = layers.Normalization(mean=[1.0], variance=[0.0])
    np.testing.assert_allclose(layer(np.ones((2, 1)) + 1e-6).numpy(), 10 * np.ones((2, 1)), rtol=0.2)


def test_given_moments_are_no_weights():
    layer = layers.Normalization(mean=3.0, variance=4.0)
    np.testing.assert_allclose(layer(X).numpy(), (X - 3) / 2)
    assert layer.weights == []


def test_training_changes_no_moments():
    layer = layers.Normalization()
    layer.adapt(X)
    assert [weight.trainable for weight in layer.weights] == [False, False, False]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: layers.Normalization(mean=1.0), "both `mean` and `variance`"),
        (lambda: layers.Normalization(mean=[1.0], variance=[1.0, 2.0]), "expected the same"),
        (lambda: layers.Normalization(mean=[1.0, 2, 3], variance=[1.0, 2, 3])(X), r"a shape that broadcasts to \(2,\)"),
        (lambda: layers.Normalization(axis=2)(X), "out of range for 2 dimensions"),
        (lambda: layers.Normalization(mean=1.0, variance=1.0).adapt(X), "was created with a mean"),
        (lambda: layers.Normalization().adapt([]), "no rows"),
        (lambda: layers.Normalization().adapt(X[:0]), "no rows"),
        (lambda: layers.Normalization().adapt([X, X[:, :1]]), "the kept axes have lengths"),
    ],
)
def test_what_fits_not_is_refused(act, message):
    with pytest.raises(ConfigError, match=message):
        act()


def refilling(*batches):
    """Yield batches in one buffer."""
    buffer = np.empty_like(batches[0])
    for batch in batches:
        buffer[:] = batch
        yield buffer


def test_generators_that_refill_one_buffer():
    """Their batches count as they are when they come."""
    normalization = layers.Normalization()
    normalization.adapt(refilling(X[:1], X[1:2], X[2:]))
    np.testing.assert_allclose(normalization.adapt_mean.numpy(), [3, 20])
    discretization, expected = layers.Discretization(num_bins=3), layers.Discretization(num_bins=3)
    discretization.adapt(refilling(X[:1], X[1:2], X[2:]))
    expected.adapt(X)
    assert discretization.bin_boundaries == expected.bin_boundaries
    words = [np.array(["a", "b"]), np.array(["b", "c"])]
    lookup, texts = layers.StringLookup(), layers.TextVectorization()
    lookup.adapt(refilling(*words))
    texts.adapt(refilling(*words))
    assert lookup.get_vocabulary() == ["[UNK]", "b", "c", "a"]
    assert texts.get_vocabulary() == ["", "[UNK]", "b", "c", "a"]
