"""Ops of your own: a CUDA kernel with the NumPy function that says what it computes.

An op can be called wherever layers, losses and steps call the built-in ones. On the CPU the NumPy function runs, on a
GPU the kernel, compiled at its first use into the same cache as the built-in kernels. `dptrain.testing.check_op`
compares the two.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.backend.custom import LETTERS, Launch, Op, Shape
from dptrain.registry.names import not_there

__all__ = ["LETTERS", "Launch", "Op", "op"]

if not TYPE_CHECKING:  # for which any name would do
    __getattr__ = not_there("ops", __all__)


def op(
    *,
    source: str | Path,
    arguments: str,
    kernel: str | None = None,
    launch: Callable[..., Launch] | None = None,
    outputs: int = 1,
    output_shapes: Callable[..., Sequence[Shape]] | None = None,
) -> Callable[[Callable[..., None]], Op]:
    """Return a decorator that makes an op of a NumPy function.

    The function's positional parameters are buffers, inputs first, outputs last; what comes after `*` are numbers. It
    must overwrite its outputs in place (`y[...] = `), in the dtype that they have.

    The kernel is an `extern "C" __global__` function, compiled with `-O3 -std=c++17` for the GPU at hand; the built-in
    `common.cuh` can be included, and so can what lies beside a source file. Floating-point buffers are float32.

    Args:
        source: CUDA C++ as text, or the path of a file.
        arguments: types of the kernel's arguments, a letter each: P pointer, i int, I unsigned int, q long long,
            Q unsigned long long, f float, d double.
        kernel: the kernel's name; by default the function's.
        launch: called with the op's buffers and numbers, returns `Launch`: grid, block and the kernel's arguments. By
            default the kernel gets the buffers, the number of elements of the first output (q), and the numbers in
            order; on ceil(elements / 256) blocks of 256 threads, but no more than 2048, so that it must loop:
            `for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size;
            i += (long long)gridDim.x * blockDim.x)`.
        outputs: how many of the buffers are outputs.
        output_shapes: called with the shapes of the inputs, returns those of the outputs, for `check_op`; by default
            they have the first input's shape.

    Returns:
        The decorator; the op is called as `name(ops, x, ..., y, number=...)`, and `@name.gradient(...)` registers its
        gradient.

    Raises:
        ConfigError: arguments that do not go together, or a source file that is not there.
    """
    return lambda reference: Op(reference, source, arguments, kernel, launch, outputs, output_shapes)
