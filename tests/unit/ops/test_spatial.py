"""Convolutions and pooling against sums written out, and what does not fit."""

import numpy as np
import pytest

from dptrain import layers, ops
from dptrain.errors import ConfigError
from dptrain.program.gradient import gradients
from dptrain.program.tensor import differentiable

RNG = np.random.default_rng(0)


def padded(x, window, stride, dilation, padding, value=0.0):
    """Return x with what "same" puts around it, by its definition in TensorFlow and Keras."""
    if padding == "valid":
        return x
    widths = [(0, 0)]
    for length, extent, step, spread in zip(x.shape[1:-1], window, stride, dilation, strict=True):
        total = max(0, (-(-length // step) - 1) * step + (extent - 1) * spread + 1 - length)
        widths.append((total // 2, total - total // 2))
    return np.pad(x, [*widths, (0, 0)], constant_values=value)


SHAPES = {1: ((9,), (3,)), 2: ((7, 6), (3, 2)), 3: ((5, 4, 6), (2, 3, 2))}


def seen(x, window, stride, dilation, padding, value=0.0):
    """Yield each place of the output, and (B, *window, C) that stands there."""
    around = padded(x, window, stride, dilation, padding, value)
    reach = [(extent - 1) * spread + 1 for extent, spread in zip(window, dilation, strict=True)]
    size = [(n - extent) // step + 1 for n, extent, step in zip(around.shape[1:-1], reach, stride, strict=True)]
    for at in np.ndindex(*size):
        starts = [n * step for n, step in zip(at, stride, strict=True)]
        parts = (slice(n, n + extent, step) for n, extent, step in zip(starts, reach, dilation, strict=True))
        yield at, around[(slice(None), *parts)]


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize(
    ("rank", "stride", "dilation", "groups"),
    [
        *((2, (1, 1), (1, 1), 1), (2, (2, 3), (1, 1), 2), (2, (1, 1), (2, 1), 1), (2, (1, 2), (2, 2), 4)),
        *((1, (1,), (1,), 1), (1, (2,), (1,), 4), (1, (1,), (3,), 2)),
        *((3, (1, 1, 1), (1, 1, 1), 1), (3, (2, 1, 3), (1, 1, 1), 2), (3, (1, 1, 1), (2, 1, 2), 4)),
    ],
)
def test_conv(rank, padding, stride, dilation, groups):
    lengths, window = SHAPES[rank]
    x, kernel = RNG.normal(size=(2, *lengths, 4)), RNG.normal(size=(*window, 4 // groups, 8))
    actual = ops.conv(x, kernel, strides=stride, padding=padding, dilation_rate=dilation).numpy()
    first = ops.conv(np.moveaxis(x, -1, 1), kernel, stride, padding, "channels_first", dilation).numpy()
    np.testing.assert_array_equal(np.moveaxis(first, 1, -1), actual)
    for at, part in seen(x, window, stride, dilation, padding):
        pairs = zip(np.split(part, groups, -1), np.split(kernel, groups, -1), strict=True)
        expected = np.concatenate([np.tensordot(image, weights, rank + 1) for image, weights in pairs], -1)
        np.testing.assert_allclose(actual[(slice(None), *at)], expected, rtol=1e-12, atol=1e-12)
    assert actual.shape == (2, *(n + 1 for n in at), 8)
    if groups == 4:
        depthwise_kernel = kernel.reshape(*window, 4, 2)
        depthwise = ops.depthwise_conv(x, depthwise_kernel, stride, padding, dilation_rate=dilation).numpy()
        np.testing.assert_array_equal(depthwise, actual)
        mixing = RNG.normal(size=(*(1,) * rank, 8, 3))
        separable = ops.separable_conv(x, depthwise_kernel, mixing, stride, padding, dilation_rate=dilation)
        np.testing.assert_allclose(separable, actual @ mixing.reshape(8, 3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    ("padding", "stride", "extra", "dilation"),
    [
        *(("valid", 2, None, 1), ("same", 2, None, 1), ("same", 1, None, 2), ("valid", 1, None, 2)),
        *(("valid", 3, 1, 1), ("same", 3, 2, 1), ("same", 2, 0, 1), ("valid", 4, None, 1), ("same", 4, None, 1)),
    ],
)
def test_conv_transpose(rank, padding, stride, extra, dilation):
    """Each element goes back to what the kernel saw of it; of "same", Keras keeps the middle."""
    lengths, window = SHAPES[rank]
    x, kernel = RNG.normal(size=(2, *lengths, 3)), RNG.normal(size=(*window, 2, 3))
    actual = ops.conv_transpose(x, kernel, stride, padding, extra, dilation_rate=dilation).numpy()
    expected = np.zeros(
        (2, *((n - 1) * stride + (k - 1) * dilation + 1 for n, k in zip(lengths, window, strict=True)), 2)
    )
    for at in np.ndindex(*window):
        places = tuple(
            slice(k * dilation, k * dilation + (n - 1) * stride + 1, stride) for k, n in zip(at, lengths, strict=True)
        )
        expected[(slice(None), *places)] += x @ kernel[at].T
    for axis, (n, k) in enumerate(zip(lengths, window, strict=True), 1):
        reach = (k - 1) * dilation + 1
        if padding == "same":
            size = n * stride if extra is None else (n - 1) * stride + reach % 2 + extra
            total = stride + reach - 2 if extra is None else reach + reach % 2 - 2 + extra
            cut = max(0, reach - 1 - (total + 1) // 2)
        else:
            size, cut = (n - 1) * stride + (max(reach, stride) if extra is None else reach + extra), 0
        widths = [(0, 0)] * expected.ndim
        widths[axis] = (0, max(0, cut + size - expected.shape[axis]))
        expected = np.take(np.pad(expected, widths), range(cut, cut + size), axis)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
    first = ops.conv_transpose(np.moveaxis(x, -1, 1), kernel, stride, padding, extra, "channels_first", dilation)
    np.testing.assert_array_equal(np.moveaxis(first.numpy(), 1, -1), actual)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("strides", [1, 2, None])
def test_pooling(rank, padding, strides):
    lengths, window = SHAPES[rank]
    x = RNG.normal(size=(2, *lengths, 3)) - 5  # below the zeros of a padding
    stride = window if strides is None else (strides,) * rank
    greatest, mean = ops.max_pool(x, window, strides, padding).numpy(), ops.average_pool(x, window, strides, padding)
    for at, part in seen(x, window, stride, (1,) * rank, padding, np.nan):
        over = tuple(range(1, rank + 1))
        np.testing.assert_array_equal(greatest[(slice(None), *at)], np.nanmax(part, over))
        np.testing.assert_allclose(mean.numpy()[(slice(None), *at)], np.nanmean(part, over), rtol=1e-12)
    assert greatest.shape == mean.shape == (2, *(n + 1 for n in at), 3)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
def test_means_of_integers_are_no_integers(dtype):
    x = np.array([[200, 101, 0, 3]]).astype(dtype)[..., None]
    means = ops.average_pool(x, 2)
    assert means.dtype.name == "float32"
    np.testing.assert_array_equal(means.numpy().ravel(), x.reshape(2, 2).astype(np.float32).mean(1))
    np.testing.assert_array_equal(layers.AveragePooling1D(2)(x), means)


def test_a_stride_longer_than_the_kernel():
    output = ops.conv_transpose(np.ones((1, 2, 2, 1)), np.ones((1, 1, 1, 1)), strides=2).numpy()
    np.testing.assert_array_equal(output[0, :, :, 0], [[1, 0, 1, 0], [0] * 4, [1, 0, 1, 0], [0] * 4])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_of_equal_elements_the_first_gets_the_gradient(rank):
    x = differentiable(np.zeros((1, *(2,) * rank, 1)))
    (gradient,) = gradients(ops.max_pool(x, 2), [x])
    np.testing.assert_array_equal(gradient.numpy().ravel(), [1] + [0] * (2**rank - 1))


def test_what_does_not_fit():
    image, kernel = np.zeros((1, 4, 4, 2)), np.zeros((3, 3, 2, 1))
    with pytest.raises(ConfigError, match=r"have 2 channels, the kernel .* takes 1"):
        ops.conv(image, np.zeros((3, 3, 1, 1)))
    with pytest.raises(ConfigError, match="a window of 5 does not fit into a length of 4"):
        ops.conv(image, kernel, dilation_rate=2)
    with pytest.raises(ConfigError, match="padding = 'causal': expected 'valid' or 'same'"):
        ops.conv(image, kernel, padding="causal")
    with pytest.raises(ConfigError, match="strides = 0"):
        ops.max_pool(image, 2, strides=0)
    for pool in (ops.max_pool, ops.average_pool):
        with pytest.raises(
            ConfigError, match=rf"^{pool.__name__}: expected inputs of rank 3 to 5 .*, found shape \(4, 2\)$"
        ):
            pool(image[0, 0], 2)


def test_channels_first():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 3, 6, 5)), rng.normal(size=(3, 2, 3, 4))
    last = x.transpose(0, 2, 3, 1)
    for function, arguments in (
        (ops.conv, (kernel, 2, "same")),
        (ops.conv_transpose, (kernel.transpose(0, 1, 3, 2), 2, "valid")),
        (ops.max_pool, (2, 1, "same")),
        (ops.average_pool, (2, None, "valid")),
    ):
        expected = function(last, *arguments).numpy().transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(function(x, *arguments, data_format="channels_first"), expected)
    with pytest.raises(ConfigError, match=r"argument must be one of .* Received: data_format=NCHW"):
        ops.max_pool(x, 2, data_format="NCHW")
    with pytest.raises(
        ConfigError, match=r"conv: expected inputs and a kernel of equal rank, .* found shapes \(2, 6, 5, 3\) and \(3,"
    ):
        ops.conv(last, kernel[:, 0])
    with pytest.raises(ConfigError, match=r"input channels=3, kernel input channels=4, data_format='channels_last'\."):
        ops.conv_transpose(last, kernel)
    with pytest.raises(ConfigError, match=r"have 3 channels, the kernel .* takes 4"):
        ops.depthwise_conv(last, kernel.transpose(0, 1, 3, 2))
