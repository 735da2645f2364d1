"""TimeDistributed: a layer for each step of sequences."""

from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.layers.core.wrapper import Wrapper
from dptrain.program.shapes import differ, without_rows
from dptrain.program.tensor import Tensor


class TimeDistributed(Wrapper):
    """Applies a layer to each step of sequences, (rows, time, ...), always with the same weights.

    Layers of dptrain's that treat each row by itself get all steps as rows of one batch; others, such as
    BatchNormalization and users' layers, get step after step.
    """

    _passes_masks = True

    def __init__(self, layer: Layer, **options: Any) -> None:
        if not isinstance(layer, Layer):
            raise ConfigError(
                f"Please initialize `TimeDistributed` layer with a `keras.layers.Layer` instance. Received: {layer}"
            )
        super().__init__(layer, **options)

    def build(self, input_shape: Any) -> None:
        """Make the weights of the wrapped layer; ConfigError for inputs without time."""
        if not isinstance(input_shape, tuple | list) or len(input_shape) < 3:
            raise ConfigError(
                "`TimeDistributed` Layer should be passed an `input_shape` with at least 3 dimensions, received: "
                f"{input_shape}"
            )
        super().build((input_shape[0], *input_shape[2:]))

    def call(self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None) -> Any:
        """Return the layer's outputs for the steps; the layer gets `training`, and `mask` if it takes one."""
        if mask is not None:
            self._check(inputs, mask)
        keywords: dict[str, Any] = {"training": training}
        takes_mask = mask is not None and "mask" in self.layer._signature.parameters
        if all(_treats_rows_apart(layer) for layer in self.layer._flatten_layers()):
            lengths = inputs.shape[:2]
            if takes_mask:
                assert mask is not None
                keywords["mask"] = ops.reshape(mask, (-1, *mask.shape[2:]))
            outputs = self.layer(ops.reshape(inputs, (-1, *inputs.shape[2:])), **keywords)
            return ops.reshape(outputs, (*lengths, *outputs.shape[1:]))
        steps = []
        for number in range(int(inputs.shape[1])):
            masked = {"mask": mask[:, number]} if takes_mask and mask is not None else {}
            steps.append(self.layer(inputs[:, number], **keywords, **masked))
        return ops.stack(steps, axis=1)

    def _check(self, inputs: Tensor, mask: Tensor) -> None:
        if mask.ndim < 2:
            raise ConfigError(
                "The `mask` passed to the `TimeDistributed` layer must be at least 2D (e.g., `(batch_size, "
                f"timesteps)`), but it has {mask.ndim} dimension(s) with shape {without_rows(mask.shape)}."
            )
        if any(
            differ(mask_length, length) for mask_length, length in zip(mask.shape[:2], inputs.shape[:2], strict=True)
        ):
            raise ConfigError(
                f"The `mask` passed to the `TimeDistributed` layer has a shape {without_rows(mask.shape)} that is "
                f"incompatible with the input shape {without_rows(inputs.shape)}. The first two dimensions of the mask "
                "(batch size and timesteps) must match the input's first two dimensions."
            )


def _treats_rows_apart(layer: Layer) -> bool:
    """Whether a layer is known to compute each row from that row alone."""
    return type(layer).__module__ in _ROW_BY_ROW and not layer._generators


# fmt: off
_ROW_BY_ROW = {
    f"dptrain.layers.{name}" for name in (
        "activation", "convolution", "core.dense", "core.einsum_dense", "core.embedding", "core.input", "core.masking",
        "merging", "pooling", "preprocessing.rescaling", "regularization.dropout", "regularization.noise",
        "reshaping.borders", "reshaping.shapes", "reshaping.upsampling",
    )
} | {"dptrain.models.sequential", "dptrain.models.model"}
# fmt: on
