"""GRU: a state that one gate resets and another mixes with new values."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.layers.arguments import positive
from dptrain.layers.base import ActivationArgument, ConstraintArgument, InitializerArgument, RegularizerArgument
from dptrain.layers.recurrent.cell import Masks, RecurrentCell, arguments_of
from dptrain.layers.recurrent.rnn import CellLayer
from dptrain.program.tensor import Tensor


class GRUCell(RecurrentCell):
    """h = z * h + (1 - z) * activation(x_h + r * h_h), with gates z and r of inputs and state.

    The columns of kernels and bias are those of z, r and h, in this order.

    Source: K. Cho et al., "Learning phrase representations using RNN encoder-decoder", 2014, and its version 3.

    Args:
        units: length of h, which is the output.
        reset_after: r multiplies the product with the state, instead of the state before it.
        activation, recurrent_activation, use_bias, dropout, recurrent_dropout, seed, options: see `RecurrentCell`.
    """

    def __init__(
        self,
        units: int,
        activation: ActivationArgument = "tanh",
        recurrent_activation: ActivationArgument = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: InitializerArgument = "glorot_uniform",
        recurrent_initializer: InitializerArgument = "orthogonal",
        bias_initializer: InitializerArgument = "zeros",
        kernel_regularizer: RegularizerArgument = None,
        recurrent_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        kernel_constraint: ConstraintArgument = None,
        recurrent_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        reset_after: bool = True,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        arguments = arguments_of(locals())
        self.units = self.state_size = self.output_size = positive("units", arguments.pop("units"))
        self.reset_after = bool(arguments.pop("reset_after"))
        super().__init__(**arguments, **self._without_implementation(options))
        self._choose_masks(3)

    def build(self, input_shape: Any) -> None:
        """Make kernels and bias: with `reset_after` one for the inputs and one for the state, (2, 3 * units)."""
        bias = (2, 3 * self.units) if self.reset_after else (3 * self.units,)
        self._make_weights((input_shape[-1], 3 * self.units), (self.units, 3 * self.units), bias)

    def _project(self, inputs: Tensor, masks: Masks) -> Tensor:
        return self._product(inputs, self.kernel, masks)

    def _advance(self, projected: Tensor, states: Sequence[Tensor], masks: Masks) -> tuple[Tensor, list[Tensor]]:
        h = states[0]
        bias = None if self.bias is None else self.bias[0] if self.reset_after else self.bias
        new_z, new_r, new_h = ops.split(self._biased(projected, bias), 3, axis=-1)
        if self.reset_after:
            product = self._product(h, self.recurrent_kernel, masks)
            product = product if self.bias is None else product + self.bias[1]
            old_z, old_r, old_h = ops.split(product, 3, axis=-1)
            z, r = self.recurrent_activation(new_z + old_z), self.recurrent_activation(new_r + old_r)
            candidate = self.activation(new_h + r * old_h)
        else:
            gate_kernel, state_kernel = (
                self.recurrent_kernel[:, : 2 * self.units],
                self.recurrent_kernel[:, 2 * self.units :],
            )
            first, last = (masks[:2], masks[2:]) if isinstance(masks, list) else (masks, masks)
            old_z, old_r = ops.split(self._product(h, gate_kernel, first), 2, axis=-1)
            z, r = self.recurrent_activation(new_z + old_z), self.recurrent_activation(new_r + old_r)
            candidate = self.activation(new_h + self._product(r * h, state_kernel, last))
        h = z * h + (1 - z) * candidate
        return h, [h]


class GRU(CellLayer):
    """`GRUCell` over sequences (rows, time, features).

    The arguments are those of `GRUCell` and of `RNN`, in Keras' order. `use_cudnn` may be "auto" or False: the kernels
    are dptrain's own.
    """

    def __init__(
        self,
        units: int,
        activation: ActivationArgument = "tanh",
        recurrent_activation: ActivationArgument = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: InitializerArgument = "glorot_uniform",
        recurrent_initializer: InitializerArgument = "orthogonal",
        bias_initializer: InitializerArgument = "zeros",
        kernel_regularizer: RegularizerArgument = None,
        recurrent_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        activity_regularizer: RegularizerArgument = None,
        kernel_constraint: ConstraintArgument = None,
        recurrent_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        reset_after: bool = True,
        use_cudnn: bool | str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(GRUCell, "gru_cell", arguments_of(locals()), **options)
