"""Input: the first entry of a model, which states the shape of a sample."""

from collections.abc import Sequence
from typing import Any

from dptrain.errors import ConfigError
from dptrain.layers.flatten import View


class InputLayer(View):
    """States the shape of one sample; computes nothing and, as in Keras, is none of the model's layers.

    Args:
        shape: of one sample.
        batch_size: taken and left unused: batches may have any number of rows.
        dtype: only None or that of floats; samples of any type are cast to the model's.
        sparse: only None or False.
        ragged: only None or False.
        batch_shape: (batch size, *shape), instead of these.
        input_tensor: only None.
        optional: only False.
        name: for messages.
        options: as `Layer`.

    Raises:
        ConfigError: no shape, or an argument that is not supported.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
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
            if shape is not None:
                raise ConfigError("You cannot pass both `shape` and `batch_shape` at the same time.")
            shape = [n for n in batch_shape[1:] if n is not None]
            if len(shape) != len(batch_shape) - 1:
                raise ConfigError(f"not supported: batch_shape = {tuple(batch_shape)}, of unknown dimensions")
        if shape is None:
            raise ConfigError("You must pass a `shape` argument.")
        super().__init__(input_shape=shape, name=name, **options)
        self.refuse(sparse=sparse or None, ragged=ragged or None, input_tensor=input_tensor, optional=optional or None)
        if dtype not in (None, "float32", "float64"):
            self.refuse(dtype=dtype)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape

    def own_config(self) -> dict[str, Any]:
        """Return the shape and what Keras writes beside it."""
        assert self.input_shape is not None
        return {"batch_shape": [None, *self.input_shape], "sparse": False, "ragged": False, "optional": False}


def Input(  # noqa: N802 - Keras' name
    shape: Sequence[int] | None = None,
    batch_size: int | None = None,
    dtype: str | None = None,
    sparse: bool | None = None,
    batch_shape: Sequence[int | None] | None = None,
    name: str | None = None,
    tensor: None = None,
    optional: bool = False,
) -> InputLayer:
    """Return the first entry of a Sequential; the arguments are those of `InputLayer`."""
    return InputLayer(shape, batch_size, dtype, sparse, None, batch_shape, tensor, optional, name)
