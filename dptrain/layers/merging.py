"""Layers of several inputs, and the same as functions: sums, products, extremes, concatenation, dot products."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import axis_number
from dptrain.layers.base import Layer
from dptrain.program.shapes import differ, without_rows
from dptrain.program.tensor import Tensor, mask_of, with_mask


class _Merge(Layer):
    """Merges a list of at least two tensors."""

    _passes_masks = True

    def build(self, input_shape: Any) -> None:
        """Check that there are several inputs."""
        if not isinstance(input_shape, list | tuple) or not all(isinstance(shape, tuple) for shape in input_shape):
            raise ConfigError(
                f"A merge layer should be called on a list of inputs. Received: input_shape={input_shape} "
                "(not a list of shapes)"
            )
        if not input_shape:
            raise ConfigError("A merge layer should be called on a list of at least 1 input. Received 0 inputs.")
        for shape in input_shape:
            if len(shape) < 1:
                raise ConfigError(f"Expected inputs with a batch dimension. Received: input_shape={input_shape}")

    def compute_mask(self, inputs: Any, mask: Any = None) -> Tensor | None:
        """Return which steps count in any of the inputs; None if one has no mask."""
        masks = _masks_of_each(inputs, mask)
        return None if any(mask is None for mask in masks) else functools.reduce(ops.logical_or, masks)


class Add(_Merge):
    """The sum of the inputs, which are broadcast together row by row."""

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the sum."""
        return functools.reduce(ops.add, _of_equal_rank(inputs))


class Subtract(_Merge):
    """The first of two inputs minus the second."""

    def build(self, input_shape: Any) -> None:
        """Check that there are two inputs."""
        super().build(input_shape)
        if len(input_shape) != 2:
            raise ConfigError(
                f"A `Subtract` layer should be called on exactly 2 inputs. Received: input_shape={input_shape}"
            )

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the difference."""
        return ops.subtract(*_of_equal_rank(inputs))


class Multiply(_Merge):
    """The product of the inputs, element by element; masked steps of an input count as 1."""

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the product, 0 for steps that all masks leave out."""
        inputs = _of_equal_rank(inputs)
        feature_masks = [_feature_mask(tensor) for tensor in inputs]
        masks = [mask for mask in feature_masks if mask is not None]
        factors = [
            tensor if mask is None else ops.where(mask, tensor, ops.ones_like(tensor))
            for tensor, mask in zip(inputs, feature_masks, strict=True)
        ]
        product = functools.reduce(ops.multiply, factors)
        if len(masks) < len(inputs):
            return product
        counts = functools.reduce(ops.logical_or, masks)
        return _with_steps(ops.where(counts, product, ops.zeros_like(product)), counts)


class Average(_Merge):
    """The mean of the inputs, element by element."""

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the mean."""
        return functools.reduce(ops.add, _of_equal_rank(inputs)) / float(len(inputs))


class Maximum(_Merge):
    """The greatest of the inputs, element by element, ignoring masked steps."""

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the maximum."""
        return _extreme(ops.maximum, inputs)


class Minimum(_Merge):
    """The least of the inputs, element by element, ignoring masked steps."""

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the minimum."""
        return _extreme(ops.minimum, inputs)


class Concatenate(_Merge):
    """Concatenates the inputs along `axis`; that of the rows is 0."""

    _moves_values = True

    def __init__(self, axis: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self.axis = axis_number(axis)

    def build(self, input_shape: Any) -> None:
        """Check that the shapes differ along the axis alone."""
        super().build(input_shape)
        remaining = [[n for at, n in enumerate(shape) if at != self.axis % len(shape)] for shape in input_shape]
        known_lengths = [{*lengths} - {None} for lengths in zip(*remaining, strict=False)]
        if len({*map(len, remaining)}) > 1 or any(len(lengths) > 1 for lengths in known_lengths):
            raise ConfigError(
                "A `Concatenate` layer requires inputs with matching shapes except for the concatenation axis. "
                f"Received: input_shape={input_shape}"
            )

    def compute_mask(self, inputs: Any, mask: Any = None) -> Tensor | None:
        """Return the concatenated masks if any input has one; inputs without a mask count."""
        masks = _masks_of_each(inputs, mask)
        if all(mask is None for mask in masks):
            return None
        full_masks = [_full_mask(tensor, mask) for tensor, mask in zip(inputs, masks, strict=True)]
        return ops.any(ops.concatenate(full_masks, axis=self.axis), axis=-1)

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the concatenated inputs."""
        return ops.concatenate(list(inputs), self.axis)


class Dot(_Merge):
    """Dot products of two inputs along an axis of each: (rows, the other axes of the first, then of the second).

    For vectors it is (rows, 1). `axes` is one for both, or one of each, not the rows'; `normalize` brings vectors to
    length 1 first, which gives cosines.
    """

    def __init__(self, axes: int | Sequence[int], normalize: bool = False, **options: Any) -> None:
        super().__init__(**options)
        axis_pair = (axes, axes) if isinstance(axes, int) else tuple(axes)
        if len(axis_pair) != 2 or any(
            isinstance(axis, bool) or not isinstance(axis, int) or not axis for axis in axis_pair
        ):
            raise ConfigError(
                "Invalid type for argument `axes`: it should be an integer or two, but not the batch axis, 0. "
                f"Received: axes={axes}"
            )
        self.axes = axes if isinstance(axes, int) else list(axes)
        self.normalize, self._axis_pair = bool(normalize), axis_pair

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """Return None: the result has no steps."""

    def call(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the dot products."""
        if len(inputs) != 2:
            raise ConfigError(f"A `Dot` layer should be called on exactly 2 inputs. Received: {len(inputs)}")
        parts = []
        for tensor, axis in zip(inputs, self._axis_pair, strict=True):
            place = axis % tensor.ndim
            if self.normalize:
                length = ops.sqrt(ops.maximum(ops.sum(ops.square(tensor), place, keepdims=True), 1e-12))
                tensor = tensor / length
            remaining = [at for at in range(1, tensor.ndim) if at != place]
            lengths = [tensor.shape[at] for at in remaining]
            last = ops.transpose(tensor, (0, *remaining, place))
            size = math.prod(lengths)
            parts.append((ops.reshape(last, (tensor.shape[0], size, tensor.shape[place])), lengths))
        (x, x_rest), (y, y_rest) = parts
        if differ(x.shape[-1], y.shape[-1]):
            shapes = [without_rows(tensor.shape) for tensor in inputs]
            raise ConfigError(
                f"Incompatible input shapes: axis values {int(x.shape[-1])} (at axis {self._axis_pair[0]}) != "
                f"{int(y.shape[-1])} (at axis {self._axis_pair[1]}). Full input shapes: {shapes[0]}, {shapes[1]}"
            )
        product = ops.matmul(x, ops.transpose(y, (0, 2, 1)))
        return ops.reshape(product, (x.shape[0], *(x_rest + y_rest or [1])))


def _of_equal_rank(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs, those of lower rank with axes of length 1 behind the rows', so that rows meet rows."""
    ndim = max(tensor.ndim for tensor in inputs)
    return [
        tensor if tensor.ndim == ndim else ops.expand_dims(tensor, tuple(range(1, 1 + ndim - tensor.ndim)))
        for tensor in inputs
    ]


def _masks_of_each(inputs: Any, masks: Any) -> Sequence[Tensor | None]:
    """Return a mask or None for each input; refuse lists that do not match."""
    if masks is None:
        return [None]
    if not isinstance(masks, list | tuple):
        raise ConfigError(f"`mask` should be a list. Received: mask={masks}")
    if not isinstance(inputs, list | tuple):
        raise ConfigError(f"`inputs` should be a list. Received: inputs={inputs}")
    if len(masks) != len(inputs):
        raise ConfigError(
            "The lists `inputs` and `mask` should have the same length. "
            f"Received: inputs={inputs} of length {len(inputs)}, and mask={masks} of length {len(masks)}"
        )
    return masks


def _feature_mask(tensor: Tensor) -> Tensor | None:
    mask = mask_of(tensor)
    return None if mask is None else ops.broadcast_to(ops.expand_dims(mask, -1), tensor.shape)


def _full_mask(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask in its tensor's shape, true if there is none."""
    if mask is None:
        return ops.ones_like(tensor, dtype="bool")
    return ops.broadcast_to(ops.expand_dims(mask, -1), tensor.shape) if mask.ndim < tensor.ndim else mask


def _with_steps(output: Tensor, counts: Tensor) -> Tensor:
    """Attach an element-wise mask to an output as a mask of steps."""
    return with_mask(output, ops.any(counts, axis=-1))


def _extreme(extreme: Callable[[Any, Any], Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """Return the maximum or minimum of unmasked elements, from first to last as Keras does."""
    inputs = _of_equal_rank(inputs)
    output, counts = inputs[0], _feature_mask(inputs[0])
    for tensor in inputs[1:]:
        mask = _feature_mask(tensor)
        tensor = tensor if mask is None else ops.where(mask, tensor, output)
        output = output if counts is None else ops.where(counts, output, tensor)
        counts = None if mask is None or counts is None else ops.logical_or(counts, mask)
        output = extreme(output, tensor)
    return output if counts is None else _with_steps(output, counts)


def add(inputs: Sequence[Any], **options: Any) -> Any:
    """Return the sum of the inputs; see `Add`."""
    return Add(**options)(inputs)


def subtract(inputs: Sequence[Any], **options: Any) -> Any:
    """Return the first input minus the second; see `Subtract`."""
    return Subtract(**options)(inputs)


def multiply(inputs: Sequence[Any], **options: Any) -> Any:
    """Return the product of the inputs; see `Multiply`."""
    return Multiply(**options)(inputs)


def average(inputs: Sequence[Any], **options: Any) -> Any:
    """Return the mean of the inputs; see `Average`."""
    return Average(**options)(inputs)


def maximum(inputs: Sequence[Any], **options: Any) -> Any:
    """Return the greatest of the inputs; see `Maximum`."""
    return Maximum(**options)(inputs)


def minimum(inputs: Sequence[Any], **options: Any) -> Any:
    """Return the least of the inputs; see `Minimum`."""
    return Minimum(**options)(inputs)


def concatenate(inputs: Sequence[Any], axis: int = -1, **options: Any) -> Any:
    """Return the concatenated inputs; see `Concatenate`."""
    return Concatenate(axis, **options)(inputs)


def dot(inputs: Sequence[Any], axes: int | Sequence[int] = -1, **options: Any) -> Any:
    """Return dot products of the inputs; see `Dot`."""
    return Dot(axes, **options)(inputs)
