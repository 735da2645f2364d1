"""SimpleRNN: the state is a function of a product with the inputs and a product with itself."""

from collections.abc import Sequence
from typing import Any

from dptrain.layers.arguments import positive
from dptrain.layers.base import ActivationArgument, ConstraintArgument, InitializerArgument, RegularizerArgument
from dptrain.layers.recurrent.cell import Masks, RecurrentCell, arguments_of
from dptrain.layers.recurrent.rnn import CellLayer
from dptrain.program.tensor import Tensor


class SimpleRNNCell(RecurrentCell):
    """h = activation(x @ kernel + bias + h @ recurrent_kernel), h of length `units`, which is the output.

    For other arguments see `RecurrentCell`.

    Source: J. Elman, "Finding structure in time", Cognitive Science 14, 1990.
    """

    def __init__(
        self,
        units: int,
        activation: ActivationArgument = "tanh",
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
        seed: int | None = None,
        **options: Any,
    ) -> None:
        arguments = arguments_of(locals())
        self.units = self.state_size = self.output_size = positive("units", arguments.pop("units"))
        super().__init__(**arguments, **options)

    def build(self, input_shape: Any) -> None:
        """Make kernels and bias."""
        self._make_weights((input_shape[-1], self.units), (self.units, self.units), (self.units,))

    def _project(self, inputs: Tensor, masks: Masks) -> Tensor:
        return self._product(inputs, self.kernel, masks)

    def _advance(self, projected: Tensor, states: Sequence[Tensor], masks: Masks) -> tuple[Tensor, list[Tensor]]:
        state = self.activation(
            self._biased(projected, self.bias) + self._product(states[0], self.recurrent_kernel, masks)
        )
        return state, [state]


class SimpleRNN(CellLayer):
    """`SimpleRNNCell` over sequences (rows, time, features); takes its and `RNN`'s arguments, in Keras' order."""

    def __init__(
        self,
        units: int,
        activation: ActivationArgument = "tanh",
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
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(SimpleRNNCell, "simple_rnn_cell", arguments_of(locals()), **options)
