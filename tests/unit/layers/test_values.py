"""What layers compute, against NumPy formulas written out."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain import ops

RNG = np.random.default_rng(5)


def in_float64(layer):
    layer._set_dtype("float64")
    return layer


def windows(x, size, strides, low, fill):
    """Return (B, H', W', R, S, C) of images that are padded by `low` before and enough behind."""
    padded = np.pad(x, ((0, 0), (low[0], size[0]), (low[1], size[1]), (0, 0)), constant_values=fill)
    windows_view = np.lib.stride_tricks.sliding_window_view(padded, size, (1, 2))
    return np.moveaxis(windows_view[:, :: strides[0], :: strides[1]], 3, -1)


def test_batch_normalization_of_the_batch_and_of_moving_averages():
    x = RNG.normal(3, 2, (24, 4))
    layer = in_float64(L.BatchNormalization(momentum=0.75))
    y = layer(x, training=True)
    np.testing.assert_allclose(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3), rtol=1e-12)
    gamma, beta, moving_mean, moving_variance = layer.get_weights()
    assert (gamma.tolist(), beta.tolist()) == ([1.0] * 4, [0.0] * 4)
    np.testing.assert_allclose(moving_mean, 0.25 * x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moving_variance, 0.75 + 0.25 * x.var(0), rtol=1e-12)
    expected = (x - moving_mean) / np.sqrt(moving_variance + 1e-3)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-12)
    layer.trainable = False
    np.testing.assert_allclose(layer(x, training=True), expected, rtol=1e-12)
    assert np.array_equal(layer.get_weights()[2], moving_mean)


def test_layer_normalization():
    x = RNG.normal(3, 2, (5, 3, 4))
    layer = in_float64(L.LayerNormalization(axis=(1, 2), epsilon=0.01, gamma_initializer="he_normal"))
    y = layer(x).numpy()
    gamma, beta = layer.get_weights()
    mean, variance = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
    assert gamma.shape == beta.shape == (3, 4)
    np.testing.assert_allclose(y, gamma * (x - mean) / np.sqrt(variance + 0.01) + beta, rtol=1e-12)


@pytest.mark.parametrize(("padding", "low", "shape"), [("valid", (0, 0), (2, 4)), ("same", (0, 0), (3, 5))])
def test_convolution(padding, low, shape):
    x = RNG.normal(size=(2, 5, 5, 3))
    layer = in_float64(L.Conv2D(4, (3, 2), (2, 1), padding, activation="relu", bias_initializer="ones"))
    y = layer(x).numpy()
    kernel, bias = layer.get_weights()
    low = (1, 0) if padding == "same" else low  # an even window has its zero behind
    patches = windows(x, (3, 2), (2, 1), low, 0)[:, : shape[0], : shape[1]]
    expected = np.maximum(np.einsum("bhwrsi,rsio->bhwo", patches, kernel) + bias, 0)
    assert y.shape == (2, *shape, 4)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


def test_transposed_convolution_spreads_every_pixel():
    x = RNG.normal(size=(2, 3, 2, 3))
    layer = in_float64(L.Conv2DTranspose(4, (3, 2), 2, bias_initializer="ones"))
    y = layer(x).numpy()
    kernel, bias = layer.get_weights()
    assert kernel.shape == (3, 2, 4, 3)
    expected = np.zeros((2, 7, 4, 4))
    for h in range(3):
        for w in range(2):
            expected[:, 2 * h : 2 * h + 3, 2 * w : 2 * w + 2] += np.einsum("bi,rsoi->brso", x[:, h, w], kernel)
    np.testing.assert_allclose(y, expected + bias, rtol=1e-10)
    same = in_float64(L.Conv2DTranspose(4, 3, 2, "same"))
    assert same(x).shape == (2, 6, 4, 4)


def test_pooling():
    x = RNG.normal(size=(2, 5, 6, 3))
    patches = windows(x, (2, 3), (2, 3), (0, 0), np.nan)[:, :2, :2]
    pools = {"pool_size": (2, 3), "dtype": "float64"}
    np.testing.assert_allclose(L.MaxPooling2D(**pools)(x), patches.max((3, 4)))
    np.testing.assert_allclose(L.AveragePooling2D(**pools)(x), patches.mean((3, 4)), rtol=1e-12)
    patches = windows(x, (3, 3), (2, 2), (1, 0), np.nan)[:, :3, :3]
    pools = {"pool_size": 3, "strides": 2, "padding": "same", "dtype": "float64"}
    np.testing.assert_allclose(L.MaxPooling2D(**pools)(x), np.nanmax(patches, (3, 4)))
    np.testing.assert_allclose(L.AveragePooling2D(**pools)(x), np.nanmean(patches, (3, 4)), rtol=1e-12)
    wide = L.GlobalAveragePooling2D(keepdims=True, dtype="float64")
    np.testing.assert_allclose(wide(x), x.mean((1, 2), keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(L.GlobalMaxPooling2D(dtype="float64")(x), x.max((1, 2)))


def test_shapes():
    x = RNG.normal(size=(2, 3, 4, 1)).astype(np.float32)
    assert np.array_equal(L.Flatten()(x), x.reshape(2, 12))
    assert L.Flatten()(np.ones(3)).shape == (3, 1)
    assert np.array_equal(L.Permute((2, 3, 1))(x), x.transpose(0, 2, 3, 1))
    assert np.array_equal(L.UpSampling2D((2, 3))(x), x.repeat(2, 1).repeat(3, 2))
    assert np.array_equal(L.ZeroPadding2D(((1, 0), (2, 1)))(x), np.pad(x, ((0, 0), (1, 0), (2, 1), (0, 0))))
    assert np.array_equal(L.ZeroPadding2D(1)(x), np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))))
    assert np.array_equal(L.RepeatVector(3)(x[:, :, 0, 0]), x[:, None, :, 0, 0].repeat(3, 1))


def test_embedding_looks_up_rows():
    layer = L.Embedding(5, 3)
    y = layer(np.array([[0, 4], [2, 2]]))
    table = layer.get_weights()[0]
    assert np.array_equal(y, table[[[0, 4], [2, 2]]])
    assert np.abs(table).max() <= 0.05
    assert np.array_equal(L.Embedding(5, 3, weights=[table])([[1.0]]), table[None, [1]])
    ops.sum(y).backward()
    assert layer.embeddings.value.grad.numpy()[:, 0].tolist() == [1, 0, 2, 0, 1]


def test_dropout():
    x = np.ones((50, 40), np.float32)
    layer = L.Dropout(0.25, seed=4)
    first, second = layer(x, training=True).numpy(), layer(x, training=True).numpy()
    assert np.unique(first).tolist() == [0, np.float32(1 / 0.75)]
    assert abs((first == 0).mean() - 0.25) < 0.03
    assert not np.array_equal(first, second)
    assert int(layer.seed_generator.count) == 2
    layer.seed_generator.count.assign(0)
    assert np.array_equal(layer(x, training=True), first)
    assert np.array_equal(layer(x), x)
    assert not L.Dropout(1.0)(x, training=True).numpy().any()
    assert np.array_equal(L.Dropout(0.0)(x, training=True), x)


def test_merging():
    a, b = RNG.normal(size=(2, 4, 3, 2))
    tensors = [a, b]
    options = {"dtype": "float64"}
    assert np.array_equal(L.add([a, b, a], **options), a + b + a)
    assert np.array_equal(L.subtract(tensors, **options), a - b)
    assert np.array_equal(L.multiply(tensors, **options), a * b)
    np.testing.assert_allclose(L.average(tensors, **options), (a + b) / 2)
    assert np.array_equal(L.maximum(tensors, **options), np.maximum(a, b))
    assert np.array_equal(L.minimum(tensors, **options), np.minimum(a, b))
    assert np.array_equal(L.concatenate(tensors, 1, **options), np.concatenate(tensors, 1))
    np.testing.assert_allclose(L.dot(tensors, (2, 2), **options), np.einsum("bik,bjk->bij", a, b), rtol=1e-12)
    np.testing.assert_allclose(L.dot(tensors, 1, **options), np.einsum("bki,bkj->bij", a, b), rtol=1e-12)
    unit = [tensor / np.sqrt((tensor**2).sum(-1, keepdims=True)) for tensor in tensors]
    cosines = L.dot([a[:, 0], b[:, 0]], axes=1, normalize=True, **options)
    np.testing.assert_allclose(cosines, (unit[0] * unit[1]).sum(-1)[:, :1], rtol=1e-12)


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "average", "maximum", "minimum"])
def test_inputs_of_fewer_axes_are_merged_row_by_row(name):
    """Also where as many rows as steps would broadcast otherwise."""
    merge, sequences, vectors = getattr(L, name), RNG.normal(size=(3, 3, 2)), RNG.normal(size=(3, 2))
    expected = merge([sequences, vectors[:, None]], dtype="float64").numpy()
    np.testing.assert_array_equal(merge([sequences, vectors], dtype="float64"), expected)
    inputs = [L.Input((3, 2)), L.Input((2,))]
    model = keras.Model(inputs, merge(inputs))
    model.compile(dtype="float64")
    np.testing.assert_array_equal(model.predict([sequences, vectors]), expected)
