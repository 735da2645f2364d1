"""Input: where a model begins."""

from collections.abc import Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.layers.base import Layer, checked_shape
from dptrain.layers.node import LayerCall
from dptrain.mixed_precision import dtype_policy
from dptrain.ops.operation_calls import is_symbolic
from dptrain.program.dims import read, symbolic
from dptrain.program.tensor import Tensor


class InputLayer(Layer):
    """States the shape of a sample; computes nothing and, as in Keras, is not among a Sequential's layers.

    Args:
        shape: of a sample, None for lengths that batches may choose.
        batch_size: that all batches must have; None for any.
        dtype: of the input; floating-point inputs are cast to the type of the layer that takes them. "string" for
            texts, which layers such as TextVectorization turn into numbers on the host.
        batch_shape: (batch size, *shape), instead of these.
        name: for messages, and of the input in dictionaries of inputs.
        sparse, ragged: not supported.
        input_tensor: a symbolic tensor that becomes this input, with its shape and type.
        optional: whether the model may be called with None in its place; layers get None then.

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
        input_tensor: Tensor | None = None,
        optional: bool = False,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if input_tensor is not None:
            batch_shape, dtype = _described_by(input_tensor, shape, batch_size, dtype, batch_shape)
            shape = batch_size = None
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
        self._refuse(sparse=sparse or None, ragged=ragged or None)
        self.optional = bool(optional)
        self.batch_shape = (batch_size, *shape)
        self._input_dtype, self.built = dtype or dtype_policy()._data_dtype, True
        node = LayerCall(self)
        self._nodes.append(node)
        node.outputs = input_tensor
        if input_tensor is None:
            dtype = "U" if self._input_dtype == "string" else self._input_dtype
            node.outputs = node.output(symbolic(self.batch_shape), dtype, name or "input")
        else:
            input_tensor.history = node

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
            "optional": self.optional,
        }


def _described_by(
    tensor: Any, shape: Any, batch_size: int | None, dtype: str | None, batch_shape: Any
) -> tuple[tuple[int | None, ...], str]:
    """Return the shape and type of a symbolic tensor; ConfigError if others were passed as well."""
    if not is_symbolic(tensor):
        raise ConfigError(f"Argument `input_tensor` must be a KerasTensor. Received invalid type: {type(tensor)}")
    found: tuple[int | None, ...] = read(tensor.shape)
    for name, value, of_tensor in (
        ("shape", None if shape is None else tuple(shape), found[1:]),
        ("batch_size", batch_size, found[0] if found else None),
        ("batch_shape", None if batch_shape is None else tuple(batch_shape), found),
        ("dtype", dtype, tensor.dtype.name),
    ):
        if value not in (None, of_tensor):
            raise ConfigError(
                f"When providing the `input_tensor` argument, you cannot provide an incompatible `{name}` argument: "
                f"found {value}, the tensor has {of_tensor}"
            )
    return found, tensor.dtype.name


def Input(  # noqa: N802 - Keras' name
    shape: Sequence[int | None] | None = None,
    batch_size: int | None = None,
    dtype: str | None = None,
    sparse: bool | None = None,
    batch_shape: Sequence[int | None] | None = None,
    name: str | None = None,
    tensor: Tensor | None = None,
    optional: bool = False,
) -> Tensor:
    """Return a symbolic input tensor of a model; for the arguments see `InputLayer`."""
    symbol: Tensor = InputLayer(shape, batch_size, dtype, sparse, None, batch_shape, tensor, optional, name).output
    return symbol
