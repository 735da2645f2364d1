"""Input: where a model begins."""

from collections.abc import Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, checked_shape
from dptrain.layers.node import LayerCall
from dptrain.mixed_precision import dtype_policy
from dptrain.program.dims import symbolic
from dptrain.program.tensor import Tensor


class InputLayer(Layer):
    """States the shape of a sample; computes nothing and, as in Keras, is not among a Sequential's layers.

    Args:
        shape: of a sample, None for lengths that batches may choose.
        batch_size: that all batches must have; None for any.
        dtype: of the input; floating-point inputs are cast to the type of the layer that takes them.
        batch_shape: (batch size, *shape), instead of these.
        name: for messages, and of the input in dictionaries of inputs.
        sparse, ragged, input_tensor, optional: not supported.

    Attributes:
        batch_shape: (batch_size, *shape).
        output: the symbolic tensor.
    """

    def __init__(
        self,
        shape: Sequence[int | None] | None = None,
        batch_size: int | None = None,
        dtype: str | None = None,
        sparse: bool | None = None,
        ragged: bool | None = None,
        batch_shape: Sequence[int | None] | None = None,
        input_tensor: None = None,
        optional: bool = False,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if batch_shape is not None:
            for argument, value in (("shape", shape), ("batch_size", batch_size)):
                if value is not None:
                    raise ConfigError(f"You cannot pass both `{argument}` and `batch_shape` at the same time.")
            batch_size, *shape = batch_shape
        if shape is None:  # by its name in Keras 2
            shape = options.pop("input_shape", None)
        if shape is None:
            raise ConfigError("You must pass a `shape` argument.")
        shape = checked_shape(shape)
        (batch_size,) = checked_shape([batch_size])
        super().__init__(input_shape=shape, name=name, **options)
        self._refuse(sparse=sparse or None, ragged=ragged or None, input_tensor=input_tensor, optional=optional or None)
        self.batch_shape = (batch_size, *shape)
        self._input_dtype, self.built = dtype or dtype_policy()._data_dtype, True
        node = LayerCall(self)
        self._nodes.append(node)
        node.outputs = node.output(symbolic(self.batch_shape), self._input_dtype, name or "input")

    @property
    def dtype(self) -> str:
        """The type of the input."""
        return self._input_dtype

    def call(self, *inputs: Any) -> Any:
        """Return the input."""
        return inputs[0] if len(inputs) == 1 else inputs

    def _get_config(self) -> dict[str, Any]:
        """Return the shape and what Keras writes with it."""
        return {
            "name": self._name,
            "dtype": self.dtype,
            "batch_shape": list(self.batch_shape),
            "sparse": False,
            "ragged": False,
            "optional": False,
        }


def Input(  # noqa: N802 - Keras' name
    shape: Sequence[int | None] | None = None,
    batch_size: int | None = None,
    dtype: str | None = None,
    sparse: bool | None = None,
    batch_shape: Sequence[int | None] | None = None,
    name: str | None = None,
    tensor: None = None,
    optional: bool = False,
) -> Tensor:
    """Return a symbolic input tensor of a model; for the arguments see `InputLayer`."""
    symbol: Tensor = InputLayer(shape, batch_size, dtype, sparse, None, batch_shape, tensor, optional, name).output
    return symbol
