"""What a GPU wants of the fuser: its externs, what follows them, and how threads share reductions.

Each thread computes one element and recomputes what it needs, since a launch, and a byte of memory, cost more than
arithmetic.
"""

from collections.abc import Iterable, Mapping

from dptrain.backend.cuda.libraries.providers import is_by_library, is_product
from dptrain.program.body import has_body
from dptrain.program.codegen.kernels import reduced_axes
from dptrain.program.codegen.views import marked
from dptrain.program.dims import Dim
from dptrain.program.lowering import (
    AttentionKernel,
    ConvolutionLowering,
    HostCall,
    Product,
    Reduction,
    UserKernel,
    ViewMap,
    axes_of,
    in_order,
    is_same,
    lowering_of,
)
from dptrain.program.schedule.nest import Axes, Frame, Side
from dptrain.program.schedule.policy import Epilogue, Policy
from dptrain.program.shapes import Shape, is_one, size
from dptrain.program.tensor import Tensor

# Sums over axes that are apart, or between others: terms from which threads share a sum, and from which blocks do if
# the batch's rows do not share the work; and how many must be adjacent for lanes to iterate along them.
_LONG_SUM, _LONG_TOTAL, _SIDE_BY_SIDE = 32, 2048, 8
# Elementwise ops: at most so many are recomputed for several nests, and at most so many in a chain for one.
_COMPUTED_AGAIN, _DEEP = 32, 64


def operand_of(tensor: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor in memory behind a factor of a product, and whether its last two axes are transposed there.

    A transpose is looked through if the views outside it keep the matrices: a reshape to other matrices reads elements
    in the order of the transpose, which is nowhere in memory. Inside it any reshape will do.
    """
    matrix, transposed = marked(tensor.shape[-2:]), False
    while tensor.op is not None and tensor.op.is_view:
        last = tensor.ndim - 1
        exchanges = axes_of(tensor) == (*range(last - 1), last, last - 1)
        if exchanges and not transposed and marked(tensor.shape[-2:]) == matrix:
            transposed = True
        elif not is_same(tensor) and lowering_of(tensor) != ViewMap():
            break
        tensor = tensor.inputs[0]
    return tensor, transposed


def factors_of(tensor: Tensor) -> list[tuple[Tensor, bool]]:
    """Return `operand_of` both factors of a product; those of a convolution are stored in order."""
    if isinstance(lowering_of(tensor), ConvolutionLowering):
        return [(in_order(factor), False) for factor in tensor.inputs]
    return [operand_of(factor) for factor in tensor.inputs]


def product_in(members: Iterable[Tensor]) -> Tensor:
    """Return the product, or the convolution, whose nest has these members."""
    (product,) = filter(is_product, members)
    return product


def reduction(tensor: Tensor) -> tuple[Frame, Axes] | None:
    """Return how, and over which elements, a reduction is computed for any number of rows; see `Policy`."""
    if not isinstance(lowering_of(tensor), Reduction):
        return None
    shape, axes = tensor.inputs[0].shape, reduced_axes(tensor)
    long_axes = [axis for axis, n in enumerate(shape) if not is_one(n)]
    over = [axis for axis in long_axes if axis in axes]
    kept_axes = [axis for axis in long_axes if axis not in axes]
    if not over:
        return None
    if not kept_axes:
        return "map", (("row", shape),)
    by_row = _sides(shape, {axis: "row" if axis in kept_axes else "column" for axis in long_axes})
    by_column = _sides(shape, {axis: "row" if axis in over else "column" for axis in long_axes})
    if over[0] > kept_axes[-1]:
        return "rows", by_row
    if over[-1] < kept_axes[0]:
        return "columns", by_column
    last = tuple(shape[axis] for axis in over if axis > kept_axes[-1])
    terms = tuple(shape[axis] for axis in over)
    if not _has_rows(terms) and size(terms) < _LONG_SUM:
        return None
    if not last:
        return "columns", by_column
    if _has_rows(shape[axis] for axis in kept_axes):
        return "rows", by_row
    if not _has_rows(last) and size(last) < _SIDE_BY_SIDE:
        return "columns", by_column
    return ("totals", by_column) if _has_rows(terms) or size(terms) >= _LONG_TOTAL else ("rows", by_row)


def _has_rows(shape: Iterable[int]) -> bool:
    return any(isinstance(n, Dim) for n in shape)


def _sides(shape: Shape, sides: Mapping[int, Side]) -> Axes:
    """Return the axes of a shape by sides; an axis of length 1 joins the one before."""
    merged: list[tuple[Side, Shape]] = []
    for axis, n in enumerate(shape):
        side = sides.get(axis, merged[-1][0] if merged else next(iter(sides.values())))
        if merged and merged[-1][0] == side:
            merged[-1] = side, (*merged[-1][1], n)
        else:
            merged.append((side, (n,)))
    return tuple(merged)


def _extern(tensor: Tensor) -> Frame | None:
    if is_product(tensor):
        return "product"
    if isinstance(lowering_of(tensor), UserKernel | HostCall):
        return "call"
    if has_body(tensor):
        return "loop"
    return "attention" if isinstance(lowering_of(tensor), AttentionKernel) else None


def _operands(tensor: Tensor) -> list[Tensor]:
    if isinstance(lowering_of(tensor), Product | ConvolutionLowering):
        return [factor for factor, _ in factors_of(tensor)]
    return list(tensor.inputs)


def _row_operand(tensor: Tensor) -> Tensor | None:
    if not isinstance(lowering_of(tensor), Product) or not is_product(tensor) or tensor.ndim != 2:
        return None
    (a, transposed), (b, _) = factors_of(tensor)
    return None if transposed or a is b else a


# An update in the blocks of a matrix product would wait for all readers of the old value, often the product beside
# this one. A convolution's kernel is small compared with its gradient's sums, and so are the sums of its results.
_OF_PRODUCT, _OF_CONVOLUTION = Epilogue(frozenset(), updates=False), Epilogue(frozenset({"sum"}), updates=True)


def _epilogue(product: Tensor) -> Epilogue | None:
    if is_by_library(product):
        return None
    return _OF_CONVOLUTION if isinstance(lowering_of(product), ConvolutionLowering) else _OF_PRODUCT


# A product takes 120 registers a thread or more, and so does its whole launch: memory-bound functions, such as an
# optimizer's update, would have too few threads there to saturate the memory.
_HEAVY = frozenset[Frame]({"product", "attention", "loop"})

POLICY = Policy(
    recomputed=_COMPUTED_AGAIN,
    chain=_DEEP,
    extern=_extern,
    operands=_operands,
    row_operand=_row_operand,
    epilogue=_epilogue,
    reduction=reduction,
    heavy=_HEAVY,
    earliest=_HEAVY | {"call"},
)
