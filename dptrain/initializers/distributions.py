"""Initial values from a distribution that does not depend on the parameter's shape."""

from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.initializers.base import RandomInitializer, Values, truncated_normal
from dptrain.registry.serialization import plain


class RandomUniform(RandomInitializer):
    """Uniform on [minval, maxval)."""

    def __init__(self, minval: float = -0.05, maxval: float = 0.05, seed: int | None = None) -> None:
        super().__init__(seed)
        if not minval <= maxval:
            raise ConfigError(f"expected minval <= maxval. Received: minval={minval}, maxval={maxval}")
        self.minval, self.maxval = float(minval), float(maxval)

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        return self._numbers(seed, position).uniform(self.minval, self.maxval, shape)

    def _get_config(self) -> dict[str, Any]:
        return {"seed": plain(self.seed), "minval": self.minval, "maxval": self.maxval}


class _Normal(RandomInitializer):
    """Base of both normal distributions."""

    def __init__(self, mean: float = 0.0, stddev: float = 0.05, seed: int | None = None) -> None:
        super().__init__(seed)
        self.mean, self.stddev = float(mean), _deviation(stddev)

    def _get_config(self) -> dict[str, Any]:
        return {"seed": plain(self.seed), "mean": self.mean, "stddev": self.stddev}


class RandomNormal(_Normal):
    """Normal with this mean and standard deviation, 0 or above."""

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        return self.mean + self.stddev * self._numbers(seed, position).standard_normal(shape)


class TruncatedNormal(_Normal):
    """Normal; values more than two standard deviations from the mean are redrawn. `stddev` is before truncation."""

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        return self.mean + self.stddev * truncated_normal(self._numbers(seed, position), shape)


class Orthogonal(RandomInitializer):
    """A matrix with orthonormal rows or columns, whichever are fewer, times `gain`.

    The orthogonal factor of a normal matrix, with the signs that make it uniformly distributed.
    Source: A. Saxe, J. McClelland and S. Ganguli, "Exact solutions to the nonlinear dynamics of learning in deep linear
    neural networks", ICLR 2014.
    """

    def __init__(self, gain: float = 1.0, seed: int | None = None) -> None:
        super().__init__(seed)
        self.gain = float(gain)

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        """Return the draw; ConfigError if the parameter has fewer than two dimensions."""
        if len(shape) < 2:
            raise ConfigError(
                "The tensor to initialize must be at least two-dimensional. "
                f"Received: shape={shape} of rank {len(shape)}."
            )
        rows, columns = int(np.prod(shape[:-1])), shape[-1]
        normal = self._numbers(seed, position).standard_normal((max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(normal)
        q = q * np.sign(np.diag(r))
        return self.gain * (q.T if rows < columns else q).reshape(shape)

    def _get_config(self) -> dict[str, Any]:
        return {"seed": plain(self.seed), "gain": self.gain}


def _deviation(stddev: float) -> float:
    if not stddev >= 0:
        raise ConfigError(f"expected stddev >= 0. Received: stddev={stddev}")
    return float(stddev)
