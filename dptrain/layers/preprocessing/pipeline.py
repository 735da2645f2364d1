"""A chain of layers as a layer."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.runtime.text import short


class Pipeline(Layer):
    """A chain of layers, usually of preprocessing; not a model."""

    def __init__(self, layers: Sequence[Layer], name: str | None = None) -> None:
        super().__init__(name=name)
        if any(not isinstance(layer, Layer) for layer in layers):
            raise ConfigError(f"Pipeline: expected a list of layers. Received: layers={layers}")
        self.layers = list(layers)

    def call(self, inputs: Any, training: bool = True) -> Any:
        """Return the output of the last layer."""
        for layer in self.layers:
            inputs = layer(inputs, training=training)
        return inputs

    def _get_own_config(self) -> dict[str, Any]:
        import dptrain  # its table of layers has this class

        return {"layers": [dptrain.layers.serialize(layer) for layer in self.layers]}

    def _get_config(self) -> dict[str, Any]:
        return {key: value for key, value in super()._get_config().items() if key in ("layers", "name")}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the layer that `config` describes, with its layers."""
        import dptrain

        described = config.get("layers")
        if not isinstance(described, list | tuple):
            raise ConfigError(f"{cls.__name__}: layers = {short(described)}: expected a list of layers")
        layers = [dptrain.layers.deserialize(layer) if isinstance(layer, Mapping) else layer for layer in described]
        return super().from_config({"name": config.get("name"), "layers": layers})
