"""Kernels of the Fourier transform."""

import math
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.initializers.base import Initializer, Values

_SCALINGS = (None, "density", "spectrum")


class STFT(Initializer):
    """The Fourier transform of windows of signals, the kernel (frame_length, channels, frequencies) of a convolution.

    Args:
        side: "real" or "imag".
        window: "hann", "hamming", weights, or None for ones, which are not scaled.
        scaling: "density" divides weights by the root of the sum of their squares, "spectrum" by their sum.
        periodic: use a periodic window.

    Raises:
        ConfigError: an argument is unknown.
    """

    def __init__(
        self, side: str = "real", window: Any = "hann", scaling: str | None = "density", periodic: bool = False
    ) -> None:
        if side not in ("real", "imag"):
            raise ConfigError(f"side should be 'real' or 'imag', not {side}")
        if isinstance(window, str) and window not in ("hann", "hamming"):
            raise ConfigError(f"window={window!r}: expected 'hann', 'hamming', weights or None")
        if scaling not in _SCALINGS:
            raise ConfigError(
                f"Scaling is invalid, it must be `None`, 'density' or 'spectrum'. Received scaling={scaling}"
            )
        self.side, self.window, self.scaling, self.periodic = side, window, scaling, bool(periodic)

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return the kernel; ConfigError unless there are as many weights as the window is long."""
        frame, _, frequencies = shape
        angles = 2 * math.pi * np.arange(frame)[:, None] * np.arange(frequencies) / max(2 * (frequencies - 1), 1)
        kernel = np.cos(angles) if self.side == "real" else -np.sin(angles)
        if self.window is not None:
            weights = self._weights(frame)
            if self.scaling == "density":
                weights = weights / math.sqrt((weights**2).sum())
            elif self.scaling == "spectrum":
                weights = weights / np.abs(weights).sum()
            kernel = kernel * weights[:, None]
        return np.broadcast_to(kernel[:, None, :], shape).copy()

    def _weights(self, frame: int) -> Values:
        if not isinstance(self.window, str):
            weights = np.asarray(self.window, np.float64)
            if weights.shape != (frame,):
                raise ConfigError(
                    f"The shape of `window` must be equal to [frame_length].Received: window shape={weights.shape}"
                )
            return weights
        function = np.hanning if self.window == "hann" else np.hamming
        return function(frame + 1)[:-1] if self.periodic else function(frame)

    def _get_config(self) -> dict[str, Any]:
        window = (
            self.window if self.window is None or isinstance(self.window, str) else np.asarray(self.window).tolist()
        )
        return {"side": self.side, "window": window, "periodic": self.periodic, "scaling": self.scaling}
