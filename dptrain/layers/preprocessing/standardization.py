"""Normalization: features standardised with the mean and variance of data seen before training."""

from collections.abc import Iterable, Sequence
from numbers import Number
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import BuildShape, Layer
from dptrain.program.tensor import Tensor
from dptrain.program.tree import is_nested, leaves

Array = npt.NDArray[Any]
_EPSILON = 1e-7  # Keras': the least divisor


class Normalization(Layer):
    """y = (x - mean) / max(sqrt(variance), 1e-7), with a mean and variance for each index of the kept axes.

    Both are passed, or `adapt` computes them from data; they are weights that are not trained.

    Source: keras/src/layers/preprocessing/normalization.py, Keras 3.15.

    Args:
        axis: kept axes, whose indices have their own mean and variance; None for a single pair.
        mean, variance: both instead of `adapt`, or neither; broadcast over the kept axes.
        invert: return x * max(sqrt(variance), 1e-7) + mean instead.

    Attributes:
        input_mean, input_variance: the arguments.
        follows_data: whether trainings from the command line set the moments, fold by fold.
    """

    _passes_masks = True

    _unwritten = ("mean", "variance")  # as attributes they read weights, which is collective

    def __init__(
        self,
        axis: int | Sequence[int] | None = -1,
        mean: Any = None,
        variance: Any = None,
        invert: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.axis = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        if (mean is None) != (variance is None):
            raise ConfigError(
                f"When setting values directly, both `mean` and `variance` must be set. Received: mean={mean} and "
                f"variance={variance}"
            )
        if mean is not None and (np.shape(mean) != np.shape(variance) or np.ndim(mean) > len(self.axis)):
            raise ConfigError(
                f"mean of shape {np.shape(mean)} and variance of shape {np.shape(variance)}: expected the same, of at "
                f"most {len(self.axis)} dimensions (axis={self.axis})"
            )
        self.input_mean = None if mean is None else np.asarray(mean, np.float64).tolist()
        self.input_variance = None if variance is None else np.asarray(variance, np.float64).tolist()
        self.invert = bool(invert)
        self.follows_data = False

    def build(self, input_shape: BuildShape) -> None:
        """Make mean and variance, of the kept axes' lengths, unless they were passed."""
        rank = len(input_shape)
        if any(not -rank <= axis < rank for axis in self.axis):
            raise ConfigError(f"axis = {self.axis} of layer {self._display_name!r}: out of range for {rank} dimensions")
        self._kept_axes = sorted(axis % rank for axis in self.axis)
        lengths = [input_shape[axis] for axis in self._kept_axes]
        if None in lengths:
            raise ConfigError(
                f"axis = {self.axis} of layer {self._display_name!r}: the length of the batch axis is not known"
            )
        shape = tuple(int(length or 0) for length in lengths)
        self._broadcast = [
            int(length or 0) if axis in self._kept_axes else 1 for axis, length in enumerate(input_shape)
        ]
        if self.input_mean is None:
            self.adapt_mean = self.add_weight(shape, "zeros", trainable=False, name="mean")
            self.adapt_variance = self.add_weight(shape, "ones", trainable=False, name="variance")
            # Not used; Keras has it for older files.
            self.count = self.add_weight((), "zeros", dtype="int32", trainable=False, name="count")
            return
        try:
            moments = self.input_mean, self.input_variance
            self._fixed_moments = [
                np.broadcast_to(np.asarray(moment), shape).reshape(self._broadcast) for moment in moments
            ]
        except ValueError:
            raise ConfigError(
                f"mean of shape {np.shape(self.input_mean)} of layer {self._display_name!r}: "
                f"expected a shape that broadcasts to {shape}"
            ) from None

    def adapt(self, data: Any) -> None:
        """Compute mean and variance from data, in float64.

        `data` is an array (rows, ...), or an iterable of batches; of tuples the first element counts. ConfigError if
        there are no rows, shapes differ, or mean and variance were passed.
        """
        if self.input_mean is not None:
            raise ConfigError(f"adapt: layer {self._display_name!r} was created with a mean and a variance")
        count, mean, squares = 0, np.float64(0), np.float64(0)
        for array in map(np.asarray, batches_of(data)):  # one at a time: a generator may refill its buffer
            if not array.size:
                continue
            if not self.built:
                shape = array.shape
                self.build(shape if 0 in {axis % len(shape) for axis in self.axis} else (None, *shape[1:]))
            over = self._reduced(array.ndim)
            kept_shape = tuple(np.delete(array.shape, over))
            if kept_shape != self.adapt_mean.shape:
                raise ConfigError(
                    f"adapt of layer {self._display_name!r}: the kept axes have lengths {kept_shape}, "
                    f"expected {self.adapt_mean.shape}"
                )
            # each batch's moments join those before (Chan, Golub and LeVeque)
            number = array.size // max(int(np.prod(kept_shape)), 1)
            batch_mean = array.mean(over, dtype=np.float64)
            delta, count = batch_mean - mean, count + number
            squares = (
                squares + array.var(over, dtype=np.float64) * number + delta**2 * (number * (count - number) / count)
            )
            mean = mean + delta * (number / count)
        if not count:
            raise ConfigError(
                f"adapt of layer {self._display_name!r}: no rows; expected an array, or an iterable of batches"
            )
        self._set_moments(mean, squares / count)
        self.adapt_mean.of_data = self.adapt_variance.of_data = True

    def _set_moments(self, mean: npt.ArrayLike, variance: npt.ArrayLike) -> None:
        """Set the weights, of the kept axes' lengths, like `adapt`."""
        self.adapt_mean.assign(np.asarray(mean, self.adapt_mean.dtype))
        self.adapt_variance.assign(np.asarray(variance, self.adapt_variance.dtype))

    @property
    def mean(self) -> Tensor | None:
        """The mean that is subtracted, in a shape that broadcasts to the inputs; None before `build`."""
        return self._moment(0)

    @property
    def variance(self) -> Tensor | None:
        """The variance, like `mean`."""
        return self._moment(1)

    def _moment(self, number: int) -> Tensor | None:
        if not self.built:
            return None
        if self.input_mean is None:
            weight = (self.adapt_mean, self.adapt_variance)[number]
            return ops.cast(ops.reshape(weight.value, self._broadcast), self.compute_dtype)
        return ops.cast(self._fixed_moments[number], self.compute_dtype)

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments; the axes as a list, as in Keras' files."""
        moments = {"mean": self.input_mean, "variance": self.input_variance}
        return {**super()._get_own_config(), "axis": list(self.axis), **moments}

    def call(self, inputs: Tensor) -> Tensor:
        """Return the input standardised, or with `invert` restored."""
        x = self._floating(inputs)
        if self.input_mean is None:
            mean, variance = (
                ops.reshape(weight.value, self._broadcast) for weight in (self.adapt_mean, self.adapt_variance)
            )
        else:
            mean, variance = (ops.cast(moment, x.dtype) for moment in self._fixed_moments)
        deviation = ops.maximum(ops.sqrt(variance), _EPSILON)
        return x * deviation + mean if self.invert else (x - mean) / deviation

    def _reduced(self, rank: int) -> tuple[int, ...]:
        return tuple(axis for axis in range(rank) if axis not in self._kept_axes)


def is_one_array(data: Any) -> bool:
    """Whether `adapt` received an array, or a list of numbers or strings, rather than batches."""
    if not isinstance(data, list | tuple):
        return hasattr(data, "__array__")
    return all(isinstance(leaf, str | bytes | Number | np.generic) for leaf in leaves(data))


def batches_of(data: Any) -> Iterable[Any]:
    """Yield the batches for `adapt`: x of tuples (x, y) and (x, y, sample_weight)."""
    if is_one_array(data):
        yield np.asarray(data)
        return
    for batch in data:
        is_pair = isinstance(batch, tuple) and any(is_nested(part) or hasattr(part, "__array__") for part in batch)
        yield batch[0] if is_pair else batch
