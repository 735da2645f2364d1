"""A model as a specification: layers in a row, their shapes, and where their parameters lie."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dptrain.errors import ConfigError
from dptrain.layers import InputLayer, Layer
from dptrain.losses import Loss
from dptrain.params import ParamLayout
from dptrain.registry.names import snake_case


class Architecture:
    """Layers in a row.

    Args:
        layers: at least one; the first states `input_shape` unless `input_shape` is given. An `InputLayer`, which can
            stand before the first, is not counted as a layer.
        input_shape: shape of one sample.
        trainable: False leaves all parameters as they are, whatever the layers say.

    Attributes:
        layers: the layers, each with a name.
        trainable: as given.
        input_shapes: shape of one sample that goes into each layer.
        output_shapes: shape of one sample that comes out of each layer.
        layout: the parameters of all layers in one flat buffer, each named "layer/parameter"; trained are those of
            layers whose `trainable` is True when the architecture is made, if that of the model is.

    Raises:
        ConfigError: no layers, no input shape, two layers of one name, or a layer that cannot take its input.
    """

    def __init__(
        self, layers: Sequence[Layer], input_shape: tuple[int, ...] | None = None, *, trainable: bool = True
    ) -> None:
        if input_shape is None and layers:
            input_shape = layers[0].input_shape
        if layers and isinstance(layers[0], InputLayer):
            layers = layers[1:]
        if not layers:
            raise ConfigError("a model needs at least one layer")
        if any(isinstance(layer, InputLayer) for layer in layers):
            raise ConfigError("an Input can stand only before the first layer")
        if input_shape is None:
            raise ConfigError(
                f"the first layer ({type(layers[0]).__name__}) needs input_shape=(...), the shape of one sample"
            )
        _name_layers(layers)
        self.layers = tuple(layers)
        self.trainable = trainable
        self.input_shapes: list[tuple[int, ...]] = []
        self.output_shapes: list[tuple[int, ...]] = []
        specs = []
        shape = tuple(input_shape)
        for layer in self.layers:
            self.input_shapes.append(shape)
            specs += [
                (f"{layer.name}/{spec.name}", replace(spec, trainable=spec.trainable and layer.trainable and trainable))
                for spec in layer.param_specs(shape)
            ]
            shape = layer.output_shape(shape)
            self.output_shapes.append(shape)
        self.layout = ParamLayout(specs)
        self._flags = self._trainable_flags(trainable)  # which may change, the layout does not

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input sample."""
        return self.input_shapes[0]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of one output sample."""
        return self.output_shapes[-1]

    def as_trainable_now(self, trainable: bool = True) -> "Architecture":
        """Return this architecture laid out by what the layers' `trainable` says now, itself where nothing changed.

        `layout.rearranged` takes the values of the parameters from one to the other.

        Args:
            trainable: what the model's says now.
        """
        if self._flags == self._trainable_flags(trainable):
            return self
        return Architecture(self.layers, self.input_shape, trainable=trainable)

    def _trainable_flags(self, trainable: bool) -> list[bool]:
        return [trainable, *(layer.trainable for layer in self.layers)]

    def layers_for(self, loss: Loss) -> tuple[tuple[Layer, ...], bool]:
        """Return the layers, without the last activation where the loss computes that itself, and whether it does."""
        last = self.layers[-1]
        if loss.from_logits or loss.fused_activation is None or last.final_activation != loss.fused_activation:
            return self.layers, False
        return (*self.layers[:-1], last.without_activation()), True

    def summary(self) -> str:
        """Return a table of layers, output shapes and parameter counts, as text."""
        rows = [("Layer (type)", "Output Shape", "Param #")]
        for layer, shape in zip(self.layers, self.output_shapes, strict=True):
            count = sum(entry.size for entry in self.layout.entries if entry.name.startswith(f"{layer.name}/"))
            sizes = ", ".join(["None", *map(str, shape)])
            rows.append((f"{layer.name} ({type(layer).__name__})", f"({sizes})", f"{count:,}"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * (sum(widths) + 4))
        total, trained = self.layout.count, self.layout.trainable_count
        counts = f"Total params: {total:,}\nTrainable params: {trained:,}\nNon-trainable params: {total - trained:,}"
        return "\n".join([*lines, counts])


def _name_layers(layers: Sequence[Layer]) -> None:
    """Give every nameless layer its class's name in snake case; the second of a kind gets "_1", as in Keras."""
    taken = Counter(layer.name for layer in layers if layer.name is not None)
    repeated = [name for name, times in taken.items() if times > 1]
    if repeated:
        raise ConfigError(f"layer names must be unique, found {repeated[0]!r} {taken[repeated[0]]} times")
    for layer in layers:
        if layer.name is None:
            kind = snake_case(type(layer).__name__)
            names = (kind if number == 0 else f"{kind}_{number}" for number in range(len(layers) + 1))
            layer.name = next(name for name in names if name not in taken)
            taken[layer.name] += 1
