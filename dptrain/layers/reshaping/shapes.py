"""Changes of shape: Flatten, Reshape, Permute, RepeatVector."""

import math
from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import positive
from dptrain.layers.base import Layer
from dptrain.layers.input_spec import InputSpec
from dptrain.ops.nn.spatial import channels_last
from dptrain.program.dims import quotient
from dptrain.program.shapes import differ
from dptrain.program.tensor import Tensor
from dptrain.runtime.image_format import checked_format


class Flatten(Layer):
    """Reshapes (rows, a, b, ...) to (rows, a * b * ...), (rows,) to (rows, 1).

    With `data_format` "channels_first" the channels, the first axis after the rows, first become the last axis.
    """

    _moves_values = True

    def __init__(self, data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.data_format = checked_format(data_format)
        self.input_spec = InputSpec(min_ndim=1)

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, features)."""
        x = channels_last(inputs) if self.data_format == "channels_first" and inputs.ndim > 1 else inputs
        return ops.reshape(x, (x.shape[0], math.prod(x.shape[1:])))


class Reshape(Layer):
    """Reshapes (rows, ...) to (rows, *target_shape); one length may be -1, for the rest."""

    _moves_values = True

    def __init__(self, target_shape: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.target_shape = tuple(target_shape)
        if any(isinstance(n, bool) or not isinstance(n, int) or (n < 1 and n != -1) for n in self.target_shape):
            raise ConfigError(
                f"`target_shape` must be positive integers, or -1 once. Received: target_shape={self.target_shape}"
            )
        if self.target_shape.count(-1) > 1:
            raise ConfigError(
                f"There must be at most one unknown dimension (-1) in target_shape. Received: {self.target_shape}."
            )

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, *target_shape)."""
        size = math.prod(inputs.shape[1:])
        known_size = math.prod(n for n in self.target_shape if n != -1)
        shape = tuple(quotient(size, known_size) if n == -1 else n for n in self.target_shape)
        if differ(math.prod(shape), size):
            raise ConfigError(
                f"layer {self._display_name!r}: the total size of the samples must be unchanged. "
                f"Received: input_shape={inputs.shape[1:]}, target_shape={self.target_shape}"
            )
        return ops.reshape(inputs, (inputs.shape[0], *shape))


class Permute(Layer):
    """Permutes the axes of samples; in `dims` the first after the rows is 1."""

    _moves_values = True

    def __init__(self, dims: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.dims = tuple(dims)
        if sorted(self.dims) != list(range(1, len(self.dims) + 1)):
            raise ConfigError(
                "Invalid permutation argument `dims` for Permute Layer. The set of indices in `dims` must be "
                f"consecutive and start from 1. Received dims={self.dims}"
            )
        self.input_spec = InputSpec(ndim=len(self.dims) + 1)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the input with its axes in that order."""
        return ops.transpose(inputs, (0, *self.dims))


class RepeatVector(Layer):
    """Repeats (rows, features) as (rows, n, features), n at least 1."""

    _moves_values = True

    def __init__(self, n: int, **options: Any) -> None:
        super().__init__(**options)
        self.n = positive("n", n)
        self.input_spec = InputSpec(ndim=2)

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, n, features)."""
        rows, features = inputs.shape
        return ops.broadcast_to(ops.expand_dims(inputs, 1), (rows, self.n, features))
