"""EinsumDense: a product with a kernel over the axes named by an equation."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.initializers.variance_scaling import VarianceScaling
from dptrain.layers.base import (
    ActivationArgument,
    BuildShape,
    ConstraintArgument,
    InitializerArgument,
    RegularizerArgument,
)
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.lora import LoraKernelLayer
from dptrain.program.tensor import Tensor

_WORD = "([a-zA-Z]+)"
_FORMS = (
    f"{_WORD},{_WORD}->{_WORD}",
    rf"\.\.\.{_WORD},{_WORD}->\.\.\.{_WORD}",
    rf"{_WORD}\.\.\.,{_WORD}->{_WORD}\.\.\.",
)


class _Shapes(NamedTuple):
    """Shapes of the weights for an equation."""

    kernel: tuple[int | None, ...]
    bias: tuple[int | None, ...] | None  # None without a bias
    inputs: tuple[int, ...]  # axes of the kernel that are summed over
    outputs: tuple[int, ...]  # and those that are in the result


class EinsumDense(LoraKernelLayer):
    """y = activation(einsum(equation, x, kernel) + bias).

    Args:
        equation: such as "ab,bc->ac", "...x,xy->...y" or "ab...,bc->ac...".
        output_shape: of a sample, without the axes of an ellipsis; None for lengths of the input.
        bias_axes: letters of the result along which there is a bias; None for no bias.
        lora_rank, lora_alpha: begin with `enable_lora(lora_rank, lora_alpha)`.
        gptq_unpacked_column_size, quantization_config: must be None.
    """

    _unwritten = ("output_shape", "lora_rank", "lora_alpha", "gptq_unpacked_column_size")
    _always_written = ("activity_regularizer",)

    def __init__(
        self,
        equation: str,
        output_shape: int | Sequence[int | None],
        activation: ActivationArgument = None,
        bias_axes: str | None = None,
        kernel_initializer: InitializerArgument = "glorot_uniform",
        bias_initializer: InitializerArgument = "zeros",
        kernel_regularizer: RegularizerArgument = None,
        bias_regularizer: RegularizerArgument = None,
        kernel_constraint: ConstraintArgument = None,
        bias_constraint: ConstraintArgument = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        gptq_unpacked_column_size: None = None,
        quantization_config: None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *(activation, bias_axes is not None, kernel_initializer, bias_initializer, kernel_regularizer),
            *(bias_regularizer, kernel_constraint, bias_constraint),
            **options,
        )
        self._set_lora(lora_rank, lora_alpha)
        self._refuse(quantization_config=quantization_config)
        self._refuse(gptq_unpacked_column_size=gptq_unpacked_column_size)
        self.equation, self.bias_axes = equation, bias_axes
        self.partial_output_shape = (output_shape,) if isinstance(output_shape, int) else tuple(output_shape)

    def _get_own_config(self) -> dict[str, Any]:
        """Return the arguments, including the output's shape."""
        return super()._get_own_config() | {"output_shape": list(self.partial_output_shape)}

    def build(self, input_shape: BuildShape) -> None:
        """Make kernel and bias."""
        shapes = _shapes(self.equation, self.bias_axes, input_shape, self.partial_output_shape)
        initializer = self.kernel_initializer
        if isinstance(initializer, VarianceScaling) and None in (initializer.input_axes, initializer.output_axes):
            axes = {"input_axes": shapes.inputs, "output_axes": shapes.outputs}
            self.kernel_initializer = type(initializer)(**initializer._get_config() | axes)
        self._make_weights(shapes.kernel, shapes.bias or ())
        self.kernel_initializer = initializer
        self.input_spec = InputSpec(ndim=len(input_shape))
        self._build_lora()

    def call(self, inputs: Tensor) -> Tensor:
        """Return activation(einsum(equation, x, kernel) + bias)."""
        x, factors = self._floating(inputs), self._factors
        if factors is None or not _has_columns(self.equation):
            y = ops.einsum(self.equation, x, self.kernel)
        else:
            narrow = ops.einsum(self.equation, x, ops.cast(factors[0], x.dtype))
            y = ops.einsum(self.equation, x, self._base) + self._widened(narrow, factors[1])
        outputs: Tensor = self.activation(self._add_bias(y))
        return outputs


def _has_columns(equation: str) -> bool:
    """Whether the kernel's last axis is the result's, and no axis of the input."""
    inputs, kernel, result = re.split(",|->", equation.replace(" ", ""))
    return result[-1] == kernel[-1] and kernel[-1] not in inputs and kernel.count(kernel[-1]) == 1


def _shapes(
    equation: str, bias_axes: str | None, input_shape: BuildShape, output_shape: Sequence[int | None]
) -> _Shapes:
    """Return the shapes of the weights; refuse equations and shapes that do not match."""
    matches = [re.fullmatch(form, equation.replace(" ", "")) for form in _FORMS]
    match = next((candidate for candidate in matches if candidate), None)
    if match is None:
        raise ConfigError(
            f"Invalid einsum equation '{equation}'. Equations must be in the form [X],[Y]->[Z], ...[X],[Y]->...[Z], or "
            "[X]...,[Y]->[Z]...."
        )
    letters, kernel, result = match.groups()
    has_leading_ellipsis, elided = bool(matches[1]), len(input_shape) - len(letters)
    if elided < 0 or (elided and match is matches[0]):
        raise ConfigError(f"equation '{equation}' does not match an input of shape {input_shape}")
    # The rows are the first axis: a letter, or the first axis of an ellipsis.
    input_lengths = dict(zip(letters, input_shape[elided if has_leading_ellipsis else 0 :], strict=False))
    lengths = (input_shape[0], *output_shape) if not (has_leading_ellipsis and elided) else tuple(output_shape)
    if len(lengths) != len(result):
        raise ConfigError(
            f"equation '{equation}': output_shape={tuple(output_shape)}, expected a length for each letter"
        )
    output_lengths = dict(zip(result, lengths, strict=True))
    for letter, length in input_lengths.items():
        if output_lengths.get(letter) not in (None, length):
            raise ConfigError(
                f"Input shape and output shape do not match at shared dimension '{letter}'. Input shape is {length}, "
                f"and output shape is {output_lengths[letter]}."
            )
    for letter in result:
        if letter not in letters + kernel:
            raise ConfigError(
                f"Dimension '{letter}' was specified in the output '{result}' but has no corresponding dim in the "
                f"input spec '{letters}' or weight spec '{kernel}'"
            )
    unknown = [letter for letter in kernel if letter not in input_lengths and letter not in output_lengths]
    if unknown:
        raise ConfigError(
            f"Weight dimension '{unknown[0]}' did not have a match in either the input spec '{letters}' or the output "
            f"spec '{result}'. For this layer, the weight must be fully specified."
        )
    letter_lengths = output_lengths | {
        letter: n for letter, n in input_lengths.items() if output_lengths.get(letter) is None
    }
    bias = None
    if bias_axes is not None:
        wrong = [letter for letter in bias_axes if letter not in result]
        if wrong:
            raise ConfigError(
                f"Bias dimension '{wrong[0]}' was requested, but is not part of the output spec '{result}'"
            )
        first = min((result.index(letter) for letter in bias_axes), default=len(result))
        bias = tuple(letter_lengths[letter] if letter in bias_axes else 1 for letter in result[first:])
        bias = bias if has_leading_ellipsis else (*bias, *(1,) * elided)
    inputs = tuple(axis for axis, letter in enumerate(kernel) if letter not in output_lengths)
    outputs = tuple(axis for axis, letter in enumerate(kernel) if letter in output_lengths)
    return _Shapes(tuple(letter_lengths[letter] for letter in kernel), bias, inputs, outputs)
