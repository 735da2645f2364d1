"""Initial values with a variance set by the parameter's shape."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.initializers.base import RandomInitializer, Values, truncated_normal
from dptrain.registry.serialization import plain

# Standard deviation of a standard normal distribution cut off at 2.
_TRUNCATED_DEVIATION = 0.87962566103423978
_MODES = ("fan_in", "fan_out", "fan_avg")
_DISTRIBUTIONS = ("uniform", "truncated_normal", "untruncated_normal")


class VarianceScaling(RandomInitializer):
    """Variance scale / n, where n is the fan-in, the fan-out or their mean.

    Args:
        scale: above 0.
        mode: "fan_in", "fan_out" or "fan_avg".
        distribution: "truncated_normal" (or "normal"), "untruncated_normal" or "uniform".
        seed: see `RandomInitializer`.
        input_axes: whose lengths make up the fan-in; by default all axes but the last.
        output_axes: whose lengths make up the fan-out; by default all but the second to last.
    """

    def __init__(
        self,
        scale: float = 1.0,
        mode: str = "fan_in",
        distribution: str = "truncated_normal",
        seed: int | None = None,
        input_axes: Sequence[int] | None = None,
        output_axes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(seed)
        if not scale > 0:
            raise ConfigError(f"Argument `scale` must be positive float. Received: scale={scale}")
        if mode not in _MODES:
            raise ConfigError(f"Invalid `mode` argument: {mode}. Please use one of {_MODES}")
        distribution = "truncated_normal" if distribution == "normal" else distribution
        if distribution not in _DISTRIBUTIONS:
            raise ConfigError(f"Invalid `distribution` argument: {distribution}. Please use one of {_DISTRIBUTIONS}")
        self.input_axes = None if input_axes is None else tuple(input_axes)
        self.output_axes = None if output_axes is None else tuple(output_axes)
        self.scale, self.mode, self.distribution = float(scale), mode, distribution

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> Values:
        fan_in, fan_out = fans(shape, self.input_axes, self.output_axes)
        n = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[self.mode]
        deviation = math.sqrt(self.scale / max(1.0, n))
        numbers = self._numbers(seed, position)
        if self.distribution == "uniform":
            limit = math.sqrt(3.0 * self.scale / max(1.0, n))
            return numbers.uniform(-limit, limit, shape)
        if self.distribution == "untruncated_normal":
            return deviation * numbers.standard_normal(shape)
        return deviation / _TRUNCATED_DEVIATION * truncated_normal(numbers, shape)

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments; for named schemes, the seed and what Keras writes with it."""
        config: dict[str, Any] = {
            "seed": plain(self.seed),
            "input_axes": self.input_axes,
            "output_axes": self.output_axes,
        }
        if type(self) is VarianceScaling:
            config |= {"scale": self.scale, "mode": self.mode, "distribution": self.distribution}
        return config


class _Scheme(VarianceScaling):
    """A named choice of scale, mode and distribution."""

    _arguments: tuple[float, str, str]

    def __init__(
        self,
        seed: int | None = None,
        input_axes: Sequence[int] | None = None,
        output_axes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(*self._arguments, seed, input_axes, output_axes)


class GlorotUniform(_Scheme):
    """Uniform on [-limit, limit) with limit = sqrt(6 / (fan_in + fan_out)).

    Source: X. Glorot and Y. Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    AISTATS 2010, equation 16.
    """

    _arguments = (1.0, "fan_avg", "uniform")


class GlorotNormal(_Scheme):
    """Truncated normal with variance 2 / (fan_in + fan_out). Source: see `GlorotUniform`."""

    _arguments = (1.0, "fan_avg", "truncated_normal")


class HeUniform(_Scheme):
    """Uniform on [-limit, limit) with limit = sqrt(6 / fan_in).

    Source: K. He et al., "Delving deep into rectifiers", ICCV 2015.
    """

    _arguments = (2.0, "fan_in", "uniform")


class HeNormal(_Scheme):
    """Truncated normal with variance 2 / fan_in. Source: see `HeUniform`."""

    _arguments = (2.0, "fan_in", "truncated_normal")


class LecunUniform(_Scheme):
    """Uniform on [-limit, limit) with limit = sqrt(3 / fan_in).

    Source: Y. LeCun et al., "Efficient BackProp", 1998, section 4.6.
    """

    _arguments = (1.0, "fan_in", "uniform")


class LecunNormal(_Scheme):
    """Truncated normal with variance 1 / fan_in. Source: see `LecunUniform`."""

    _arguments = (1.0, "fan_in", "truncated_normal")


def fans(
    shape: tuple[int, ...], input_axes: Sequence[int] | None = None, output_axes: Sequence[int] | None = None
) -> tuple[int, int]:
    """Return (fan_in, fan_out) of a parameter: a kernel is (..., inputs, outputs), a vector counts for both."""
    if input_axes is not None and output_axes is not None:
        return math.prod(shape[axis] for axis in input_axes), math.prod(shape[axis] for axis in output_axes)
    if len(shape) < 2:
        size = shape[0] if shape else 1
        return size, size
    field = int(np.prod(shape[:-2]))
    return shape[-2] * field, shape[-1] * field
