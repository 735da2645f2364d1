"""Lambda: a user's function as a layer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from dptrain import activations
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.program.shapes import without_rows
from dptrain.program.tensor import Tensor, constant, is_whole
from dptrain.program.tree import map_leaves
from dptrain.registry.serialization import custom_object_or_name, custom_object_scope
from dptrain.runtime.text import short


class Lambda(Layer):
    """y = function(x).

    It has no weights: variables that the function uses are not the layer's, so write a `Layer` for those.

    A file holds the name of a function that `def` defines, never code: loading takes it from `custom_objects` or
    `register_keras_serializable`. A Python lambda has no name and can neither be saved nor loaded.

    Args:
        function: of a tensor or nested tensors, in ops; gets `training` and `mask` if these are parameters.
        output_shape: shape of an output sample, or a function of the input's shape; only checked, as it is inferred.
        mask: the mask of the output, or a function of the inputs and their mask; None ends masks here.
        arguments: further keyword arguments of the function.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        output_shape: Sequence[int | None] | Callable[[Any], Any] | None = None,
        mask: Any = None,
        arguments: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        resolved, shape, mask = (
            custom_object_or_name(function),
            custom_object_or_name(output_shape),
            custom_object_or_name(mask),
        )
        self.mask = mask if mask is None or callable(mask) else np.asarray(mask)
        self.supports_masking = mask is not None
        resolved = activations.get(resolved) if isinstance(resolved, str) else resolved
        if not callable(resolved):
            raise ConfigError(f"Lambda: function = {short(resolved)}: expected a function of tensors")
        if not (shape is None or callable(shape) or isinstance(shape, list | tuple)):
            raise ConfigError(f"Lambda: output_shape = {short(shape)}: expected a shape or a function of the input's")
        self.function: Callable[..., Any] = resolved
        self.output_shape = tuple(shape) if isinstance(shape, list | tuple) else shape
        self.arguments = dict(arguments or {})

    def _rounds(self, value: Tensor) -> bool:
        return not is_whole(value)  # ids are left to the user's function

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return what the argument `mask` says."""
        if callable(self.mask):
            return self.mask(inputs, mask)
        return None if self.mask is None else constant(self.mask)

    def call(self, inputs: Any, mask: Any = None, training: bool = False) -> Any:
        """Return the function of the inputs; ConfigError if its shape is not `output_shape`."""
        accepted = _parameters(self.function)
        optional = {"training": training, "mask": mask}
        outputs = self.function(
            inputs, **self.arguments, **{name: optional[name] for name in optional if name in accepted}
        )
        if self.output_shape is not None:
            self._check(inputs, outputs)
        return outputs

    def _get_own_config(self) -> dict[str, Any]:
        """Describe functions, as in Keras; leave out what is None."""
        entries: dict[str, Any] = {"function": self.function, "output_shape": self.output_shape, "mask": self.mask}
        described = {
            name: _function_to_dict(value) if callable(value) else np.asarray(value).tolist()
            for name, value in entries.items()
            if value is not None
        }
        return described | {"arguments": self.arguments}

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool | None = None,
    ) -> Self:
        """Return the layer that `config` describes; `custom_objects` are functions by name; no code is run."""
        with custom_object_scope(custom_objects):
            return super().from_config(config)

    def _check(self, inputs: Any, outputs: Any) -> None:
        returned = map_leaves(lambda _, tensor: without_rows(tensor.shape), outputs)
        if callable(self.output_shape):
            expected = self.output_shape(map_leaves(lambda _, tensor: without_rows(tensor.shape), inputs))
        else:
            expected = (None, *self.output_shape)
        if isinstance(outputs, Tensor) and not _fits(returned, expected):
            raise ConfigError(
                f"layer {self._display_name!r}: the function returns shape {returned}, output_shape says {expected}"
            )


def _function_to_dict(function: Callable[..., Any]) -> dict[str, Any]:
    described = activations.serialize(function)
    if isinstance(described, str):
        return {"module": "builtins", "class_name": "function", "config": described, "registered_name": "function"}
    return described


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function not written in Python
        return {}


def _fits(shape: Sequence[int | None], expected: Sequence[int | None]) -> bool:
    pairs = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(
        length == expected_length or None in (length, expected_length) for length, expected_length in pairs
    )
