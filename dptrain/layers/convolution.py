"""Convolutions and their transposes over one, two or three axes of space."""

from collections.abc import Sequence
from typing import Any

from dptrain import constraints, initializers, ops, regularizers
from dptrain.errors import ConfigError
from dptrain.layers.arguments import lengths, padding_mode, positive
from dptrain.layers.base import (
    ActivationArgument,
    BuildShape,
    ConstraintArgument,
    InitializerArgument,
    RegularizerArgument,
)
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.kernel import BiasLayer, KernelLayer
from dptrain.layers.lora import LoraKernelLayer
from dptrain.layers.spatial import SpatialLayer
from dptrain.program.tensor import Tensor, Variable

Extents = int | Sequence[int]


class WindowLayer(SpatialLayer, BiasLayer):
    """Base of all convolutions, whose windows move over images."""

    _always_written = ("activity_regularizer",)

    def _set_windows(
        self, kernel_size: Any, strides: Any, padding: Any, data_format: Any, dilation_rate: Any, causal: bool = False
    ) -> None:
        self.kernel_size = lengths("kernel_size", kernel_size, self.rank)
        self.strides = lengths("strides", strides, self.rank)
        self.dilation_rate = lengths("dilation_rate", dilation_rate, self.rank)
        self.padding = padding_mode(padding, causal)
        self._set_format(data_format)
        self.input_spec = InputSpec(ndim=self.rank + 2)

    def _refuse_strides_and_dilation(self) -> None:
        if max(self.strides) > 1 and max(self.dilation_rate) > 1:
            raise ConfigError(
                "`strides > 1` not supported in conjunction with `dilation_rate > 1`. "
                f"Received: strides={self.strides} and dilation_rate={self.dilation_rate}"
            )

    def _channels(self, input_shape: BuildShape) -> int | None:
        """Return the number of channels, which the layer expects from now on."""
        channels = input_shape[self._channel_axis]
        self.input_spec = InputSpec(ndim=self.rank + 2, axes={self._channel_axis: channels})
        return channels

    def call(self, inputs: Tensor) -> Tensor:
        """Return (rows, *space, filters), or (rows, filters, *space)."""
        x = self._with_channels_last(self._floating(inputs))
        outputs: Tensor = self.activation(self._in_format(self._add_bias(self._convolved(x))))
        return outputs

    def _convolved(self, x: Tensor) -> Tensor:
        """Return the convolution alone, channels last."""
        raise NotImplementedError

    @property
    def _windows(self) -> dict[str, Any]:
        """Arguments of the ops, which get channels last."""
        return {
            "strides": self.strides,
            "padding": self.padding,
            "dilation_rate": self.dilation_rate,
            "data_format": "channels_last",
        }


class Convolution(WindowLayer, LoraKernelLayer):
    """y = activation(x * kernel + bias), a convolution (cross-correlation) over the axes of space.

    The kernel is (*kernel_size, channels / groups, filters).

    Args:
        filters: channels of the output, at least 1.
        kernel_size: for all axes of space, or each; like strides and dilation_rate.
        strides: between the kernel's positions.
        padding: "valid" (none), or "same": zeros, so that ceil(length / stride) positions result; over one axis also
            "causal": all these zeros before it.
        data_format: "channels_last" (the default) or "channels_first".
        dilation_rate: between the kernel's elements; above 1 only with strides of 1.
        groups: number of groups of channels, each convolved with its part of the filters.
        use_bias: whether to add a bias.
        lora_rank, lora_alpha: begin with `enable_lora(lora_rank, lora_alpha)`.
    """

    _unwritten = ("lora_rank", "lora_alpha")

    def __init__(
        self,
        filters: int,
        kernel_size: Extents,
        strides: Extents = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Extents = 1,
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
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *(activation, use_bias, kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer),
            *(kernel_constraint, bias_constraint),
            activity_regularizer=activity_regularizer,
            **options,
        )
        self._set_lora(lora_rank, lora_alpha)
        self.filters, self.groups = positive("filters", filters), positive("groups", groups)
        if self.filters % self.groups:
            raise ConfigError(
                "The number of filters must be evenly divisible by the number of groups. "
                f"Received: groups={groups}, filters={filters}."
            )
        self._set_windows(kernel_size, strides, padding, data_format, dilation_rate, causal=self.rank == 1)
        self._refuse_strides_and_dilation()

    def build(self, input_shape: BuildShape) -> None:
        """Make kernel and bias."""
        channels = self._channels(input_shape)
        if channels is not None and channels % self.groups:
            raise ConfigError(
                "The number of input channels must be evenly divisible by the number of groups. Received "
                f"groups={self.groups}, but the input has {channels} channels (full input shape is {input_shape})."
            )
        group_channels = None if channels is None else channels // self.groups
        self._make_weights((*self.kernel_size, group_channels, self.filters), (self.filters,))
        self._build_lora()

    def _convolved(self, x: Tensor) -> Tensor:
        return self._convolved_with(x, self.kernel)

    def convolution_op(self, inputs: Any, kernel: Any) -> Tensor:
        """Return the convolution of inputs with a kernel, which a subclass may derive from the layer's."""
        return self._in_format(self._convolved_with(self._with_channels_last(ops.convert_to_tensor(inputs)), kernel))

    def _convolved_with(self, x: Tensor, kernel: Any) -> Tensor:
        if self.padding != "causal":
            return ops.conv(x, kernel, **self._windows)
        before = self.dilation_rate[0] * (self.kernel_size[0] - 1)
        padded = ops.pad(x, [(0, 0), (before, 0), (0, 0)])
        return ops.conv(padded, kernel, **self._windows | {"padding": "valid"})


class Conv1D(Convolution):
    """`Convolution` over one axis: of sequences (rows, length, channels)."""

    rank = 1


class Conv2D(Convolution):
    """`Convolution` over two axes: of images (rows, height, width, channels)."""

    rank = 2


class Conv3D(Convolution):
    """`Convolution` over three axes: of volumes (rows, depth, height, width, channels)."""

    rank = 3


class TransposedConvolution(WindowLayer, KernelLayer):
    """The transpose of a convolution: larger images, (length - 1) * stride + max(kernel, stride) along each axis.

    The kernel is (*kernel_size, filters, channels). For other arguments see `Convolution`.

    Args:
        strides: how much larger the images get.
        padding: "valid", or "same": length * stride positions result.
        output_padding: below the strides, for an explicit size of the output: see `ops.conv_transpose`.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: Extents,
        strides: Extents = 1,
        padding: str = "valid",
        output_padding: Extents | None = None,
        data_format: str | None = None,
        dilation_rate: Extents = 1,
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
            *(activation, use_bias, kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer),
            *(kernel_constraint, bias_constraint),
            activity_regularizer=activity_regularizer,
            **options,
        )
        self.filters = positive("filters", filters)
        self._set_windows(kernel_size, strides, padding, data_format, dilation_rate)
        self._refuse_strides_and_dilation()
        self.output_padding = None
        if output_padding is not None:
            self.output_padding = lengths("output_padding", output_padding, self.rank, least=0)
            for axis, (extra, stride) in enumerate(zip(self.output_padding, self.strides, strict=True)):
                if extra >= stride:
                    raise ConfigError(
                        "`output_padding` must be strictly less than `strides` for all dimensions. At dimension "
                        f"{axis}, `output_padding` is {extra} but `strides` is {stride}. Received: "
                        f"output_padding={self.output_padding}, strides={self.strides}"
                    )

    def build(self, input_shape: BuildShape) -> None:
        """Make kernel and bias."""
        channels = self._channels(input_shape)
        self._make_weights((*self.kernel_size, self.filters, channels), (self.filters,))

    def _convolved(self, x: Tensor) -> Tensor:
        return ops.conv_transpose(x, self.kernel, output_padding=self.output_padding, **self._windows)


class Conv1DTranspose(TransposedConvolution):
    """`TransposedConvolution` over one axis."""

    rank = 1


class Conv2DTranspose(TransposedConvolution):
    """`TransposedConvolution` over two axes."""

    rank = 2


class Conv3DTranspose(TransposedConvolution):
    """`TransposedConvolution` over three axes; `data_format` comes before `output_padding`."""

    rank = 3

    def __init__(
        self,
        filters: int,
        kernel_size: Extents,
        strides: Extents = 1,
        padding: str = "valid",
        data_format: str | None = None,
        output_padding: Extents | None = None,
        dilation_rate: Extents = 1,
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
            *(filters, kernel_size, strides, padding, output_padding, data_format, dilation_rate),
            *(activation, use_bias, kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer),
            *(activity_regularizer, kernel_constraint, bias_constraint),
            **options,
        )


class DepthwiseConvolution(WindowLayer):
    """A convolution of each channel with its own kernels, (*kernel_size, channels, depth_multiplier).

    `padding` is "valid" or "same", `depth_multiplier` the number of outputs of each channel, at least 1. For other
    arguments see `Convolution`.
    """

    def __init__(
        self,
        kernel_size: Extents,
        strides: Extents = 1,
        padding: str = "valid",
        depth_multiplier: int = 1,
        data_format: str | None = None,
        dilation_rate: Extents = 1,
        activation: ActivationArgument = None,
        use_bias: bool = True,
        depthwise_initializer: InitializerArgument = "glorot_uniform",
        bias_initializer: InitializerArgument = "zeros",
        depthwise_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        activity_regularizer: RegularizerArgument = None,
        depthwise_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *(activation, use_bias, bias_initializer, bias_regularizer, bias_constraint),
            activity_regularizer=activity_regularizer,
            **options,
        )
        self.depth_multiplier = positive("depth_multiplier", depth_multiplier)
        self.depthwise_initializer = initializers.get(depthwise_initializer)
        self.depthwise_regularizer = regularizers.get(depthwise_regularizer)
        self.depthwise_constraint = constraints.get(depthwise_constraint)
        self._set_windows(kernel_size, strides, padding, data_format, dilation_rate)

    def _make_depthwise(self, channels: int | None, name: str) -> Variable:
        return self.add_weight(
            (*self.kernel_size, channels, self.depth_multiplier),
            self.depthwise_initializer,
            regularizer=self.depthwise_regularizer,
            constraint=self.depthwise_constraint,
            name=name,
        )

    def build(self, input_shape: BuildShape) -> None:
        """Make kernel and bias."""
        channels = self._channels(input_shape)
        self.kernel = self._make_depthwise(channels, "kernel")
        self._make_bias((None if channels is None else channels * self.depth_multiplier,))

    def _convolved(self, x: Tensor) -> Tensor:
        return ops.depthwise_conv(x, self.kernel, **self._windows)


class DepthwiseConv1D(DepthwiseConvolution):
    """`DepthwiseConvolution` over one axis."""

    rank = 1


class DepthwiseConv2D(DepthwiseConvolution):
    """`DepthwiseConvolution` over two axes."""

    rank = 2


class SeparableConvolution(DepthwiseConvolution):
    """A depthwise convolution, then a pointwise one that mixes its channels into `filters`.

    The kernels are (*kernel_size, channels, depth_multiplier) and (1, ..., channels * depth_multiplier, filters).
    Kernel size, strides, padding, dilation and `depth_multiplier` are those of the depthwise convolution; for these and
    other arguments see `DepthwiseConvolution`.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: Extents,
        strides: Extents = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Extents = 1,
        depth_multiplier: int = 1,
        activation: ActivationArgument = None,
        use_bias: bool = True,
        depthwise_initializer: InitializerArgument = "glorot_uniform",
        pointwise_initializer: InitializerArgument = "glorot_uniform",
        bias_initializer: InitializerArgument = "zeros",
        depthwise_regularizer: RegularizerArgument = None,
        pointwise_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        activity_regularizer: RegularizerArgument = None,
        depthwise_constraint: ConstraintArgument = None,
        pointwise_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *(kernel_size, strides, padding, depth_multiplier, data_format, dilation_rate, activation, use_bias),
            *(depthwise_initializer, bias_initializer, depthwise_regularizer, bias_regularizer, activity_regularizer),
            *(depthwise_constraint, bias_constraint),
            **options,
        )
        self.filters = positive("filters", filters)
        self.pointwise_initializer = initializers.get(pointwise_initializer)
        self.pointwise_regularizer = regularizers.get(pointwise_regularizer)
        self.pointwise_constraint = constraints.get(pointwise_constraint)

    def build(self, input_shape: BuildShape) -> None:
        """Make both kernels and the bias."""
        channels = self._channels(input_shape)
        self.depthwise_kernel = self._make_depthwise(channels, "depthwise_kernel")
        between = None if channels is None else channels * self.depth_multiplier
        self.pointwise_kernel = self.add_weight(
            (*(1,) * self.rank, between, self.filters),
            self.pointwise_initializer,
            regularizer=self.pointwise_regularizer,
            constraint=self.pointwise_constraint,
            name="pointwise_kernel",
        )
        self._make_bias((self.filters,))

    def _convolved(self, x: Tensor) -> Tensor:
        return ops.separable_conv(x, self.depthwise_kernel, self.pointwise_kernel, **self._windows)


class SeparableConv1D(SeparableConvolution):
    """`SeparableConvolution` over one axis."""

    rank = 1


class SeparableConv2D(SeparableConvolution):
    """`SeparableConvolution` over two axes."""

    rank = 2


Convolution1D, Convolution2D, Convolution3D = Conv1D, Conv2D, Conv3D
Convolution1DTranspose, Convolution2DTranspose, Convolution3DTranspose = (
    Conv1DTranspose,
    Conv2DTranspose,
    Conv3DTranspose,
)
SeparableConvolution1D, SeparableConvolution2D = SeparableConv1D, SeparableConv2D
