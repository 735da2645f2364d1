"""Attention of several heads, each with its own projections of query, key and value."""

import functools
import math
import string
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain import config, constraints, initializers, ops, regularizers
from dptrain.errors import ConfigError
from dptrain.layers.activation import Softmax
from dptrain.layers.attention.attention import causal_mask
from dptrain.layers.base import BuildShape, ConstraintArgument, InitializerArgument, Layer, RegularizerArgument
from dptrain.layers.core.einsum_dense import EinsumDense
from dptrain.layers.masks import require_mask
from dptrain.layers.regularization.dropout import Dropout
from dptrain.program.tensor import Tensor, with_mask
from dptrain.random import own_seed


class HeadsLayer(Layer):
    """Base of `MultiHeadAttention`, whose arguments it takes, and `GroupQueryAttention`.

    A subclass makes dense layers in `build`; a user's subclass may override `_compute_attention`.
    """

    _passes_masks = True
    _always_written = ("activity_regularizer",)
    _unwritten = ("flash_attention", "output_shape")
    _gate_dense: EinsumDense | None = None
    # Axes of the projections over which queries attend to keys.
    _axes: tuple[int, ...] = (1,)
    _scores_equation = "aecd,abcd->acbe"
    _output_equation = "acbe,aecd->abcd"

    def __init__(
        self,
        head_length: int,
        dropout: float,
        use_bias: bool,
        sliding_window: int | None,
        flash_attention: bool | None,
        kernel_initializer: InitializerArgument,
        bias_initializer: InitializerArgument,
        kernel_regularizer: RegularizerArgument,
        bias_regularizer: RegularizerArgument,
        activity_regularizer: RegularizerArgument,
        kernel_constraint: ConstraintArgument,
        bias_constraint: ConstraintArgument,
        use_gate: bool,
        seed: int | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if sliding_window is not None and (
            isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or sliding_window <= 0
        ):
            raise ConfigError(
                f"`sliding_window` must be `None` or a positive integer. Received: sliding_window={sliding_window}"
            )
        self.dropout, self.use_bias, self.use_gate = float(dropout), bool(use_bias), bool(use_gate)
        self.sliding_window, self.seed = sliding_window, own_seed(seed)
        self._flash_attention = flash_attention or config.is_flash_attention_enabled()
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        # For the projections' outputs; `Layer` must not apply it to the output as well.
        self._activity_regularizer = regularizers.get(activity_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.bias_constraint = constraints.get(bias_constraint)
        self._scale = 1 / math.sqrt(head_length)
        if self._flash_attention and self.dropout > 0:
            raise ConfigError(
                "Dropout is not supported when flash attention is enabled. Please set dropout to 0.0 to use flash "
                "attention."
            )
        self._softmax = Softmax(-1, **self._policy_of_parts())
        self._dropout_layer = Dropout(self.dropout, seed=seed, **self._policy_of_parts())

    @abstractmethod
    def build(  # type: ignore[override]
        self, query_shape: BuildShape, value_shape: BuildShape, key_shape: BuildShape | None = None
    ) -> None:
        """Make the dense layers."""

    @abstractmethod
    def _dense_layers(self) -> tuple[EinsumDense, EinsumDense, EinsumDense, EinsumDense]:
        """Return those of query, key, value and output."""

    def _policy_of_parts(self) -> dict[str, Any]:
        return {"dtype": self._policy} if self._own_policy else {}

    def _dense(
        self, name: str, equation: str, output_shape: Sequence[int | None], bias_axes: str, activation: Any = None
    ) -> EinsumDense:
        """Return a dense layer with the arguments that all of them share."""
        return EinsumDense(
            equation,
            output_shape,
            activation,
            bias_axes if self.use_bias else None,
            self.kernel_initializer,
            self.bias_initializer,
            self.kernel_regularizer,
            self.bias_regularizer,
            self.kernel_constraint,
            self.bias_constraint,
            activity_regularizer=self._activity_regularizer,
            name=name,
            **self._policy_of_parts(),
        )

    def call(
        self,
        query: Tensor,
        value: Tensor,
        key: Tensor | None = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool = False,
        use_causal_mask: bool = False,
    ) -> Any:
        """Return the output, and with `return_attention_scores` the softmax (rows, heads, targets, sources).

        Args:
            query: (rows, targets, features).
            value: (rows, sources, features).
            key: (rows, sources, features); by default the value.
            query_mask: (rows, targets), by default the query's.
            value_mask, key_mask: (rows, sources), False for sources to ignore.
            attention_mask: (rows, targets, sources), or (rows, heads, targets, sources): whether a source takes part
                for a target.
            return_attention_scores: see above; flash attention cannot.
            training: apply dropout.
            use_causal_mask: ignore sources after the target.
        """
        sources = (("query_mask", query_mask, query), ("value_mask", value_mask, value))
        for name, mask, tensor in (*sources, ("key_mask", key_mask, value if key is None else key)):
            if tensor.ndim == 3:
                require_mask(self, mask, tensor.shape[:2], name)
        # Their masks have become arguments.
        query, value, key = (with_mask(tensor, None) for tensor in (query, value, value if key is None else key))
        masks = (query_mask, value_mask, key_mask, attention_mask, self.sliding_window)
        is_causal_only = (
            use_causal_mask
            and all(mask is None for mask in masks)
            and type(self)._compute_attention is HeadsLayer._compute_attention
        )
        if is_causal_only:
            attention_mask = None
        else:
            attention_mask = self._compute_attention_mask(
                query, value, query_mask, value_mask, key_mask, attention_mask, use_causal_mask
            )
        gate = None if self._gate_dense is None else self._gate_dense(query)
        query_dense, key_dense, value_dense, output_dense = self._dense_layers()
        heads = query_dense(query), self._shared(key_dense(key)), self._shared(value_dense(value))
        # Overrides without parameters for scores or causal masks get the combined mask.
        flags = [return_attention_scores, True] if is_causal_only else [True] if return_attention_scores else []
        output, scores = self._compute_attention(*heads, attention_mask, training, *flags)
        output = output_dense(output if gate is None else output * gate)
        return (output, scores) if return_attention_scores else output

    def _shared(self, heads: Tensor) -> Tensor:
        """Repeat keys or values for all query heads."""
        return heads

    def _compute_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        training: bool = False,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output head by head, and the softmax of the scores or None; for subclasses to override.

        Query (rows, targets, heads, length), key and value are split into heads; for other arguments see `call`.
        """
        if self._flash_attention and return_attention_scores:
            raise ConfigError(
                "Returning attention scores is not supported when flash attention is enabled. Please disable flash "
                "attention to access attention scores."
            )
        if self.dropout == 0 and not return_attention_scores and query.ndim == 4:
            mask = None if attention_mask is None else self._along_heads(ops.cast(attention_mask, "bool"), 4)
            output = ops.dot_product_attention(
                *(query, key, value),
                mask=mask,
                scale=self._scale,
                is_causal=use_causal_mask,
                flash_attention=self._flash_attention,
            )
            return output, None
        if use_causal_mask:
            causal = ops.convert_to_tensor(causal_mask(query.shape[1], value.shape[1]))
            attention_mask = causal if attention_mask is None else ops.logical_and(attention_mask, causal)
        scores = ops.einsum(self._scores_equation, key, query * self._scale)
        weights = self._masked_softmax(scores, attention_mask)
        dropped = self._dropout_layer(weights, training=training) if self.dropout > 0 else weights
        return ops.einsum(self._output_equation, dropped, value), weights

    def _along_heads(self, mask: Tensor, ndim: int) -> Tensor:
        """Return a mask with axes of length 1 in front of those of targets and sources."""
        while mask.ndim < ndim:
            mask = ops.expand_dims(mask, -2 * len(self._axes) - 1)
        return mask

    def _masked_softmax(self, scores: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = None if attention_mask is None else self._along_heads(attention_mask, scores.ndim)
        return self._softmax.call(scores, mask)

    def _compute_attention_mask(
        self,
        query: Tensor,
        value: Tensor,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
    ) -> Tensor | None:
        """Combine all masks to (rows, targets, sources), or with heads if one has these; None if there are none."""
        masks: list[Any] = [] if attention_mask is None else [attention_mask]
        if query_mask is not None:
            masks.append(ops.expand_dims(query_mask, -1))
        masks += [ops.expand_dims(mask, -2) for mask in (value_mask, key_mask) if mask is not None]
        if use_causal_mask:
            masks.append(causal_mask(query.shape[1], value.shape[1]))
        if self.sliding_window is not None:
            masks.append(_window_mask(query.shape[1], value.shape[1], self.sliding_window))
        if not masks:
            return None
        booleans = [ops.cast(mask, "bool") for mask in masks]
        if len(self._axes) == 1:
            ndim = max(mask.ndim for mask in booleans)
            booleans = [self._along_heads(mask, ndim) for mask in booleans]
        return functools.reduce(ops.logical_and, booleans)

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments without `flash_attention`, like Keras."""
        return super()._get_own_config() | {"activity_regularizer": regularizers.serialize(self._activity_regularizer)}


class MultiHeadAttention(HeadsLayer):
    """y = softmax(query key^T / sqrt(key_dim)) value W + b, head by head, with dense projections of the inputs.

    Weights are those of query, key, gate (if any), value and output, a kernel and a bias each.

    Source: A. Vaswani et al., "Attention is all you need", NeurIPS 2017; the gate: Z. Qiu et al., "Gated attention for
    large language models", 2025.

    Args:
        num_heads: number of heads.
        key_dim: length of a head's queries and keys.
        value_dim: length of a head's values; by default `key_dim`.
        dropout: fraction of the softmax to drop in training, 0 to 1.
        use_bias: whether the dense layers have biases.
        output_shape: last lengths of the output; by default the query's last.
        attention_axes: over which queries look for keys; by default all but rows and features.
        sliding_window: ignore sources at least this far from a target; None for no limit.
        flash_attention: True refuses dropout and returned scores; otherwise without effect.
        activity_regularizer: penalty on the outputs of the dense layers.
        use_gate: multiply the output of heads by a sigmoid of a dense layer of the query.
        seed: of the dropout masks.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | Sequence[int] | None = None,
        attention_axes: int | Sequence[int] | None = None,
        sliding_window: int | None = None,
        flash_attention: bool | None = None,
        kernel_initializer: InitializerArgument = "glorot_uniform",
        bias_initializer: InitializerArgument = "zeros",
        kernel_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        activity_regularizer: RegularizerArgument = None,
        kernel_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        use_gate: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        num_heads, key_dim = _positive("num_heads", num_heads), _positive("key_dim", key_dim)
        super().__init__(
            *(key_dim, dropout, use_bias, sliding_window, flash_attention, kernel_initializer, bias_initializer),
            *(kernel_regularizer, bias_regularizer, activity_regularizer, kernel_constraint, bias_constraint),
            *(use_gate, seed),
            **options,
        )
        self.num_heads, self.key_dim = num_heads, key_dim
        self.value_dim = key_dim if value_dim is None else _positive("value_dim", value_dim, " or `None`")
        self._output_lengths = _lengths("output_shape", output_shape)
        self.attention_axes = _lengths("attention_axes", attention_axes)

    def build(  # type: ignore[override]
        self, query_shape: BuildShape, value_shape: BuildShape, key_shape: BuildShape | None = None
    ) -> None:
        """Make the dense layers; value and key may differ in their last length only."""
        key_shape = value_shape if key_shape is None else key_shape
        _check_sources(value_shape, key_shape)
        rank = len(query_shape)
        self.query_dense = self._projection("query", query_shape, self.key_dim)
        self.key_dense = self._projection("key", key_shape, self.key_dim)
        if self.use_gate:
            self._gate_dense = self._projection("gate", query_shape, self.value_dim, ops.sigmoid)
        self.value_dense = self._projection("value", value_shape, self.value_dim)
        self._attend_along(rank + 1)
        lengths = self._output_lengths or (query_shape[-1],)
        free, inner, outer = _letters(rank - 1, 2, len(lengths))
        self.output_dense = self._dense(
            "attention_output",
            f"{free}{inner},{inner}{outer}->{free}{outer}",
            (*(None,) * (rank - 2), *lengths),
            outer,
        )
        self.output_dense.build((*query_shape[:-1], self.num_heads, self.value_dim))

    def _projection(self, name: str, shape: BuildShape, length: int, activation: Any = None) -> EinsumDense:
        """Return the dense layer from an input to heads, built."""
        free, inner, outer = _letters(len(shape) - 1, 1, 2)
        lengths = (*(None,) * (len(shape) - 2), self.num_heads, length)
        dense = self._dense(name, f"{free}{inner},{inner}{outer}->{free}{outer}", lengths, outer, activation)
        dense.build(shape)
        return dense

    def _attend_along(self, rank: int) -> None:
        """Find the equations of scores and output for heads of a rank, (rows, ..., heads, length)."""
        axes = range(1, rank - 2) if self.attention_axes is None else self.attention_axes
        self._axes = tuple(axis if axis >= 0 else rank - 1 + axis for axis in axes)
        self.attention_axes = self._axes
        target = string.ascii_letters[:rank]
        source = "".join(
            string.ascii_letters[rank + self._axes.index(axis)] if axis in self._axes else letter
            for axis, letter in enumerate(target)
        )
        batch = "".join(target[axis] for axis in range(rank - 1) if axis not in self._axes)
        scores = batch + "".join(letters[axis] for letters in (target, source) for axis in self._axes)
        self._scores_equation, self._output_equation = f"{source},{target}->{scores}", f"{scores},{source}->{target}"
        count = len(self._axes)
        self._softmax.axis = list(range(len(scores) - count, len(scores)))

    def _dense_layers(self) -> tuple[EinsumDense, EinsumDense, EinsumDense, EinsumDense]:
        return self.query_dense, self.key_dense, self.value_dense, self.output_dense

    # Keras' names for the dense layers, for subclasses; files have the others.
    _query_dense = property(lambda self: self.query_dense)
    _key_dense = property(lambda self: self.key_dense)
    _value_dense = property(lambda self: self.value_dense)
    _output_dense = property(lambda self: self.output_dense)

    def compute_output_shape(  # type: ignore[override]
        self, query_shape: Any, value_shape: Any, key_shape: Any = None
    ) -> tuple[int | None, ...]:
        """Return the query's shape with the output's last lengths."""
        _check_sources(value_shape, value_shape if key_shape is None else key_shape)
        return (*query_shape[:-1], *(self._output_lengths or (query_shape[-1],)))

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, including the output's lengths."""
        return super()._get_own_config() | {
            "output_shape": None if self._output_lengths is None else list(self._output_lengths)
        }


class GroupQueryAttention(HeadsLayer):
    """`MultiHeadAttention` whose consecutive heads share keys and values; for other arguments see there.

    Source: J. Ainslie et al., "GQA: training generalized multi-query transformer models from multi-head checkpoints",
    EMNLP 2023.

    Args:
        head_dim: length of a head.
        num_query_heads: number of heads.
        num_key_value_heads: of keys and values, a divisor of it.
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        num_key_value_heads: int,
        dropout: float = 0.0,
        use_bias: bool = True,
        sliding_window: int | None = None,
        flash_attention: bool | None = None,
        kernel_initializer: InitializerArgument = "glorot_uniform",
        bias_initializer: InitializerArgument = "zeros",
        kernel_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        activity_regularizer: RegularizerArgument = None,
        kernel_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        use_gate: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        head_dim, num_query_heads = _positive("head_dim", head_dim), _positive("num_query_heads", num_query_heads)
        num_key_value_heads = _positive("num_key_value_heads", num_key_value_heads)
        if num_query_heads % num_key_value_heads:
            raise ConfigError("`num_query_heads` must be divisible by `num_key_value_heads`.")
        super().__init__(
            *(head_dim, dropout, use_bias, sliding_window, flash_attention, kernel_initializer, bias_initializer),
            *(kernel_regularizer, bias_regularizer, activity_regularizer, kernel_constraint, bias_constraint),
            *(use_gate, seed),
            **options,
        )
        self.head_dim, self.num_query_heads, self.num_key_value_heads = head_dim, num_query_heads, num_key_value_heads

    @property
    def _default_name(self) -> str:
        """From Keras' class, GroupedQueryAttention."""
        return "grouped_query_attention"

    def build(  # type: ignore[override]
        self, query_shape: BuildShape, value_shape: BuildShape, key_shape: BuildShape | None = None
    ) -> None:
        """Make the dense layers; value and key may differ in their last length only."""
        key_shape = value_shape if key_shape is None else key_shape
        _check_sources(value_shape, key_shape)
        self._query_dense = self._projection("query", query_shape, self.num_query_heads)
        self._key_dense = self._projection("key", key_shape, self.num_key_value_heads)
        if self.use_gate:
            self._gate_dense = self._projection("gate", query_shape, self.num_query_heads, ops.sigmoid)
        self._value_dense = self._projection("value", value_shape, self.num_key_value_heads)
        self._output_dense = self._dense("attention_output", "bquh,uhm->bqm", (None, query_shape[-1]), "m")
        self._output_dense.build((None, None, self.num_query_heads, self.head_dim))

    def _projection(self, name: str, shape: BuildShape, heads: int, activation: Any = None) -> EinsumDense:
        dense = self._dense(name, "bqm,muh->bquh", (None, heads, self.head_dim), "uh", activation)
        dense.build(shape)
        return dense

    def _dense_layers(self) -> tuple[EinsumDense, EinsumDense, EinsumDense, EinsumDense]:
        return self._query_dense, self._key_dense, self._value_dense, self._output_dense

    def _shared(self, heads: Tensor) -> Tensor:
        return ops.repeat(heads, self.num_query_heads // self.num_key_value_heads, 2)

    def compute_output_shape(  # type: ignore[override]
        self, query_shape: Any, value_shape: Any, key_shape: Any = None
    ) -> tuple[int | None, ...]:
        """Return the query's shape; value and query must agree in the last length, value and key in the others."""
        if query_shape[-1] != value_shape[-1]:
            raise ConfigError(
                f"The last dimension of `query_shape` and `value_shape` must be equal, but are {query_shape[-1]}, "
                f"{value_shape[-1]}. Received: query_shape={query_shape}, value_shape={value_shape}"
            )
        _check_sources(value_shape, value_shape if key_shape is None else key_shape)
        return tuple(query_shape)


def _positive(name: str, value: Any, otherwise: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(
            f"Received an invalid value for argument `{name}`, expected a positive integer{otherwise}. "
            f"Received: {name}={value}"
        )
    return int(value)


def _lengths(name: str, value: Any) -> tuple[int, ...] | None:
    """Return an argument of one or several integers as a tuple; None for none."""
    if value is None or value == ():
        return None
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
        raise ConfigError(f"`{name}` must be an int, list, or tuple. Received: {name}={value}")
    return tuple(value) or None


def _letters(*counts: int) -> list[str]:
    """Return groups of distinct letters, of these sizes."""
    letters = iter(string.ascii_letters)
    return ["".join(next(letters) for _ in range(count)) for count in counts]


def _check_sources(value_shape: Any, key_shape: Any) -> None:
    if tuple(value_shape[1:-1]) != tuple(key_shape[1:-1]):
        raise ConfigError(
            "All dimensions of `value` and `key`, except the last one, must be equal. Received: "
            f"value_shape={value_shape} and key_shape={key_shape}"
        )


def _window_mask(targets: Any, sources: Any, window: int) -> Any:
    """Return (1, targets, sources): whether a source is closer than `window` to a target."""
    return np.abs(np.arange(int(targets))[:, None] - np.arange(int(sources)))[None] < window
