"""Bins of numbers, and categories as vectors."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.base import Layer
from dptrain.layers.existing_rows import existing_rows
from dptrain.layers.preprocessing.standardization import batches_of
from dptrain.program.shapes import is_one
from dptrain.program.tensor import Tensor

Array = npt.NDArray[Any]
_MODES = ("int", "one_hot", "multi_hot", "count")


def encode_categories(
    places: Tensor, output_mode: str, depth: int, dtype: Any, weights: Tensor | None = None
) -> Tensor:
    """Encode categories as indices or vectors.

    `places` are integers (rows, ...); "multi_hot" and "count" reduce the first axis after the rows. `depth` is the
    number of categories; `weights` of each index are for "count".
    """
    if output_mode == "int":
        return ops.cast(places, dtype)
    indices = ops.reshape(places, (1,)) if not places.ndim else places
    if output_mode == "one_hot":
        column = indices.ndim > 1 and is_one(indices.shape[-1])
        return ops.one_hot(ops.squeeze(indices, -1) if column else indices, depth, dtype=dtype)
    if output_mode == "multi_hot":
        return ops.multi_hot(indices, depth, dtype=dtype)
    vectors = ops.one_hot(indices, depth, dtype=dtype if weights is None else weights.dtype)
    vectors = vectors if weights is None else vectors * ops.expand_dims(weights, -1)
    return ops.sum(vectors, 1 if indices.ndim > 1 else 0)


class CategoryEncoding(Layer):
    """Categories, integers from 0, as vectors of length `num_tokens`.

    `output_mode` is "multi_hot" (1 where a category occurs in a sample), "one_hot" or "count"; `sparse` must be False.
    """

    _unwritten = ("sparse",)

    _takes_ids = True

    def __init__(
        self, num_tokens: int | None = None, output_mode: str = "multi_hot", sparse: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.autocast = False  # half precision would round categories
        output_mode = "multi_hot" if output_mode == "binary" else output_mode
        if output_mode not in _MODES[1:]:
            raise ConfigError(f"Unknown arg for output_mode: {output_mode}")
        if num_tokens is None:
            raise ConfigError(
                "num_tokens must be set to use this layer. If the number of tokens is not known beforehand, use the "
                "IntegerLookup layer instead."
            )
        if num_tokens < 1:
            raise ConfigError(f"`num_tokens` must be >= 1. Received: num_tokens={num_tokens}.")
        self._refuse(sparse=sparse or None)
        self.num_tokens, self.output_mode, self.sparse = int(num_tokens), output_mode, False

    def call(self, inputs: Tensor, count_weights: Tensor | None = None) -> Tensor:
        """Return the vectors for integers (rows,) or (rows, categories); with "count", `count_weights` weigh them.

        Raises:
            ConfigError: `count_weights` in another mode.
            DataError: a category is not 0 to `num_tokens` - 1.
        """
        if count_weights is not None:
            if self.output_mode != "count":
                raise ConfigError(
                    "`count_weights` is not used when `output_mode` is not `'count'`. Received "
                    f"`count_weights={count_weights}`."
                )
            count_weights = ops.cast(count_weights, self.compute_dtype)
        places = inputs if inputs.dtype.kind in "iu" else ops.cast(inputs, "int32")
        places = existing_rows(self._display_name, self.num_tokens, places)
        return encode_categories(places, self.output_mode, self.num_tokens, self.compute_dtype, count_weights)


class Discretization(Layer):
    """Replaces numbers by their bins: the number of boundaries that are not above them.

    Boundaries are passed, or `adapt` finds those of equally filled bins.

    Args:
        bin_boundaries: rising numbers.
        num_bins: number of bins of `adapt`; either this or the boundaries must be passed.
        epsilon: accuracy of the boundaries that `adapt` finds in several batches, as a part of the data.
        output_mode: "int" (int32), or "one_hot", "multi_hot" or "count".
        sparse: must be False.
    """

    _takes_ids = True

    def __init__(
        self,
        bin_boundaries: Sequence[float] | None = None,
        num_bins: int | None = None,
        epsilon: float = 0.01,
        output_mode: str = "int",
        sparse: bool = False,
        dtype: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.autocast = False  # half precision would round numbers across boundaries
        self._refuse(sparse=sparse or None)
        if output_mode not in _MODES:
            raise ConfigError(
                f"Unknown value for `output_mode` argument of {type(self).__name__}. Allowed values are: {_MODES}. "
                f"Received: output_mode={output_mode}"
            )
        if num_bins is not None and num_bins < 0:
            raise ConfigError(f"`num_bins` must be greater than or equal to 0. Received: `num_bins={num_bins}`")
        if num_bins is None and bin_boundaries is None:
            raise ConfigError("You need to set either `num_bins` or `bin_boundaries`.")
        if num_bins is not None and bin_boundaries is not None:
            raise ConfigError(
                f"Both `num_bins` and `bin_boundaries` should not be set. Received: `num_bins={num_bins}` and "
                f"`bin_boundaries={bin_boundaries}`"
            )
        self.bin_boundaries = None if bin_boundaries is None else [float(boundary) for boundary in bin_boundaries]
        self.num_bins, self.epsilon, self.output_mode, self.sparse = num_bins, float(epsilon), output_mode, False

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> "Discretization":
        """Return the layer that `config` describes, with the boundaries that `adapt` had found."""
        arguments = dict(config)
        boundaries = arguments.pop("bin_boundaries", None) if arguments.get("num_bins") is not None else None
        arguments.pop("trainable", None)
        layer = super().from_config(arguments)
        if boundaries is not None:
            layer.bin_boundaries = [float(boundary) for boundary in boundaries]
        return layer

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, with the boundaries that `adapt` found."""
        return super()._get_own_config() | {"bin_boundaries": self.bin_boundaries}

    def _get_config(self) -> dict[str, Any]:
        return {key: value for key, value in super()._get_config().items() if key != "trainable"}

    def adapt(self, data: Any, steps: int | None = None) -> None:
        """Use quantiles of all numbers in data as boundaries.

        `data` is an array, or an iterable of batches, at most `steps` of them. ConfigError if boundaries were passed,
        or there are no numbers.
        """
        if self.num_bins is None:
            raise ConfigError(
                "Cannot adapt a Discretization layer that has been initialized with `bin_boundaries`, use `num_bins` "
                "instead."
            )
        summary = np.zeros((2, 0), np.float32)
        for batch in islice(batches_of(data), steps):
            batch_summary = _summary(np.asarray(batch, np.float32), self.epsilon)
            merged = np.concatenate([batch_summary, summary], 1)
            summary = _compressed(merged[:, np.argsort(merged[0], kind="stable")], self.epsilon)
        if not summary.size:
            raise ConfigError(
                f"adapt of layer {self._display_name!r}: no numbers; expected an array, or an iterable of batches"
            )
        self.bin_boundaries = _compressed(summary, 1 / self.num_bins)[0, :-1].tolist()
        self._changes += 1  # invalidates traced programs

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the outputs; before `adapt` for the number of bins that was asked for."""
        if self.bin_boundaries is not None:
            return super().compute_output_shape(input_shape)
        assert self.num_bins is not None  # checked by the constructor
        adapted = Discretization([*range(1, self.num_bins)], output_mode=self.output_mode, dtype=self.dtype_policy)
        return adapted.compute_output_shape(input_shape)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the bins, or vectors; ConfigError without boundaries."""
        if self.bin_boundaries is None:
            raise ConfigError(
                "You need to either pass the `bin_boundaries` argument at construction time or call `adapt(dataset)` "
                "before you can start using the `Discretization` layer."
            )
        places = ops.digitize(inputs, np.asarray(self.bin_boundaries, np.float64))
        dtype = "int32" if self.output_mode == "int" else self.compute_dtype
        return encode_categories(places, self.output_mode, len(self.bin_boundaries) + 1, dtype)


def _summary(values: Array, epsilon: float) -> Array:
    """Return every n-th number in order, with the count it stands for."""
    ordered = np.sort(values.reshape(-1), kind="stable")
    step = max(ordered.size * epsilon, 1)
    quantiles = ordered[int(step - 1) :: int(step)]
    return np.stack([quantiles, np.full_like(quantiles, step)])


def _compressed(summary: Array, epsilon: float) -> Array:
    """Merge a summary so that each number stands for a part `epsilon` of all."""
    if summary.shape[1] * epsilon < 1:
        return summary
    parts = epsilon + np.arange(0.0, 1.0, epsilon)
    counts = summary[1].cumsum()
    values = np.interp(parts, counts / counts[-1], summary[0])
    counts = np.interp(parts, counts / counts[-1], counts)
    return np.stack([values, counts - np.concatenate([[0], counts[:-1]])]).astype(np.float32)
