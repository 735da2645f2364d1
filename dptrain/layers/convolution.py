"""Conv2D and its transpose, of images (rows, height, width, channels)."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.layers.arguments import channels_last, padding_mode, pair, positive
from dptrain.layers.base import (
    ActivationArgument,
    BuildShape,
    ConstraintArgument,
    InitializerArgument,
    RegularizerArgument,
)
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.kernel import KernelLayer
from dptrain.program.tensor import Tensor


class _Convolution(KernelLayer):
    """What both have in common; the arguments are theirs."""

    _always_written = ("activity_regularizer",)

    def __init__(
        self,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int],
        padding: str,
        data_format: str | None,
        dilation_rate: int | Sequence[int],
        *kernel: Any,
        **options: Any,
    ) -> None:
        super().__init__(*kernel, **options)
        self.filters, self.kernel_size = positive("filters", filters), pair("kernel_size", kernel_size)
        self.strides, self.dilation_rate = pair("strides", strides), pair("dilation_rate", dilation_rate)
        self.padding, self.data_format = padding_mode(padding), channels_last(self, data_format)
        if max(self.strides) > 1 and max(self.dilation_rate) > 1:
            raise ConfigError(
                "`strides > 1` not supported in conjunction with `dilation_rate > 1`. "
                f"Received: strides={self.strides} and dilation_rate={self.dilation_rate}"
            )
        self.input_spec = InputSpec(ndim=4)

    def build(self, input_shape: BuildShape) -> None:
        """Make kernel and bias."""
        channels = input_shape[-1]
        self._make_weights((*self.kernel_size, *self._ends(channels)), self.filters)
        self.input_spec = InputSpec(ndim=4, axes={-1: channels})

    def _ends(self, channels: int | None) -> tuple[int | None, int | None]:
        """The last two lengths of the kernel."""
        return channels, self.filters

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, height out, width out, filters)."""
        found: Tensor = self.activation(self._biased(self._convolved(self._floating(inputs))))
        return found

    @abstractmethod
    def _convolved(self, x: Tensor) -> Tensor:
        """Return the convolution of x alone."""


class Conv2D(_Convolution):
    """y = activation(x * kernel + bias), a convolution (cross-correlation) over height and width.

    The kernel is (kernel height, kernel width, channels, filters).

    Args:
        filters: channels of the output, at least 1.
        kernel_size: height and width of the kernel, one number for both, or two; as all pairs here.
        strides: between the kernel's places.
        padding: "valid" (none), or "same": zeros around the image, so that ceil(height / stride) rows come out.
        data_format: only "channels_last", which None stands for.
        dilation_rate: between the kernel's elements; above 1 only with strides of 1.
        groups: only 1.
        activation: name or function of `dptrain.activations`, or None for "linear".
        use_bias: whether there is a bias.
        kernel_initializer: name or initializer of the kernel.
        bias_initializer: name or initializer of the bias.
        kernel_regularizer: name or regularizer of the kernel.
        bias_regularizer: name or regularizer of the bias.
        activity_regularizer: name or regularizer of the output.
        kernel_constraint: name or constraint of the kernel.
        bias_constraint: name or constraint of the bias.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = (1, 1),
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int | Sequence[int] = (1, 1),
        groups: int = 1,
        activation: ActivationArgument = None,
        use_bias: bool = True,
        kernel_initializer: InitializerArgument = "glorot_uniform",
        bias_initializer: InitializerArgument = "zeros",
        kernel_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        activity_regularizer: RegularizerArgument = None,
        kernel_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *(filters, kernel_size, strides, padding, data_format, dilation_rate),
            *(activation, use_bias, kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer),
            *(kernel_constraint, bias_constraint),
            activity_regularizer=activity_regularizer,
            **options,
        )
        self.refuse(groups=None if groups == 1 else groups)
        self.groups = 1

    def _convolved(self, x: Tensor) -> Tensor:
        return ops.conv(x, self.kernel, self.strides, self.padding, dilation_rate=self.dilation_rate)


class Conv2DTranspose(_Convolution):
    """The transpose of a convolution: larger images, (height - 1) * stride + max(kernel height, stride) rows.

    The kernel is (kernel height, kernel width, filters, channels).

    Args:
        filters: as `Conv2D`, and so all that is not here.
        kernel_size: height and width of the kernel.
        strides: how much larger the images get.
        padding: "valid", or "same": height * stride rows come out.
        output_padding: only None.
        data_format: only "channels_last", which None stands for.
        dilation_rate: only 1.
        activation: as `Conv2D`.
        use_bias: as `Conv2D`.
        kernel_initializer: as `Conv2D`.
        bias_initializer: as `Conv2D`.
        kernel_regularizer: as `Conv2D`.
        bias_regularizer: as `Conv2D`.
        activity_regularizer: as `Conv2D`.
        kernel_constraint: name or constraint of the kernel.
        bias_constraint: name or constraint of the bias.
        options: as `Layer`.

    Raises:
        ConfigError: an argument is out of range, unknown or not supported.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = (1, 1),
        padding: str = "valid",
        output_padding: None = None,
        data_format: str | None = None,
        dilation_rate: int | Sequence[int] = (1, 1),
        activation: ActivationArgument = None,
        use_bias: bool = True,
        kernel_initializer: InitializerArgument = "glorot_uniform",
        bias_initializer: InitializerArgument = "zeros",
        kernel_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        activity_regularizer: RegularizerArgument = None,
        kernel_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *(filters, kernel_size, strides, padding, data_format, dilation_rate),
            *(activation, use_bias, kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer),
            *(kernel_constraint, bias_constraint),
            activity_regularizer=activity_regularizer,
            **options,
        )
        self.refuse(output_padding=output_padding)
        if self.dilation_rate != (1, 1):
            self.refuse(dilation_rate=dilation_rate)

    def _ends(self, channels: int | None) -> tuple[int | None, int | None]:
        return self.filters, channels

    def _convolved(self, x: Tensor) -> Tensor:
        return ops.conv_transpose(x, self.kernel, self.strides, self.padding)


Convolution2D, Convolution2DTranspose = Conv2D, Conv2DTranspose
