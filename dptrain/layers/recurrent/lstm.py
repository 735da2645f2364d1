"""LSTM: a state that gates write, keep and read."""

from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.layers.arguments import positive
from dptrain.layers.base import ActivationArgument, ConstraintArgument, InitializerArgument, RegularizerArgument
from dptrain.layers.recurrent.cell import Masks, RecurrentCell, UnitForgetBias, arguments_of
from dptrain.layers.recurrent.rnn import CellLayer
from dptrain.program.tensor import Tensor


class LSTMCell(RecurrentCell):
    """c = f * c + i * activation(x_c + h_c); h = o * activation(c), with gates i, f and o of inputs and state.

    The columns of kernels and bias are those of i, f, c and o, in this order.

    Source: S. Hochreiter and J. Schmidhuber, "Long short-term memory", Neural Computation 9, 1997; with the forget gate
    of F. Gers et al., 2000.

    Args:
        units: length of h, which is the output, and of c.
        unit_forget_bias: initialize the forget gate's bias to 1.
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
        unit_forget_bias: bool = True,
        kernel_regularizer: RegularizerArgument = None,
        recurrent_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        kernel_constraint: ConstraintArgument = None,
        recurrent_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        arguments = arguments_of(locals())
        self._set_units(arguments.pop("units"))
        self.unit_forget_bias = bool(arguments.pop("unit_forget_bias"))
        super().__init__(**arguments, **self._without_implementation(options))
        self._choose_masks(4)

    def _set_units(self, units: Any) -> None:
        self.units = self.output_size = positive("units", units)
        self.state_size = [self.units, self.units]

    def build(self, input_shape: Any) -> None:
        """Make kernels and bias."""
        bias = UnitForgetBias(self.bias_initializer) if self.unit_forget_bias else None
        self._make_weights((input_shape[-1], 4 * self.units), (self.units, 4 * self.units), (4 * self.units,), bias)

    def _project(self, inputs: Tensor, masks: Masks) -> Tensor:
        return self._product(inputs, self.kernel, masks)

    def _advance(self, projected: Tensor, states: Sequence[Tensor], masks: Masks) -> tuple[Tensor, list[Tensor]]:
        h, c = states
        i, f, new, o = ops.split(
            self._biased(projected, self.bias) + self._product(h, self.recurrent_kernel, masks), 4, axis=-1
        )
        c = self.recurrent_activation(f) * c + self.recurrent_activation(i) * self.activation(new)
        h = self.recurrent_activation(o) * self.activation(c)
        return h, [h, c]


class LSTM(CellLayer):
    """`LSTMCell` over sequences (rows, time, features).

    The arguments are those of `LSTMCell` and of `RNN`, in Keras' order. `use_cudnn` may be "auto" or False: the kernels
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
        unit_forget_bias: bool = True,
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
        use_cudnn: bool | str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(LSTMCell, "lstm_cell", arguments_of(locals()), **options)
