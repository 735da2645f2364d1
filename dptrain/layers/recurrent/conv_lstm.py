"""ConvLSTM1D to 3D: an LSTM whose products are convolutions."""

from collections.abc import Sequence
from typing import Any, ClassVar

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import lengths, padding_mode, positive
from dptrain.layers.base import ActivationArgument, ConstraintArgument, InitializerArgument, RegularizerArgument
from dptrain.layers.recurrent.cell import Masks, RecurrentCell, UnitForgetBias, arguments_of
from dptrain.layers.recurrent.rnn import CellLayer
from dptrain.program.tensor import Tensor
from dptrain.runtime.image_format import checked_format


class ConvLSTMCell(RecurrentCell):
    """`LSTMCell` whose products with kernels are convolutions; for other arguments see there.

    Source: X. Shi et al., "Convolutional LSTM network", NeurIPS 2015.

    Args:
        rank: axes of space, 1 to 3.
        filters: channels of h, which is the output, and of c.
        kernel_size, strides, dilation_rate: of the windows of the inputs; for all axes of space, or each.
        padding: "valid" or "same", of the inputs; states are padded to their own size.
        data_format: "channels_last" (the default) or "channels_first".
        dropout: see `LSTMCell`, but with masks for each gate.
    """

    _mask_count = 4
    state_size = -1  # depends on the inputs

    def __init__(
        self,
        rank: int,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int | Sequence[int] = 1,
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
        names = ("rank", "filters", "kernel_size", "strides", "padding", "data_format", "dilation_rate")
        for name in (*names, "unit_forget_bias"):
            arguments.pop(name)
        super().__init__(**arguments, **options)
        self.rank, self.filters = rank, positive("filters", filters)
        self.kernel_size = lengths("kernel_size", kernel_size, rank)
        self.strides = lengths("strides", strides, rank)
        self.padding, self.data_format = padding_mode(padding), checked_format(data_format)
        self.dilation_rate = lengths("dilation_rate", dilation_rate, rank)
        self.unit_forget_bias = bool(unit_forget_bias)
        if max(self.strides) > 1 and max(self.dilation_rate) > 1:
            raise ConfigError(
                "Specifying `strides > 1` is not compatible with `dilation_rate > 1`. Please provide `strides=1` or "
                f"`dilation_rate=1`. Received: strides={self.strides} and dilation_rate={self.dilation_rate}"
            )

    @property
    def _channel_axis(self) -> int:
        return 1 if self.data_format == "channels_first" else -1

    def build(self, input_shape: Any) -> None:
        """Make kernels and bias; ConfigError if the size of the images is not known."""
        self._step_shape = tuple(input_shape[1:])
        if None in self._step_shape:
            raise ConfigError(
                "ConvLSTM layers only support static input shapes for the spatial dimension. Received invalid input "
                f"shape: input_shape={input_shape}"
            )
        gates = 4 * self.filters
        self._make_weights(
            (*self.kernel_size, input_shape[self._channel_axis], gates),
            (*self.kernel_size, self.filters, gates),
            (gates,),
            UnitForgetBias(self.bias_initializer) if self.unit_forget_bias else None,
        )

    def get_initial_state(self, batch_size: Any = None) -> list[Tensor]:
        """Return zeros of the size of a step's output, for h and c."""
        space = self._step_shape[1:] if self._channel_axis == 1 else self._step_shape[:-1]
        size = []
        for length, window, stride, dilation in zip(
            space, self.kernel_size, self.strides, self.dilation_rate, strict=True
        ):
            reach = 0 if self.padding == "same" else dilation * (window - 1)
            size.append(-(-(length - reach) // stride))
        shape = (self.filters, *size) if self._channel_axis == 1 else (*size, self.filters)
        return [ops.zeros((batch_size, *shape), self.compute_dtype) for _ in range(2)]

    def _project(self, inputs: Tensor, masks: Masks) -> Tensor:
        lengths = inputs.shape[: inputs.ndim - self.rank - 1]
        outputs = self._convolved(inputs, self.kernel, masks, self.strides, self.padding, self.dilation_rate)
        if self.bias is not None:
            shape = (-1, *(1,) * self.rank) if self._channel_axis == 1 else (-1,)
            outputs = outputs + ops.reshape(self.bias, shape)
        return ops.reshape(outputs, (*lengths, *outputs.shape[1:])) if len(lengths) > 1 else outputs

    def _advance(self, projected: Tensor, states: Sequence[Tensor], masks: Masks) -> tuple[Tensor, list[Tensor]]:
        h, c = states
        unit_strides = (1,) * self.rank
        gates = projected + self._convolved(h, self.recurrent_kernel, masks, unit_strides, "same", unit_strides)
        i, f, new, o = ops.split(gates, 4, axis=self._channel_axis)
        c = self.recurrent_activation(f) * c + self.recurrent_activation(i) * self.activation(new)
        h = self.recurrent_activation(o) * self.activation(c)
        return h, [h, c]

    def _convolved(
        self, x: Tensor, kernel: Any, masks: Masks, strides: Sequence[int], padding: str, dilation: Sequence[int]
    ) -> Tensor:
        """Return the convolutions of all gates; steps count as rows."""

        def convolve(x: Tensor, kernel: Any) -> Tensor:
            flat = x if x.ndim == self.rank + 2 else ops.reshape(x, (-1, *x.shape[2:]))
            return ops.conv(
                flat, kernel, strides, padding=padding, data_format=self.data_format, dilation_rate=dilation
            )

        if masks is None:
            return convolve(x, kernel)
        parts = []
        for mask, part in zip(masks, ops.split(kernel, 4, axis=-1), strict=True):
            parts.append(convolve(x * (mask if x.ndim == mask.ndim else ops.expand_dims(mask, 1)), part))
        return ops.concatenate(parts, axis=self._channel_axis)


class ConvLSTM(CellLayer):
    """`ConvLSTMCell` over sequences of images; takes the arguments of the cell and of `RNN`."""

    rank: ClassVar[int]

    def __init__(
        self,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int | Sequence[int] = 1,
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
        **options: Any,
    ) -> None:
        arguments = {"rank": self.rank, **arguments_of(locals())}
        super().__init__(ConvLSTMCell, "conv_lstm_cell", arguments, **options)
        self.state_size = [-1, -1]

    def _get_own_config(self) -> dict[str, Any]:
        return {name: value for name, value in super()._get_own_config().items() if name != "rank"}


class ConvLSTM1D(ConvLSTM):
    """`ConvLSTM` over sequences of sequences, (rows, time, length, channels)."""

    rank, _steps_ndim = 1, 4


class ConvLSTM2D(ConvLSTM):
    """`ConvLSTM` over sequences of images, (rows, time, height, width, channels)."""

    rank, _steps_ndim = 2, 5


class ConvLSTM3D(ConvLSTM):
    """`ConvLSTM` over sequences of volumes, (rows, time, depth, height, width, channels)."""

    rank, _steps_ndim = 3, 6
