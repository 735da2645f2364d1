"""Layers around another layer."""

from collections.abc import Mapping
from typing import Any, Self

from dptrain.errors import ConfigError
from dptrain.layers.base import BuildShape, Layer


class Wrapper(Layer):
    """A layer that wraps another one, `layer`."""

    _unwritten = ("layer",)  # not as an argument of JSON types

    def __init__(self, layer: Layer, **options: Any) -> None:
        if not isinstance(layer, Layer):
            raise ConfigError(
                f"Layer {layer} supplied to Wrapper isn't a supported layer type. Please ensure wrapped layer is a "
                "valid Keras layer."
            )
        super().__init__(**options)
        self.layer = layer

    def build(self, input_shape: BuildShape) -> None:
        """Make the weights of the wrapped layer."""
        if not self.layer.built:
            self.layer.build(input_shape)

    def _get_own_config(self) -> dict[str, Any]:
        import dptrain  # its table of layers has this class

        return super()._get_own_config() | {"layer": dptrain.layers.serialize(self.layer)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return the layer that `config` describes, with the wrapped one."""
        import dptrain

        layer = config.get("layer")
        if isinstance(layer, Mapping):
            layer = dptrain.layers.deserialize(layer, custom_objects)
        return super().from_config({**config, "layer": layer})
