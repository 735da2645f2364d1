"""Ops of your own: a NumPy function that says what is computed, a CUDA kernel that does the same, and a gradient.

Call them wherever you call built-in ops: in a layer's `call`, a loss, a `train_step`. They are traced, differentiated
and sharded in the same way. CPUs run the NumPy function, GPUs the kernel, compiled at its first use into the cache of
the built-in kernels. `dptrain.testing.check_op` compares the two.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.backend.custom import LETTERS, Launch, OwnKernel
from dptrain.errors import ConfigError
from dptrain.ops.common import floating_dtype
from dptrain.ops.manipulation import zeros
from dptrain.program import op as records
from dptrain.program.lowering import UserKernel
from dptrain.program.shapes import Shape, row_axis
from dptrain.program.sharding.sharding_rule import RuleText, parse_rule
from dptrain.program.tensor import OPS, Array, Tensor, as_tensors
from dptrain.runtime.types import is_floating

__all__ = ["LETTERS", "CustomOp", "Launch", "op"]


class CustomOp:
    """A user's op; `op` makes one.

    Attributes:
        name: of the NumPy function.
        reference: the NumPy function.
        kernel: what a GPU launches.
        records: the entry of the vocabulary for each output.
        gradient_op: the op that computes the gradient, or None.
    """

    def __init__(
        self,
        reference: Callable[..., None],
        source: str | Path,
        arguments: str,
        kernel: str | None,
        launch: Callable[..., Launch] | None,
        outputs: int,
        output_shapes: Callable[..., Sequence[Shape]] | None,
        letters: RuleText | None,
        *,
        of_gradient: bool = False,
    ) -> None:
        if isinstance(source, str) and source and "{" not in source:  # no kernel has so little text
            source = Path(source)
        self.reference, self.source, self.name = reference, source, reference.__name__
        self._output_shapes, self._of_gradient = output_shapes, of_gradient
        self._letters = self._row_rule if letters is None else letters
        self._signature = inspect.signature(reference)
        kinds = self._signature.parameters
        buffers = tuple(name for name, parameter in kinds.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)
        scalars = tuple(name for name, parameter in kinds.items() if parameter.kind is parameter.KEYWORD_ONLY)
        if len(buffers) + len(scalars) != len(kinds) or not 1 <= outputs < len(buffers):
            raise ConfigError(
                f"op {self.name!r}: expected a function (input, ..., output, ..., *, number, ...) with {outputs} "
                f"output(s), found {self.name}{self._signature}"
            )
        if self.name in OPS:
            raise ConfigError(f"op {self.name!r}: a built-in op has this name; rename yours")
        self.inputs, self.outputs, self.scalars = buffers[:-outputs], buffers[-outputs:], scalars
        if letters is not None and not callable(letters):
            parse_rule(letters, self.name, len(self.inputs))
        self.kernel = OwnKernel(
            *(self.name, source, kernel or self.name, arguments, self.inputs, self.outputs, scalars, launch),
            self.output_shapes,
        )
        self.gradient_op: CustomOp | None = None
        self.records = tuple(self._record(number) for number in range(outputs))

    def __call__(self, *inputs: Any, **numbers: Any) -> Any:
        """Return the output as a tensor, or a tuple of them; numbers are passed by name."""
        if len(inputs) != len(self.inputs) or set(numbers) - set(self.scalars):
            raise ConfigError(f"op {self.name!r}: wrong arguments; call it as {self._call()}")
        defaults = {name: self._signature.parameters[name].default for name in self.scalars if name not in numbers}
        if missing := [name for name, value in defaults.items() if value is inspect.Parameter.empty]:
            raise ConfigError(f"op {self.name!r}: {missing[0]!r} is missing; call it as {self._call()}")
        tensors = as_tensors(inputs)
        results = tuple(record(*tensors, **defaults, **numbers) for record in self.records)
        return results[0] if len(results) == 1 else results

    def __deepcopy__(self, memo: Any) -> "CustomOp":
        return self

    def _call(self) -> str:
        return f"{self.name}({', '.join([*self.inputs, *(f'{name}=...' for name in self.scalars)])})"

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array], numbers: Mapping[str, Any]) -> None:
        """Run the NumPy function on arrays."""
        self.reference(*inputs, *outputs, **numbers)

    def output_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the outputs' shapes for inputs of these shapes, by default the first input's."""
        if self._output_shapes is None:
            return [tuple(shapes[0])] * len(self.outputs)
        return [tuple(shape) for shape in self._output_shapes(*shapes)]

    def _record(self, number: int) -> records.Op:
        """Return the vocabulary's entry for one output; it computes all and keeps that one."""

        def compute(*arrays: Array, out: Array, **numbers: Any) -> None:
            shapes = self.output_shapes([array.shape for array in arrays])
            outputs = [out if n == number else np.empty(shape, out.dtype) for n, shape in enumerate(shapes)]
            self.run(arrays, outputs, numbers)

        compute.__name__, compute.__doc__ = self.name, self.reference.__doc__
        record = records.Op(
            compute,
            shape=lambda *shapes, **numbers: self.output_shapes(shapes)[number],
            letters=self._letters,
            dtype=floating_dtype,
            lowering=UserKernel(self.kernel, number),
        )

        @record.gradient
        def rule(tensor: Tensor, dy: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
            if self.gradient_op is None:
                raise ConfigError(f"op {self.name!r} has no gradient: register one with @{self.name}.gradient(...)")
            shapes = self.output_shapes([x.shape for x in inputs])
            output_grads = [dy if n == number else zeros(shape, dy.dtype.name) for n, shape in enumerate(shapes)]
            records = self.gradient_op.records
            return tuple(
                record(*inputs, *output_grads, **tensor.attributes) if is_floating(input_tensor.dtype) else None
                for record, input_tensor in zip(records, inputs, strict=True)
            )

        return record

    def _row_rule(self, shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
        """The default sharding rule: rows make rows, `aX,X->aX`; gradients of inputs without rows are sums."""

        def letters_of_rows(shape: Shape) -> str:
            axis = row_axis(shape)
            if axis:
                raise ConfigError(
                    f"op {self.name!r}: the rows of the batch are not along the first axis; declare with letters= how "
                    "ranks divide it"
                )
            return "X" * len(shape) if axis is None else f"a{'X' * (len(shape) - 1)}"

        operands, result = ",".join(map(letters_of_rows, shapes)), letters_of_rows(out)
        if "a" in operands and "a" not in result and not self._of_gradient:
            raise ConfigError(
                f"op {self.name!r}: its output of shape {tuple(map(int, out))} does not have one row per row of the "
                "batch; declare with letters= that it is summed over the rows, such as letters='aX->X'"
            )
        return f"{operands}->{result}"

    def gradient(
        self,
        *,
        arguments: str,
        source: str | Path | None = None,
        kernel: str | None = None,
        launch: Callable[..., Launch] | None = None,
        letters: RuleText | None = None,
    ) -> Callable[[Callable[..., None]], "CustomOp"]:
        """Return a decorator that makes a NumPy function this op's gradient, which is an op, too.

        The function takes the op's inputs, the gradients in its outputs, and as outputs the gradients in its inputs;
        and the op's numbers: `def name(x, dy, dx, *, beta)` for `def op(x, y, *, beta)`. It is called once for each
        input whose gradient is needed.

        Args:
            arguments, kernel, launch: see `op`.
            source: by default the op's.
            letters: see `op`; by default gradients in inputs that have rows are of these rows, the others are sums over
                them.

        Raises:
            ConfigError: other parameters, or see `op`.
        """

        def make(reference: Callable[..., None]) -> CustomOp:
            inputs, kinds = len(self.inputs), inspect.signature(reference).parameters
            numbers = tuple(name for name, parameter in kinds.items() if parameter.kind is parameter.KEYWORD_ONLY)
            if len(kinds) - len(numbers) != 2 * inputs + len(self.outputs) or numbers != self.scalars:
                raise ConfigError(
                    f"op {reference.__name__!r}: the gradient of {self.name!r} takes {inputs} input(s), "
                    f"{len(self.outputs)} gradient(s) of outputs, {inputs} gradient(s) of inputs to write, and the "
                    f"numbers {list(self.scalars)}; found ({', '.join(kinds)})"
                )
            self.gradient_op = CustomOp(
                reference,
                self.source if source is None else source,
                arguments,
                kernel,
                launch,
                inputs,
                lambda *shapes: list(shapes[:inputs]),
                letters,
                of_gradient=True,
            )
            return self.gradient_op

        return make


def op(
    *,
    source: str | Path,
    arguments: str,
    kernel: str | None = None,
    launch: Callable[..., Launch] | None = None,
    outputs: int = 1,
    output_shapes: Callable[..., Sequence[Shape]] | None = None,
    letters: RuleText | None = None,
) -> Callable[[Callable[..., None]], CustomOp]:
    """Return a decorator that makes an op of a NumPy function; `@name.gradient(...)` then registers its gradient.

    The function's positional parameters are arrays, inputs first, outputs last; what comes after `*` are numbers. It
    must overwrite its outputs in place (`y[...] = `), in their dtype. Callers pass no outputs: `name(x, ...,
    number=...)` returns a tensor, or a tuple of several, each computed by a call of its own.

    The kernel is an `extern "C" __global__` function, compiled with `-O3 -std=c++17` for the GPU at hand. It can
    include the built-in `common.cuh` and what lies beside a source file. Floating-point buffers are float32.

    Args:
        source: CUDA C++ as text, or the path of a file.
        arguments: types of the kernel's arguments, a letter each: P pointer, i int, I unsigned int, q long long,
            Q unsigned long long, f float, d double.
        kernel: the kernel's name; by default the function's.
        launch: called with the op's buffers and numbers, returns `Launch`: grid, block and the kernel's arguments. By
            default the kernel gets the buffers, the number of elements of the first output (q), and the numbers in
            order, on ceil(elements / 256) blocks of 256 threads, at most 2048, so that it must loop:
            `for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size;
            i += (long long)gridDim.x * blockDim.x)`.
        outputs: how many of the parameters are outputs.
        output_shapes: called with the inputs' shapes, returns the outputs'; by default all have the first input's. Take
            lengths that count rows of the batch from the inputs' shapes.
        letters: the axes along which ranks may divide the op, a letter for each axis of inputs and outputs: "ab,b->ab"
            of single elements, "aX->aX" of whole rows, "aX->X" where an output is the sum over rows. A lower-case axis
            may be sharded, a capital one must be whole, "1" is a repeated axis of length 1. Or a function of the
            inputs' shapes, the output's shape and the numbers that returns such text. By default each row of the output
            is made of the same row of the inputs that have rows, and of the others as a whole.

    Raises:
        ConfigError: arguments that do not match, or no such source file.
    """
    return lambda reference: CustomOp(reference, source, arguments, kernel, launch, outputs, output_shapes, letters)
