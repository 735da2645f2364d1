"""Convolutions and pooling against sums written out, and what does not fit."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.gradient import gradients
from dptrain.program.tensor import differentiable

RNG = np.random.default_rng(0)


def padded(x, window, stride, dilation, padding, value=0.0):
    """Return x with what "same" puts around it, by its definition in TensorFlow and Keras."""
    if padding == "valid":
        return x
    widths = [(0, 0)]
    for length, extent, step, spread in zip(x.shape[1:3], window, stride, dilation, strict=True):
        needed = max(0, (-(-length // step) - 1) * step + (extent - 1) * spread + 1 - length)
        widths.append((needed // 2, needed - needed // 2))
    return np.pad(x, [*widths, (0, 0)], constant_values=value)


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize(
    ("stride", "dilation"), [((1, 1), (1, 1)), ((2, 3), (1, 1)), ((1, 1), (2, 1)), ((1, 2), (2, 2))]
)
def test_conv(padding, stride, dilation):
    x, kernel = RNG.normal(size=(2, 7, 6, 3)), RNG.normal(size=(3, 2, 3, 4))
    around = padded(x, (3, 2), stride, dilation, padding)
    found = ops.conv(x, kernel, strides=stride, padding=padding, dilation_rate=dilation).numpy()
    reach = [(extent - 1) * spread + 1 for extent, spread in zip((3, 2), dilation, strict=True)]
    size = [(n - one) // step + 1 for n, one, step in zip(around.shape[1:3], reach, stride, strict=True)]
    assert found.shape == (2, *size, 4)
    for h in range(size[0]):
        for w in range(size[1]):
            top, left = h * stride[0], w * stride[1]
            seen = around[:, top : top + reach[0] : dilation[0], left : left + reach[1] : dilation[1]]
            np.testing.assert_allclose(found[:, h, w], np.tensordot(seen, kernel, 3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("padding", "height"), [("valid", 2 * 3 + 4), ("same", 2 * 4)])
def test_conv_transpose_is_the_gradient_of_conv(padding, height):
    x, kernel = RNG.normal(size=(2, 4, 4, 3)), RNG.normal(size=(4, 4, 5, 3))
    found = ops.conv_transpose(x, kernel, strides=2, padding=padding).numpy()
    assert found.shape == (2, height, height, 5)
    image = differentiable(np.zeros(found.shape))
    (expected,) = gradients(ops.conv(image, kernel, strides=2, padding=padding), [image], x)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)


def test_a_stride_longer_than_the_kernel():
    found = ops.conv_transpose(np.ones((1, 2, 2, 1)), np.ones((1, 1, 1, 1)), strides=2).numpy()
    np.testing.assert_array_equal(found[0, :, :, 0], [[1, 0, 1, 0], [0] * 4, [1, 0, 1, 0], [0] * 4])


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_max_pool(padding):
    x = RNG.normal(size=(2, 7, 6, 3)) - 5  # below the zeros of a padding
    around = padded(x, (3, 2), (2, 2), (1, 1), padding, -np.inf)
    found = ops.max_pool(x, (3, 2), strides=2, padding=padding).numpy()
    for h in range(found.shape[1]):
        for w in range(found.shape[2]):
            seen = around[:, 2 * h : 2 * h + 3, 2 * w : 2 * w + 2]
            np.testing.assert_array_equal(found[:, h, w], seen.max(axis=(1, 2)))
    assert found.shape[1:3] == ((3, 3) if padding == "valid" else (4, 3))


def test_of_equal_elements_the_first_gets_the_gradient():
    x = differentiable(np.zeros((1, 2, 2, 1)))
    (found,) = gradients(ops.max_pool(x, 2), [x])
    np.testing.assert_array_equal(found.numpy().ravel(), [1, 0, 0, 0])


def test_what_does_not_fit():
    image, kernel = np.zeros((1, 4, 4, 2)), np.zeros((3, 3, 2, 1))
    with pytest.raises(ConfigError, match=r"expected images \(B, H, W, I\) and a kernel"):
        ops.conv(image, np.zeros((3, 3, 1, 1)))
    with pytest.raises(ConfigError, match="a window of 5 does not fit into a length of 4"):
        ops.conv(image, kernel, dilation_rate=2)
    with pytest.raises(ConfigError, match="padding = 'causal': expected 'valid' or 'same'"):
        ops.conv(image, kernel, padding="causal")
    with pytest.raises(ConfigError, match="strides = 0"):
        ops.max_pool(image, 2, strides=0)
    for pool in (ops.max_pool, ops.average_pool):
        with pytest.raises(ConfigError, match=rf"^{pool.__name__}: expected images \(B, H, W, C\), found \(4, 4, 2\)$"):
            pool(image[0], 2)


def test_channels_first():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 3, 6, 5)), rng.normal(size=(3, 2, 3, 4))
    last = x.transpose(0, 2, 3, 1)
    for function, given in (
        (ops.conv, (kernel, 2, "same")),
        (ops.conv_transpose, (kernel.transpose(0, 1, 3, 2), 2, "valid")),
        (ops.max_pool, (2, 1, "same")),
        (ops.average_pool, (2, None, "valid")),
    ):
        expected = function(last, *given).numpy().transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(function(x, *given, data_format="channels_first"), expected)
    with pytest.raises(ConfigError, match="data_format='NCHW': expected None"):
        ops.max_pool(x, 2, data_format="NCHW")
    with pytest.raises(ConfigError, match="conv_transpose with `output_padding`"):
        ops.conv_transpose(last, kernel.transpose(0, 1, 3, 2), output_padding=1)
