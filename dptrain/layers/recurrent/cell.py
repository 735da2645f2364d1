"""Base of recurrent cells: kernels of inputs and states, bias, activations, dropout."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import constraints, initializers, ops, regularizers
from dptrain.initializers import Initializer
from dptrain.layers.arguments import ActivationAttribute
from dptrain.layers.base import (
    ActivationArgument,
    ConstraintArgument,
    InitializerArgument,
    Layer,
    RegularizerArgument,
)
from dptrain.ops import random
from dptrain.program.dims import Dim
from dptrain.program.tensor import Tensor, Variable, reading_weights_in
from dptrain.random import Purpose, own_seed

# A mask for the inputs of all gates, or one for each; None if nothing is dropped.
Masks = Tensor | Sequence[Tensor] | None


def arguments_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a constructor's own arguments, from its `locals()`."""
    return {name: value for name, value in variables.items() if name not in ("self", "__class__", "options")}


class RecurrentCell(Layer):
    """Base of cells, whose product with the inputs can be computed for all steps at once.

    Args:
        activation: of the output.
        recurrent_activation: of the gates.
        use_bias: whether to add a bias.
        dropout: fraction of the inputs to drop, the same ones in all steps of a batch.
        recurrent_dropout: of the state.
        seed: of the dropout masks; by default the model's.
        options: keyword arguments of `Layer`; `implementation` 1 gives each gate its own dropout masks, as does
            `recurrent_dropout`.

    Attributes:
        state_size: the size of each state, or of the only one.
        output_size: the size of a step's output.
    """

    activation, recurrent_activation = ActivationAttribute(), ActivationAttribute()

    # Number of gates with their own dropout masks; 0 if they share one.
    _mask_count = 0
    state_size: Any
    output_size: Any

    def __init__(
        self,
        activation: ActivationArgument,
        use_bias: bool,
        kernel_initializer: InitializerArgument,
        recurrent_initializer: InitializerArgument,
        bias_initializer: InitializerArgument,
        kernel_regularizer: RegularizerArgument,
        recurrent_regularizer: RegularizerArgument,
        bias_regularizer: RegularizerArgument,
        kernel_constraint: ConstraintArgument,
        recurrent_constraint: ConstraintArgument,
        bias_constraint: ConstraintArgument,
        dropout: float,
        recurrent_dropout: float,
        seed: int | None,
        recurrent_activation: ActivationArgument = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.activation, self.recurrent_activation = activation, recurrent_activation
        self.use_bias = bool(use_bias)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.recurrent_initializer = initializers.get(recurrent_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = regularizers.get(recurrent_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.recurrent_constraint = constraints.get(recurrent_constraint)
        self.bias_constraint = constraints.get(bias_constraint)
        self.dropout, self.recurrent_dropout = (min(1.0, max(0.0, rate)) for rate in (dropout, recurrent_dropout))
        self.seed = own_seed(seed)
        if self.dropout or self.recurrent_dropout:
            self.seed_generator = self._add_seed_generator(Purpose.DROPOUT, seed)

    def _make_weights(
        self,
        kernel_shape: tuple[int | None, ...],
        recurrent_shape: tuple[int | None, ...],
        bias_shape: tuple[int, ...],
        bias_initializer: Any = None,
    ) -> None:
        self.kernel = self.add_weight(
            kernel_shape,
            self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            name="kernel",
        )
        self.recurrent_kernel = self.add_weight(
            recurrent_shape,
            self.recurrent_initializer,
            regularizer=self.recurrent_regularizer,
            constraint=self.recurrent_constraint,
            name="recurrent_kernel",
        )
        self.bias: Variable | None = None
        if self.use_bias:
            self.bias = self.add_weight(
                bias_shape,
                bias_initializer or self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
                name="bias",
            )

    def call(self, inputs: Tensor, states: Any, training: bool = False) -> tuple[Tensor, Any]:
        """Return the output of a step, (rows, units), and the new states, from inputs (rows, features) and old states.

        States are a list; a single one may stand alone, and is returned so. `training` applies dropout.
        """
        alone = isinstance(states, Tensor)
        before = [states] if alone else list(states)
        masks, recurrent_masks = self._draw_masks(inputs, before[0], training)
        output, after = self._advance(self._project(inputs, masks), before, recurrent_masks)
        return output, after[0] if alone else after

    def _project(self, inputs: Tensor, masks: Masks) -> Tensor:
        """Return the inputs' contribution to a step (rows, features), or to all steps (rows, time, features)."""
        raise NotImplementedError

    def _advance(self, projected: Tensor, states: Sequence[Tensor], masks: Masks) -> tuple[Tensor, list[Tensor]]:
        """Return the output and the new states, from the inputs' projection and the old states."""
        raise NotImplementedError

    def get_initial_state(self, batch_size: Any = None) -> list[Tensor]:
        """Return zeros, (rows, size) for each state."""
        sizes = self.state_size if isinstance(self.state_size, list) else [self.state_size]
        return [ops.zeros((batch_size, size), self.compute_dtype) for size in sizes]

    def _draw_masks(self, inputs: Tensor, state: Tensor, training: bool) -> tuple[Masks, Masks]:
        """Return dropout masks of a step's inputs and of the state; None outside of training."""
        if not training:
            return None, None
        return self._masks(inputs, self.dropout), self._masks(state, self.recurrent_dropout)

    @contextmanager
    def _reading_weights(self) -> Iterator[None]:
        """Read weights in the type in which the cell computes."""
        with reading_weights_in(self._read_in):
            yield

    def _masks(self, like: Tensor, rate: float) -> Masks:
        if not 0 < rate < 1:
            return None
        masks = [
            random.dropout(ops.ones_like(like), rate, seed=self.seed_generator) for _ in range(max(1, self._mask_count))
        ]
        return masks if self._mask_count else masks[0]

    def _product(self, x: Tensor, kernel: Any, masks: Masks) -> Tensor:
        """Return the product with the kernels of all gates, each with its own mask if there are several."""
        if masks is None or isinstance(masks, Tensor):
            return _matmul(x if masks is None else x * _over_time(masks, x), kernel)
        kernels = ops.split(kernel, len(masks), axis=-1)
        parts = [_matmul(x * _over_time(mask, x), part) for mask, part in zip(masks, kernels, strict=True)]
        return ops.concatenate(parts, axis=-1)

    @staticmethod
    def _biased(projected: Tensor, bias: Any) -> Tensor:
        """Add a bias within the step, whose loop reads the projection anyway."""
        return projected if bias is None else projected + bias

    def _without_implementation(self, options: dict[str, Any]) -> dict[str, Any]:
        """Remove Keras' undeclared argument `implementation` from options."""
        self.implementation = options.pop("implementation", 2)
        return options

    def _choose_masks(self, gates: int) -> None:
        """Give each gate its own dropout mask with `implementation` 1, which recurrent dropout implies."""
        if self.recurrent_dropout:
            self.implementation = 1
        self._mask_count = gates if self.implementation == 1 else 0


class UnitForgetBias(Initializer):
    """Ones for the forget gate's bias, the second of four; another initializer's values elsewhere.

    Source: R. Jozefowicz et al., "An empirical exploration of recurrent network architectures", ICML 2015.
    """

    def __init__(self, initializer: Any) -> None:
        self.other_initializer = initializer

    def _draw(self, shape: tuple[int, ...], seed: int, position: int) -> npt.NDArray[np.float64]:
        """Return the values, (4 * units,)."""
        units = shape[0] // 4
        before, behind = (self._drawn((count,), seed, position) for count in (units, 2 * units))
        return np.concatenate([before, np.ones(units), behind])

    def _drawn(self, shape: tuple[int, ...], seed: int, position: int) -> npt.NDArray[np.float64]:
        if isinstance(self.other_initializer, Initializer):
            return self.other_initializer._draw(shape, seed, position)
        return np.asarray(self.other_initializer(shape, dtype="float64"), np.float64)


def _over_time(mask: Tensor, x: Tensor) -> Tensor:
    """Broadcast a step's mask over the axis of time, if there is one."""
    return mask if x.ndim == mask.ndim else ops.expand_dims(mask, 1)


def _matmul(x: Tensor, kernel: Any) -> Tensor:
    """Return the product with a matrix, one product for all steps."""
    if x.ndim == 2 or not isinstance(x.shape[0], Dim):
        return ops.matmul(x, kernel)
    flat = ops.matmul(ops.reshape(x, (-1, x.shape[-1])), kernel)
    return ops.reshape(flat, (*x.shape[:-1], kernel.shape[-1]))
