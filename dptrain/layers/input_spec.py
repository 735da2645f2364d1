"""InputSpec: a layer's requirements on its inputs, checked with one-line errors."""

from collections.abc import Mapping, Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.shapes import without_rows
from dptrain.program.tensor import Tensor
from dptrain.program.tree import leaves


class InputSpec:
    """Rank and lengths of an input, including the rows of the batch.

    Args:
        shape: lengths, None for any; its length is the rank.
        ndim, max_ndim, min_ndim: the rank, and its limits.
        axes: lengths by axis.
        optional: whether the input may be None.
        dtype, allow_last_axis_squeeze, name: kept, not checked, as in Keras.
    """

    def __init__(
        self,
        dtype: str | None = None,
        shape: Sequence[int | None] | None = None,
        ndim: int | None = None,
        max_ndim: int | None = None,
        min_ndim: int | None = None,
        axes: Mapping[int, int | None] | None = None,
        allow_last_axis_squeeze: bool = False,
        name: str | None = None,
        optional: bool = False,
    ) -> None:
        self.allow_last_axis_squeeze, self.name, self.optional = allow_last_axis_squeeze, name, optional
        self.dtype, self.shape = dtype, None if shape is None else tuple(shape)
        self.ndim = ndim if self.shape is None else len(self.shape)
        self.max_ndim, self.min_ndim = max_ndim, min_ndim
        self.axes = {int(axis): length for axis, length in (axes or {}).items()}
        self.axes |= {axis: n for axis, n in enumerate(self.shape or ()) if axis and n is not None}

    def __repr__(self) -> str:
        parts = {"shape": self.shape, "ndim": self.ndim, "max_ndim": self.max_ndim, "min_ndim": self.min_ndim}
        settings = [f"{name}={value}" for name, value in parts.items() if value is not None]
        return f"InputSpec({', '.join([*settings, *([f'axes={self.axes}'] if self.axes else [])])})"


def check(spec: Any, inputs: Any, name: str) -> None:
    """Refuse inputs that do not match a layer's `input_spec`, or its list of one per input."""
    specs, tensors = leaves(spec), leaves(inputs)
    if len(specs) != len(tensors):
        raise ConfigError(
            f'Layer "{name}" expects {len(specs)} input(s), but it received {len(tensors)} input tensors.'
        )
    for number, (input_spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
        if not isinstance(tensor, Tensor):
            continue
        shape, ndim = without_rows(tensor.shape), tensor.ndim
        wrong = f'Input {number} of layer "{name}" is incompatible with the layer:'
        if input_spec.ndim is not None and ndim != input_spec.ndim:
            raise ConfigError(
                f"{wrong} expected ndim={input_spec.ndim}, found ndim={ndim}. Full shape received: {shape}"
            )
        if input_spec.max_ndim is not None and ndim > input_spec.max_ndim:
            raise ConfigError(f"{wrong} expected max_ndim={input_spec.max_ndim}, found ndim={ndim}")
        if input_spec.min_ndim is not None and ndim < input_spec.min_ndim:
            raise ConfigError(
                f"{wrong} expected min_ndim={input_spec.min_ndim}, found ndim={ndim}. Full shape received: {shape}"
            )
        for axis, length in input_spec.axes.items():
            if length is not None and shape[axis] not in (length, None):
                raise ConfigError(
                    f"{wrong} expected axis {axis} of input shape to have value {length}, "
                    f"but received input with shape {shape}"
                )
