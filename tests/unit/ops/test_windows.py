"""Blocks, columns and pooling to a size, against loops; against Keras in tests/against_keras."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.gradient import gradients
from dptrain.program.tensor import differentiable

RNG = np.random.default_rng(3)
IMAGES = RNG.normal(size=(2, 4, 6, 8))


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_blocks_there_and_back(data_format):
    wide = ops.depth_to_space(IMAGES, 2, data_format)
    assert wide.shape == ((2, 8, 12, 2) if data_format == "channels_last" else (2, 1, 12, 16))
    np.testing.assert_array_equal(ops.space_to_depth(wide, 2, data_format), IMAGES)


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": (1, 0)}, {"dilation": (1, 2), "stride": (2, 1)}])
def test_columns_and_their_sums(options):
    """`fold` is the transpose of `unfold`: both see the same pairs of a pixel and a place in a column."""
    columns = ops.unfold(IMAGES, (3, 2), **options).numpy()
    weights = RNG.normal(size=columns.shape)
    back = ops.fold(weights, (6, 8), (3, 2), **options).numpy()
    assert back.shape == IMAGES.shape
    np.testing.assert_allclose((columns * weights).sum(), (IMAGES * back).sum(), rtol=1e-12)
    x = differentiable(IMAGES)
    (gradient,) = gradients(ops.unfold(x, (3, 2), **options), [x], weights)
    np.testing.assert_allclose(gradient, back, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_pooling_to_a_size(size):
    """Window i of n reaches from floor(i length / n) to ceil((i + 1) length / n)."""
    for function, reference in ((ops.adaptive_average_pool, np.mean), (ops.adaptive_max_pool, np.max)):
        result = function(IMAGES, (size, 2)).numpy()
        for i in range(size):
            for j in range(2):
                part = IMAGES[:, i * 4 // size : -(-(i + 1) * 4 // size), j * 3 : j * 3 + 3]
                np.testing.assert_allclose(result[:, i, j], reference(part, axis=(1, 2)), rtol=1e-12)


def test_noise_in_decibels():
    assert float(ops.psnr(np.zeros(4), np.full(4, 0.1), 1.0)) == pytest.approx(20, rel=1e-6)


def test_the_nearest_point_of_the_simplex():
    x = differentiable(np.array([[0.5, 2.0, 1.6, -1], [3, 3, 3, 3], [9, 0, 0, 0]]))
    y = ops.sparsemax(x)
    np.testing.assert_allclose(y, [[0, 0.7, 0.3, 0], [0.25] * 4, [1, 0, 0, 0]], rtol=1e-12)
    np.testing.assert_allclose(ops.sparsemax(ops.transpose(x), 0), ops.transpose(y), rtol=1e-12)
    pull = RNG.normal(size=y.shape)
    (gradient,) = gradients(y, [x], pull)
    support = y.numpy() > 0  # the gradient is that of a projection: less the mean over what is not 0
    mean = (pull * support).sum(1, keepdims=True) / support.sum(1, keepdims=True)
    np.testing.assert_allclose(gradient, (pull - mean) * support, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.depth_to_space(IMAGES, 1), "`block_size` must be at least 2"),
        (lambda: ops.depth_to_space(IMAGES, 3), "8 channels; expected a multiple of 3 x 3"),
        (lambda: ops.space_to_depth(IMAGES, 4), "images of 4 x 6; expected multiples of 4"),
        (lambda: ops.space_to_depth(IMAGES[0], 2), "expected 4 axes"),
        (lambda: ops.unfold(IMAGES[0], 2), "must be a 4D tensor"),
        (lambda: ops.unfold(IMAGES, 9), "windows of 9 pixels do not fit into images of 6"),
        (lambda: ops.unfold(IMAGES, 2, stride=0), "stride=0: expected one or two integers of at least 1"),
        (lambda: ops.fold(IMAGES, 4, 2), "must be a 3D tensor"),
        (
            lambda: ops.fold(np.zeros((1, 4, 5)), 4, 2),
            r"fold: columns of shape \(4, 5\); expected \(a multiple of 2 x 2, 9\)",
        ),
        (lambda: ops.adaptive_max_pool(IMAGES, (1, 2, 3)), "expected 2 integers of at least 1"),
        (lambda: ops.adaptive_average_pool(IMAGES[0, 0], 2), "expected rank 3 to 5"),
        (lambda: ops.psnr(IMAGES, IMAGES[:, :2], 1), "must match for PSNR"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
