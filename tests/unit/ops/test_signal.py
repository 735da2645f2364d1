"""Fourier transforms, windows, special functions and what rows have to do with each other, against NumPy."""

import math

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError

RNG = np.random.default_rng(0)
X, S = RNG.normal(size=(3, 4, 6)), RNG.normal(size=(2, 50))
PAIR = X, X[::-1].copy()


def together(pair):
    return pair[0].numpy() + 1j * pair[1].numpy()


def test_transforms():
    z = PAIR[0] + 1j * PAIR[1]
    np.testing.assert_allclose(together(ops.fft(PAIR)), np.fft.fft(z), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(together(ops.fft2(PAIR)), np.fft.fft2(z), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(together(ops.ifft2(PAIR)), np.fft.ifft2(z), rtol=1e-12, atol=1e-12)
    for length in (None, 4, 5, 9):
        np.testing.assert_allclose(together(ops.rfft(X, length)), np.fft.rfft(X, length), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(ops.irfft(PAIR, length), np.fft.irfft(z, length), rtol=1e-12, atol=1e-12)
    for argument, message in (
        (X, "a tuple of two tensors"),
        ((X, X[0]), "same shape"),
        ((X > 0, X), "not of type float"),
    ):
        with pytest.raises(ConfigError, match=message):
            ops.fft(argument)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("window", ["hann", "hamming", None, np.arange(1.0, 9)])
def test_windows_of_signals_and_back(center, window):
    real, imaginary = ops.stft(S, 8, 4, 10, window, center)
    weights = (
        {"hann": np.hanning(9)[:8], "hamming": np.hamming(9)[:8]}.get(window) if isinstance(window, str) else window
    )
    weights = np.ones(10) if weights is None else np.pad(weights, 1)
    padded = np.pad(S, ((0, 0), (5, 5)), mode="reflect") if center else S
    frames = np.stack([padded[:, 4 * n : 4 * n + 10] for n in range((padded.shape[1] - 10) // 4 + 1)], 1)
    np.testing.assert_allclose(together((real, imaginary)), np.fft.rfft(frames * weights), rtol=1e-10, atol=1e-10)
    back = ops.istft((real, imaginary), 8, 4, 10, window=window, center=center).numpy()
    inside = slice(0, 40) if center else slice(6, 40)
    times = 1
    if window is None:  # what overlaps is summed: of 10 elements by strides of 4 two or three
        inside = slice(6, 36)
        start = 5 if center else 0
        times = sum((4 * n <= np.arange(50) + start) & (np.arange(50) + start < 4 * n + 10) for n in range(20))[inside]
    np.testing.assert_allclose(back[:, inside], S[:, inside] * times, rtol=1e-9, atol=1e-9)
    assert ops.istft((real, imaginary), 8, 4, 10, 30, window, center).shape == (2, 30)


def test_what_is_no_window():
    with pytest.raises(ConfigError, match='one of `"hann"`'):
        ops.stft(S, 8, 4, 8, "kaiser")
    with pytest.raises(ConfigError, match="equal or larger"):
        ops.stft(S, 8, 4, 6)
    with pytest.raises(ConfigError, match="equal to \\[sequence_length\\]"):
        ops.stft(S, 8, 4, 8, np.ones(5))
    with pytest.raises(TypeError, match="Expected `float32` or `float64`"):
        ops.stft(np.ones((2, 50), np.int32), 8, 4, 8)
    with pytest.raises(ConfigError, match="the signal has only"):
        ops.extract_sequences(S, 60, 1)


@pytest.mark.parametrize("stride", [0, -5, 4.0, True])
def test_strides_are_positive_integers(stride):
    for call in (
        lambda: ops.stft(S, 4, stride, 4),
        lambda: ops.istft(PAIR, 4, stride, 4),
        lambda: ops.extract_sequences(S, 4, stride),
    ):
        with pytest.raises(ConfigError, match="`sequence_stride` must be a positive integer"):
            call()


@pytest.mark.parametrize(
    ("call", "rank"),
    [
        (lambda: ops.rfft(1.0), 1),
        (lambda: ops.fft((1.0, 2.0)), 1),
        (lambda: ops.fft2((X[0, 0], X[0, 0])), 2),
        (lambda: ops.extract_sequences(1.0, 1, 1), 1),
    ],
)
def test_too_few_axes(call, rank):
    with pytest.raises(ConfigError, match=f"rank >= {rank}"):
        call()


def test_special_functions():
    x = np.array([-7, -3, -1, -0.5, -0.2, 0, 0.1, 0.5, 0.7, 1, 2, 3, 4.9, 5.1, 6, 10, 20, 26.0])
    np.testing.assert_allclose(ops.erfc(x), [math.erfc(value) for value in x], rtol=2e-14)
    inside = np.array([-0.999, -0.3, 0, 1e-12, 0.5, 0.9, 1 - 1e-12])
    np.testing.assert_allclose(
        [math.erf(value) for value in ops.erfinv(inside).numpy()], inside, rtol=1e-14, atol=1e-300
    )
    np.testing.assert_array_equal(ops.erfinv(np.array([-1, 1, 2.0])), [-np.inf, np.inf, np.nan])
    np.testing.assert_allclose(ops.i0(x), np.i0(x), rtol=1e-13)
    np.testing.assert_array_equal(ops.angle(np.array([-2.0, 0, 3])), [np.pi, 0, 0])
    np.testing.assert_array_equal(ops.imag(x), np.zeros_like(x))


def test_rows_with_each_other():
    y = X[:, :2] + 1
    np.testing.assert_allclose(ops.cdist(X, y), np.linalg.norm(X[:, :, None] - y[:, None], axis=-1), rtol=1e-12)
    np.testing.assert_allclose(ops.corrcoef(X[0]), np.corrcoef(X[0]), rtol=1e-12)
    np.testing.assert_allclose(ops.corrcoef(X[0, 0]), 1, rtol=1e-12)
    v = RNG.normal(size=9)
    for mode in ("valid", "same", "full"):
        for a, b in ((v, v[:3]), (v[:4], v), (v[:3], v), (v, v[:4]), (v, v)):
            np.testing.assert_allclose(ops.correlate(a, b, mode), np.correlate(a, b, mode), rtol=1e-10, atol=1e-12)
    for call, message in (
        (lambda: ops.cdist(v, v), "rank >= 2"),
        (lambda: ops.cdist(X, X[..., :2]), "must match"),
        (lambda: ops.correlate(v, v, "all"), "mode='all'"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
