"""Spectrograms of signals."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import ops
from dptrain.errors import ArgumentTypeError, ConfigError
from dptrain.initializers.fourier import STFT
from dptrain.layers.base import BuildShape, Layer
from dptrain.ops.math.roots import root_of_squares
from dptrain.program.tensor import Tensor
from dptrain.runtime.image_format import checked_format
from dptrain.runtime.types import is_floating

Array = npt.NDArray[Any]
# The mel scale: mel(f) = 1127 log(1 + f / 700).
_BREAK, _QUALITY = 700.0, 1127.0


class MelSpectrogram(Layer):
    """The power of a signal's frequencies over time, in bands of equal width on the mel scale.

    Signals (rows, samples) or (samples,) become (rows, num_mel_bins, time) or (num_mel_bins, time).

    Source: S. Young et al., "The HTK book", for the mel scale.

    Args:
        fft_length: of a window's transform.
        sequence_stride: between two windows.
        sequence_length: of a window, at most `fft_length`, which is the default.
        window: "hann", "hamming" or weights.
        sampling_rate: samples per second.
        num_mel_bins: number of bands.
        min_freq, max_freq: in Hz; the highest is by default half of the rate.
        power_to_db: return decibels.
        top_db: greatest distance of decibels below their maximum.
        mag_exp: the power of the magnitudes that is summed.
        min_power, ref_power: the least power that counts, and that of 0 dB.
    """

    def __init__(
        self,
        fft_length: int = 2048,
        sequence_stride: int = 512,
        sequence_length: int | None = None,
        window: Any = "hann",
        sampling_rate: int = 16000,
        num_mel_bins: int = 128,
        min_freq: float = 20.0,
        max_freq: float | None = None,
        power_to_db: bool = True,
        top_db: float = 80.0,
        mag_exp: float = 2.0,
        min_power: float = 1e-10,
        ref_power: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.fft_length, self.sequence_stride = fft_length, sequence_stride
        self.sequence_length = sequence_length or fft_length
        if self.fft_length < self.sequence_length:
            raise ConfigError(
                "`fft_length` must be greater than or equal to   `sequence_length`. Received: `sequence_length`="
                f"{self.sequence_length}, `fft_length`={self.fft_length}."
            )
        self.window, self.sampling_rate, self.num_mel_bins = window, sampling_rate, num_mel_bins
        self.min_freq, self.max_freq = min_freq, max_freq or int(sampling_rate / 2)
        self.power_to_db, self.top_db, self.mag_exp = power_to_db, top_db, mag_exp
        self.min_power, self.ref_power = min_power, ref_power
        self.built = True

    def call(self, inputs: Any) -> Tensor:
        """Return the spectrograms of signals (..., samples)."""
        dtype = self.compute_dtype if self.compute_dtype in ("float32", "float64") else "float32"
        signals = ops.cast(inputs, dtype)
        lengths = (self.sequence_length, self.sequence_stride, self.fft_length)
        real, imaginary = ops.stft(signals, *lengths, window=self.window, center=True)
        power = ops.power(root_of_squares(ops.square(real) + ops.square(imaginary)), self.mag_exp)
        weights = self.linear_to_mel_weight_matrix(
            self.num_mel_bins, int(power.shape[-1]), self.sampling_rate, self.min_freq, self.max_freq, dtype
        )
        bands = ops.matmul(power, weights)
        if self.power_to_db:
            bands = self._decibels(bands)
        return ops.cast(ops.swapaxes(bands, -1, -2), self.compute_dtype)

    def _decibels(self, power: Tensor) -> Tensor:
        """Return decibels, at most `top_db` below the greatest of the batch."""
        decibels = 10.0 * ops.log10(ops.maximum(power, self.min_power))
        decibels = decibels - 10.0 * math.log10(max(abs(self.ref_power), self.min_power))
        return ops.maximum(decibels, ops.max(decibels) - self.top_db)

    def linear_to_mel_weight_matrix(
        self,
        num_mel_bins: int = 20,
        num_spectrogram_bins: int = 129,
        sampling_rate: float = 8000,
        lower_edge_hertz: float = 125.0,
        upper_edge_hertz: float = 3800.0,
        dtype: str = "float32",
    ) -> Array:
        """Return the weights (frequencies, bands) of frequencies in bands: triangles of height 1.

        `num_spectrogram_bins` frequencies reach from 0 to half of the rate, the bands from lower to upper edge.
        """

        def mel(hertz: Any) -> Any:
            return _QUALITY * np.log(1 + np.asarray(hertz, np.float64) / _BREAK)

        frequencies = mel(np.linspace(0, sampling_rate / 2, num_spectrogram_bins)[1:, None])
        edges = np.linspace(mel(lower_edge_hertz), mel(upper_edge_hertz), num_mel_bins + 2)
        lower, center, upper = edges[:-2], edges[1:-1], edges[2:]
        rising, falling = (frequencies - lower) / (center - lower), (upper - frequencies) / (upper - center)
        triangles = np.maximum(0, np.minimum(rising, falling))
        return np.pad(triangles, [(1, 0), (0, 0)]).astype(dtype)  # a constant signal is in no band


class STFTSpectrogram(Layer):
    """The Fourier transforms of windows of signals, by convolutions with optionally trained kernels.

    Signals (rows, time, channels), or (rows, channels, time), become (rows, time, channels * frequencies).

    Args:
        mode: "log", "magnitude", "psd", "real", "imag", "angle" or "stft", both real and imaginary parts.
        frame_length: of a window.
        frame_step: between two windows; by default half of the length.
        fft_length: of a window's transform; by default the next power of 2.
        window: "hann", "hamming", weights or None.
        periodic: use a periodic window.
        scaling: "density", "spectrum" or None.
        padding: "valid" or "same".
        expand_dims: return (rows, time, frequencies, channels).
        data_format: "channels_last" or "channels_first".

    Attributes:
        real_kernel, imag_kernel: (frame_length, 1, frequencies).
    """

    _MODES = ("log", "magnitude", "psd", "real", "imag", "angle", "stft")
    # Keras' epsilon, the least power and the least magnitude.
    _LEAST = 1e-7

    def __init__(
        self,
        mode: str = "log",
        frame_length: int = 256,
        frame_step: int | None = None,
        fft_length: int | None = None,
        window: Any = "hann",
        periodic: bool = False,
        scaling: str | None = "density",
        padding: str = "valid",
        expand_dims: bool = False,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if frame_step is not None and not 1 <= frame_step <= frame_length:
            raise ConfigError(
                "`frame_step` should be a positive integer not greater than `frame_length`. Received "
                f"frame_step={frame_step}, frame_length={frame_length}"
            )
        if fft_length is not None and fft_length < frame_length:
            raise ConfigError(
                "`fft_length` should be not less than `frame_length`. Received "
                f"fft_length={fft_length}, frame_length={frame_length}"
            )
        if mode not in self._MODES:
            raise ConfigError(
                f"Output mode is invalid, it must be one of {', '.join(self._MODES)}. Received: mode={mode}"
            )
        if scaling not in (None, "density", "spectrum"):
            raise ConfigError(
                f"Scaling is invalid, it must be `None`, 'density' or 'spectrum'. Received scaling={scaling}"
            )
        if padding not in ("valid", "same"):
            raise ConfigError(f"Padding is invalid, it should be 'valid', 'same'. Received: padding={padding}")
        self.mode, self.frame_length, self.frame_step, self.fft_length = mode, frame_length, frame_step, fft_length
        self.window, self.periodic, self.scaling = window, periodic, scaling
        self.padding, self.expand_dims = padding, expand_dims
        self.data_format = checked_format(data_format)
        STFT("real", window, scaling)  # refuses unknown windows

    @property
    def _step(self) -> int:
        return self.frame_step or self.frame_length // 2

    @property
    def _transform_length(self) -> int:
        return self.fft_length or 2 ** math.ceil(math.log2(self.frame_length))

    def build(self, input_shape: BuildShape) -> None:
        """Make the kernels of the Fourier transform."""
        shape = (self.frame_length, 1, self._transform_length // 2 + 1)
        if self.mode != "imag":
            initializer = STFT("real", self.window, self.scaling, self.periodic)
            self.real_kernel = self.add_weight(shape=shape, initializer=initializer, name="real_kernel")
        if self.mode != "real":
            initializer = STFT("imag", self.window, self.scaling, self.periodic)
            self.imag_kernel = self.add_weight(shape=shape, initializer=initializer, name="imag_kernel")
        self.built = True

    def call(self, inputs: Any) -> Tensor:
        """Return the spectrograms of signals."""
        if not is_floating(inputs.dtype):
            raise ArgumentTypeError(
                "Invalid input type. Expected `float16`, `float32` or `float64`. Received: input "
                f"type={inputs.dtype.name}"
            )
        first = self.data_format == "channels_first"
        signals = inputs if first else ops.transpose(inputs, (0, 2, 1))
        channels, times = int(signals.shape[1]), int(signals.shape[2])
        flat = ops.reshape(signals, (-1, times, 1))

        def along(kernel: Any) -> Tensor:
            """Return (rows, channels, time, frequencies)."""
            frames = ops.conv(
                flat,
                ops.cast(kernel, flat.dtype),
                strides=self._step,
                padding=self.padding,
                data_format="channels_last",
            )
            return ops.reshape(frames, (-1, channels, *frames.shape[1:]))

        return self._output_layout(
            self._combined(
                None if self.mode == "imag" else along(self.real_kernel),
                None if self.mode == "real" else along(self.imag_kernel),
            )
        )

    def _combined(self, real: Tensor | None, imaginary: Tensor | None) -> Tensor:
        if real is None or imaginary is None:
            part = imaginary if real is None else real
            assert part is not None
            return part
        if self.mode == "angle":
            return ops.arctan2(imaginary, real)
        if self.mode == "stft":
            return ops.concatenate([real, imaginary], -1)
        power = ops.square(real) + ops.square(imaginary)
        if self.mode == "psd":  # the other half of the spectrum mirrors this one
            return power + ops.pad(power[..., 1:-1], [(0, 0), (0, 0), (0, 0), (1, 1)])
        magnitude = ops.sqrt(ops.maximum(power, self._LEAST))
        return magnitude if self.mode == "magnitude" else ops.log(ops.maximum(magnitude, self._LEAST))

    def _output_layout(self, spectra: Tensor) -> Tensor:
        """Return (rows, channels, time, frequencies) in the requested layout."""
        first = self.data_format == "channels_first"
        if self.expand_dims:
            return spectra if first else ops.transpose(spectra, (0, 2, 3, 1))
        _, channels, times, frequencies = spectra.shape
        joined = ops.reshape(ops.transpose(spectra, (0, 1, 3, 2)), (-1, channels * frequencies, times))
        return joined if first else ops.transpose(joined, (0, 2, 1))
