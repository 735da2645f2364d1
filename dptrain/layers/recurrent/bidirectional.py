"""Bidirectional: a recurrent layer in both directions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.layers.constructor import is_dptrain_class
from dptrain.layers.recurrent.stacked import with_bare_states
from dptrain.program.tensor import Tensor
from dptrain.registry.serialization import custom_object_scope

_MERGE_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": ops.add,
    "mul": ops.multiply,
    "ave": lambda y, y_back: (y + y_back) / 2.0,
    "concat": lambda y, y_back: ops.concatenate([y, y_back], axis=-1),
}


class Bidirectional(Layer):
    """A recurrent layer and a copy of it that goes backwards.

    Source: M. Schuster and K. Paliwal, "Bidirectional recurrent neural networks", 1997.

    Args:
        layer: an `RNN`, or a layer with its arguments; the wrapper makes new layers of its configuration.
        merge_mode: "concat", "sum", "mul" or "ave" of both outputs; None for both.
        weights: of both layers, arrays.
        backward_layer: goes backwards, instead of a copy.
    """

    _unwritten = ("weights", "layer", "backward_layer")
    _passes_masks = True

    def __init__(
        self,
        layer: Any,
        merge_mode: str | None = "concat",
        weights: Sequence[Any] | None = None,
        backward_layer: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(layer, Layer):
            raise ConfigError(
                "Please initialize `Bidirectional` layer with a `keras.layers.Layer` instance. Received: " + str(layer)
            )
        if backward_layer is not None and not isinstance(backward_layer, Layer):
            raise ConfigError(
                f"`backward_layer` need to be a `keras.layers.Layer` instance. Received: {backward_layer}"
            )
        if merge_mode not in (*_MERGE_OPS, None):
            raise ConfigError(
                f"Invalid merge mode. Received: {merge_mode}. Merge mode should be one of "
                '{"sum", "mul", "ave", "concat", None}'
            )
        super().__init__(**options)
        name = layer._display_name
        self.forward_layer: Any = _clone_with(layer, name=f"forward_{name.removeprefix('forward_')}")
        self.backward_layer: Any = backward_layer
        if backward_layer is None:
            name = f"backward_{name.removeprefix('backward_')}"
            self.backward_layer = _clone_with(layer, name=name, go_backwards=True)
        self._check()
        for direction in (self.forward_layer, self.backward_layer):
            if hasattr(direction, "zero_output_for_mask"):
                direction.zero_output_for_mask = direction.return_sequences
        self.merge_mode, self._first_weights = merge_mode, None if not weights else list(weights)
        forward = self.forward_layer
        self.stateful, self.return_sequences = forward.stateful, forward.return_sequences
        self.return_state, self.input_spec = forward.return_state, forward.input_spec

    def _check(self) -> None:
        forward, backward = self.forward_layer, self.backward_layer
        if forward.go_backwards == backward.go_backwards:
            raise ConfigError(
                "Forward layer and backward layer should have different `go_backwards` value. Received: "
                f"forward_layer.go_backwards {forward.go_backwards}, "
                f"backward_layer.go_backwards={backward.go_backwards}"
            )
        for name in ("stateful", "return_sequences", "return_state"):
            values = getattr(forward, name), getattr(backward, name)
            if values[0] != values[1]:
                raise ConfigError(
                    "Forward layer and backward layer are expected to have the same value for attribute "
                    f'"{name}", got "{values[0]}" for forward layer and "{values[1]}" for backward layer'
                )

    def build(self, sequences_shape: Any, initial_state_shape: Any = None) -> None:
        """Make the weights of both layers."""
        for layer in (self.forward_layer, self.backward_layer):
            if not layer.built:
                layer.build(sequences_shape)
                layer.built = True
        if self._first_weights is not None:
            self.set_weights(self._first_weights)

    @property
    def states(self) -> tuple[Any, ...] | None:
        """The states that both layers keep; None without."""
        states = self.forward_layer.states, self.backward_layer.states
        return (*states[0], *states[1]) if states[0] and states[1] else None

    def reset_state(self) -> None:
        """Set the states of both layers to zeros; AttributeError if they keep none."""
        if not self.stateful:
            raise AttributeError("Layer must be stateful.")
        self.forward_layer.reset_state()
        self.backward_layer.reset_state()

    def reset_states(self) -> None:
        """See `reset_state`."""
        self.reset_state()

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the inputs' mask if all steps are returned."""
        mask = mask[0] if isinstance(mask, list | tuple) else mask
        mask = mask if self.return_sequences else None
        return mask if self.merge_mode else (mask, mask)

    def call(
        self, sequences: Tensor, initial_state: Any = None, mask: Tensor | None = None, training: bool | None = None
    ) -> Any:
        """Return the merged outputs, followed by the last states of both layers if they return them.

        Args:
            sequences: (rows, time, features).
            initial_state: states of the forward layer, then of the backward layer; or None.
            mask: (rows, time), False for steps to skip.
            training: passed to both.
        """
        half = 0 if initial_state is None else len(initial_state) // 2
        parts = (None, None) if initial_state is None else (initial_state[:half], initial_state[half:])
        outputs = [
            layer(sequences, initial_state=part, mask=mask, training=training)
            for layer, part in zip((self.forward_layer, self.backward_layer), parts, strict=True)
        ]
        states: tuple[Any, ...] = ()
        if self.return_state:
            states = tuple(state for output in outputs for state in output[1:])
            outputs = [output[0] for output in outputs]
        y, y_back = (ops.cast(output, self.compute_dtype) for output in outputs)
        y_back = ops.flip(y_back, axis=1) if self.return_sequences else y_back
        merged = (y, y_back) if self.merge_mode is None else (_MERGE_OPS[self.merge_mode](y, y_back),)
        return (*merged, *states) if self.return_state or self.merge_mode is None else merged[0]

    def _call_without_values(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        return with_bare_states(super()._call_without_values(arguments, keywords))

    def _get_own_config(self) -> dict[str, Any]:
        import dptrain  # its table of layers has this class

        layers = {"layer": self.forward_layer, "backward_layer": self.backward_layer}
        return super()._get_own_config() | {name: dptrain.layers.serialize(layer) for name, layer in layers.items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return the layer that `config` describes."""
        import dptrain

        described = {name: config.get(name) for name in ("layer", "backward_layer")}
        layers = {
            name: dptrain.layers.deserialize(layer, custom_objects) if isinstance(layer, Mapping) else layer
            for name, layer in described.items()
        }
        return super().from_config({**config, **layers})


def _clone_with(layer: Any, **changed: Any) -> Any:
    """Return a new layer of the same configuration with some arguments changed."""
    import dptrain

    described = dptrain.layers.serialize(layer)
    classes = {type(part).__name__: type(part) for part in layer._flatten_layers() if not is_dptrain_class(type(part))}
    with custom_object_scope(classes):
        return dptrain.layers.deserialize({**described, "config": {**described["config"], **changed}})
