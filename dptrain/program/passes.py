"""Passes over a program before a backend executes it: each takes a program and returns one."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dptrain.program.codegen.views import marked
from dptrain.program.dims import Dim
from dptrain.program.lowering import ConvolutionLowering, Element, Product, Reduction, ViewMap, axes_of, lowering_of
from dptrain.program.operand import OPERATORS
from dptrain.program.program import Program
from dptrain.program.sharding.mesh import ALL_REDUCE, PlacedProgram
from dptrain.program.tensor import Tensor, tracing
from dptrain.runtime.types import type_of

# Precision of a GPU's float32 products: as they are, or with factors rounded to TF32's 10 bits of mantissa.
PRECISIONS = ("float32", "tf32")


def substitutes(tensors: Iterable[Tensor], change: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
    """Rebuild tensors in topological order; `change` returns the new tensor for one whose inputs are new."""
    new: dict[Tensor, Tensor] = {}
    for tensor in tensors:
        new[tensor] = change(tensor.with_inputs([new[read] for read in tensor.inputs]))
    return new


def rewritten(program: Program, change: Callable[[Tensor], Tensor]) -> Program:
    """Rewrite a program by `substitutes`."""
    return _of_substitutes(program, substitutes(program.tensors, change))


def _of_substitutes(program: Program, new: Mapping[Tensor, Tensor]) -> Program:
    rewritten_program = replace(
        program,
        outputs={name: new[tensor] for name, tensor in program.outputs.items()},
        updates={variable: new[tensor] for variable, tensor in program.updates.items()},
        weight_gradients={new.get(tensor, tensor): variable for tensor, variable in program.weight_gradients.items()},
    )
    if isinstance(rewritten_program, PlacedProgram):
        placements_before = rewritten_program.placements
        placements = {
            new[tensor]: placements_before[tensor] for tensor in program.tensors if tensor in placements_before
        }
        rewritten_program = replace(rewritten_program, placements=placements)
    return rewritten_program


def without_all_reduce(tensor: Tensor) -> Tensor:
    """Return the operand of an all-reduce, else the tensor."""
    return tensor.inputs[0] if tensor.op is ALL_REDUCE else tensor


def with_precision(program: Program, precision: str, of_halves: str = "float32") -> Program:
    """Set the precision, one of `PRECISIONS`, of a program's matrix products and convolutions.

    This is the only place that chooses it. Products that are not in float32 keep their type's precision. `of_halves` is
    for products whose factors are conversions from half precision: with "half", or "wgmma" on compute capability 9.0,
    they read the unconverted factors, if of one type. Other products are in TF32, which holds them exactly.
    """

    def chosen(tensor: Tensor) -> Tensor:
        if not isinstance(lowering_of(tensor), Product | ConvolutionLowering) or tensor.dtype != np.float32:
            return tensor
        precision_of_product, factors = precision, list(tensor.inputs)
        if (halves := halves_of(tensor.inputs)) is not None:
            precision_of_product = of_halves
            if precision_of_product in ("half", "wgmma"):
                if halves[0].dtype == halves[1].dtype:
                    factors = halves
                else:
                    precision_of_product = "tf32"
        attributes = {**tensor.attributes, "precision": precision_of_product}
        return Tensor(tensor.op, factors, attributes, tensor.shape, tensor.dtype, name=tensor.name)

    return program if precision == of_halves == "float32" else rewritten(program, chosen)


def with_half_factors(tensor: Tensor) -> Tensor:
    """Replace float32 copies of half-precision matrices in a product by the matrices, to be widened there."""
    if isinstance(lowering_of(tensor), Product) and tensor.dtype == np.float32:
        halves = halves_of(tensor.inputs)
        if halves is not None and halves[0].dtype == halves[1].dtype:
            return tensor.with_inputs(halves)
    return tensor


def sums_of_products(program: Program) -> dict[Tensor, Tensor]:
    """Return matrix products that only a sum over their leading axes reads, by the sum."""
    readers = Counter(read for tensor in program.tensors for read in tensor.inputs)
    readers.update(program.results)
    products = {}
    for tensor in program.tensors:
        if lowering_of(tensor) == Reduction("sum") and not tensor.attributes["keepdims"]:
            product = tensor.inputs[0]
            axes = tuple(range(product.ndim - 2))
            is_product = isinstance(lowering_of(product), Product) and readers[product] == 1
            if is_product and axes and tensor.attributes["axes"] == axes:
                products[tensor] = product
    return products


def with_long_products(program: Program) -> Program:
    """Replace sums of products over leading axes, such as a loop's weight gradients, by one product of all rows."""
    sums = sums_of_products(program)
    new: dict[Tensor, Tensor] = {}
    with tracing():
        for tensor in program.tensors:
            long_product = _long_product(sums[tensor], new) if tensor in sums else None
            new[tensor] = (
                tensor.with_inputs([new[operand] for operand in tensor.inputs])
                if long_product is None
                else long_product
            )
    return _of_substitutes(program, new)


def _long_product(product: Tensor, new: Mapping[Tensor, Tensor]) -> Tensor | None:
    """Return the sum of products of transposed (..., k, m) and (..., k, n) as one of all rows; None for others."""
    a, b = product.inputs
    last = a.ndim - 1
    if axes_of(a) != (*range(last - 1), last, last - 1) or marked(a.shape[:-2]) != marked(b.shape[:-2]):
        return None
    rows = b.shape[:-1]
    if sum(isinstance(n, Dim) for n in rows) > 1:
        return None
    x, y = (OPERATORS["reshape"](new[factor], shape=(math.prod(rows), factor.shape[-1])) for factor in (a.inputs[0], b))
    return OPERATORS["@"](OPERATORS["transpose"](x, axes=(1, 0)), y)


def halves_of(copies: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the half-precision tensors of which float32 ones are copies; None unless all are."""
    halves = [half for tensor in copies if (half := _narrow(tensor)) is not None]
    return halves if len(halves) == len(copies) else None


def _narrow(tensor: Tensor) -> Tensor | None:
    """Return the half-precision tensor that a float32 one is a copy of, or a view of a copy; None for others."""
    lowering = lowering_of(tensor)
    if isinstance(lowering, ViewMap):
        beneath = _narrow(tensor.inputs[0])
        if beneath is None:
            return None
        return Tensor(tensor.op, [beneath], tensor.attributes, tensor.shape, beneath.dtype, name=tensor.name)
    if not (isinstance(lowering, Element) and lowering.converts and tensor.dtype == np.float32):
        return None
    known = type_of(tensor.inputs[0].dtype)
    return tensor.inputs[0] if known.is_narrow and known.is_factor else None


def without_repeats(program: Program) -> Program:
    """Compute equal ops once (common subexpression elimination)."""
    return rewritten(program, first_of_equals())


def first_of_equals() -> Callable[[Tensor], Tensor]:
    """Return a function that returns the first of equal tensors that it was given."""
    firsts: dict[Any, Tensor] = {}
    return lambda tensor: firsts.setdefault(_identity(tensor), tensor)


def _identity(tensor: Tensor) -> Any:
    """Return a key of equal tensors with identical inputs."""
    if tensor.op is None and (tensor.value is None or tensor.value.size != 1):
        return id(tensor)
    source = tensor.value.tobytes() if tensor.value is not None else tuple(id(operand) for operand in tensor.inputs)
    attributes = tuple(sorted((name, _comparable(value)) for name, value in tensor.attributes.items()))
    return id(tensor.op), tensor.index, source, attributes, marked(tensor.shape), tensor.dtype


def _comparable(value: Any) -> Any:
    try:
        return comparable(value)
    except TypeError:
        return ("object", id(value))


def comparable(value: Any) -> Hashable:
    """Return an attribute as a key, equal bit for bit and for every number of rows; TypeError for an array, say."""
    if isinstance(value, tuple | list):
        return tuple(map(comparable, value))
    if isinstance(value, Dim):
        return (value.names, value.scale, value.offset, value.blocks)
    if isinstance(value, float):  # 0.0 == -0.0
        return (type(value).__name__, value.hex())
    if isinstance(value, np.generic):
        return (type(value).__name__, value.tobytes())
    hash(value)
    return (type(value).__name__, value)
