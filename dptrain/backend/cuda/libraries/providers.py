"""Who computes each matrix product and each convolution of a program: our kernels, or a library of NVIDIA's.

That is decided once, before kernels are grouped, and stored as the tensor's attribute "by". A library's op is a
separate call: nothing shares its launch, and it is never part of a pack.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from dptrain.program.codegen.index_expr import ONE, numel
from dptrain.program.lowering import ConvolutionLowering, Product, lowering_of
from dptrain.program.operand import OPERATORS
from dptrain.program.passes import rewritten
from dptrain.program.program import Program
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor
from dptrain.runtime.types import type_of

Kind = Literal["gemm", "conv"]
# The libraries for matrix products and for convolutions.
LIBRARIES: dict[Kind, str] = {"gemm": "cublaslt", "conv": "cudnn"}
# Accepted providers: "auto" measures which of two is faster.
PROVIDERS: dict[Kind, tuple[str, ...]] = {kind: ("dptrain", one, "auto") for kind, one in LIBRARIES.items()}
# The axes of a kernel (R, S, I, O) in the order in which libraries have them: O, R, S, I.
_LIBRARY_KERNEL = (3, 0, 1, 2)
_MAKES = ("places", "images", "kernel")


class Problem(NamedTuple):
    """A product ("gemm") or a convolution ("conv") for a library; factors are of `dtype`, results float32.

    Attributes:
        precision: of the multiplications: "float32", "tf32" or "half".
        sizes: of a product: whether a is stored as (K, M) and b as (N, K), the number of products, M, N and K; of a
            convolution: its result, see `_MAKES`, B, I, O and the fields of its window, see `Windows.numbers`.
    """

    kind: Kind
    dtype: str
    precision: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        """The key in files and records."""
        return f"{self.kind} {self.dtype} {self.precision} {' '.join(map(str, self.sizes))}"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute, which no library takes."""
        return 0 in (self.sizes[2:] if self.kind == "gemm" else self.sizes[1:8])

    @property
    def makes(self) -> str:
        """A convolution's result, see `ConvolutionLowering.makes`."""
        return _MAKES[self.sizes[0]]


Provider = Callable[[Problem], str]


@dataclass(frozen=True)
class Matrices:
    """M, N and K of products, their number, and the elements between matrices of each factor (0: shared)."""

    sizes: tuple[int, int, int]
    batch: int
    steps: tuple[int, int]


def matrices(result: Tensor, transposed_a: bool, count: Callable[[Shape], int]) -> Matrices:
    """Return the matrix product that computes a tensor; `transposed_a`: the first factor is stored as (K, M)."""
    batch = count(result.shape[:-2])
    M, N, K = (count((n,)) for n in (*result.shape[-2:], result.inputs[0].shape[-1]))
    batch_a, batch_b = (count(factor.shape[:-2]) for factor in result.inputs)
    if batch_b == 1 and batch > 1 and not transposed_a:
        M, batch, batch_a = M * batch, 1, 1  # the rows of all matrices become one matrix's
    return Matrices((M, N, K), batch, (M * K if batch_a > 1 else 0, K * N if batch_b > 1 else 0))


def is_product(tensor: Tensor) -> bool:
    """Whether tiled kernels, or a library, compute a tensor.

    These are convolutions, and matrices whose factors have equal batches or none, both in float32 or in one half type.
    """
    if not isinstance(lowering := lowering_of(tensor), Product | ConvolutionLowering) or tensor.dtype != np.float32:
        return False
    a, b = (factor.dtype for factor in tensor.inputs)
    if a != b or not type_of(a).is_factor or type_of(a).compute != np.float32:
        return False
    if isinstance(lowering, ConvolutionLowering):
        return True
    batch = numel(tensor.shape[:-2])
    return all(numel(factor.shape[:-2]) in (batch, ONE) for factor in tensor.inputs)


def is_by_library(tensor: Tensor) -> bool:
    """Whether a library computes a tensor."""
    return "by" in tensor.attributes and is_product(tensor)


def problem_of(tensor: Tensor, transposed: tuple[bool, bool], count: Callable[[Shape], int]) -> Problem:
    """Return the problem of a tensor that `is_product`, given which factors are stored transposed."""
    dtype = tensor.inputs[0].dtype.name
    precision = str(tensor.attributes.get("precision", "float32"))
    lowering = lowering_of(tensor)
    if isinstance(lowering, ConvolutionLowering):
        images, _, kernel = lowering.shapes(tensor)
        sizes = (_MAKES.index(lowering.makes), *(count((n,)) for n in (images[0], *kernel[2:])))
        return Problem("conv", dtype, precision, (*sizes, *lowering.numbers(tensor)))
    dimensions = matrices(tensor, transposed[0], count)
    return Problem("gemm", dtype, precision, (*map(int, transposed), dimensions.batch, *dimensions.sizes))


def asked(gemm: str, conv: str) -> Provider:
    """Return the providers known without a GPU: "auto" means our kernels."""
    chosen = {kind: name for kind, name in (("gemm", gemm), ("conv", conv)) if name == LIBRARIES[kind]}  # type: ignore[index]
    return lambda problem: chosen.get(problem.kind, "dptrain")


def with_providers(
    program: Program,
    provider: Provider,
    count: Callable[[Shape], int],
    factors: Callable[[Tensor], list[tuple[Tensor, bool]]],
) -> Program:
    """Choose the providers of a program's products and convolutions, whose precisions are set.

    A library's convolution has its kernel stored as (O, R, S, I): our kernels transpose it before, and readers of its
    gradient transpose that.
    """
    kernels: dict[Tensor, Tensor] = {}

    def transposed(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
        shape = tuple(tensor.shape[axis] for axis in axes)
        return Tensor(OPERATORS["transpose"], (tensor,), {"axes": axes}, shape, tensor.dtype)

    def chosen(tensor: Tensor) -> Tensor:
        if not is_product(tensor):
            return tensor
        (_, transposed_a), (_, transposed_b) = factors(tensor)
        problem = problem_of(tensor, (transposed_a, transposed_b), count)
        by = "dptrain" if problem.is_empty else provider(problem)
        if by == "dptrain":
            return tensor
        attributes: dict[str, Any] = {**tensor.attributes, "by": by}
        lowering = lowering_of(tensor)
        if not isinstance(lowering, ConvolutionLowering):
            return Tensor(tensor.op, tensor.inputs, attributes, tensor.shape, tensor.dtype, name=tensor.name)
        attributes["kernel_axes"] = _LIBRARY_KERNEL
        if lowering.makes == "kernel":
            shape = tuple(tensor.shape[axis] for axis in _LIBRARY_KERNEL)
            gradient = Tensor(tensor.op, tensor.inputs, attributes, shape, tensor.dtype, name=tensor.name)
            return transposed(gradient, tuple(_LIBRARY_KERNEL.index(axis) for axis in range(4)))
        data, kernel = tensor.inputs
        if kernel not in kernels:
            kernels[kernel] = transposed(kernel, _LIBRARY_KERNEL)
        return Tensor(tensor.op, (data, kernels[kernel]), attributes, tensor.shape, tensor.dtype, name=tensor.name)

    return rewritten(program, chosen)
