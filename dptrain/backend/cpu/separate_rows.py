"""Loops whose batch rows do not need each other: each thread takes all steps of its rows, without waiting."""

from dptrain.program.codegen.index_expr import NOTHING, Axis, numel
from dptrain.program.codegen.kernels import Call, Kernel, Loop, LoopMember, ProductKernel, RepeatKernel
from dptrain.program.codegen.views import View, marked
from dptrain.program.lowering import Element, Join, lowering_of
from dptrain.program.tensor import Tensor

# Rows of a thread, and its operations on single elements, from which on it takes some; tests have less.
LEAST_ROWS = 8
LEAST_OPERATIONS = 1 << 16


def has_separate_rows(loop: RepeatKernel) -> bool:
    """Whether each row of a loop's carries and stacked values depends on the same row of its inputs alone."""
    body, step = loop.repeat.body, loop.step
    written = [*body.carries, *loop.results, *(tensor for kernel in step.kernels for tensor in kernel.tensors)]
    read = [*body.slices, *body.captures]
    return (
        not body.guarded
        and all(row_numel(tensor) and row_numel(step.memory_of(tensor)) for tensor in written)
        and not any(has_rows(tensor) and not row_numel(tensor) for tensor in read)
        and all(map(_is_by_rows, step.kernels))
    )


def has_rows(tensor: Tensor) -> bool:
    """Whether a tensor's size depends on the rows of the batch."""
    return numel(tensor.shape)[1] > 0


def row_numel(tensor: Tensor) -> int:
    """Return the elements of a row of a tensor whose first axis is the batch's rows; 0 for other tensors."""
    if not tensor.ndim or marked(tensor.shape)[0] != (1, True):
        return 0
    number, power = numel(tensor.shape[1:])
    return 0 if power else number


def least_rows(loop: RepeatKernel) -> int:
    """Return from how many rows a thread on steps fill tiles and take longer than handing them over."""
    operations = 0  # on single elements, of one row in all steps
    for kernel in loop.step.kernels:
        depth = max(numel(kernel.reads[0].root.shape[-1:])[0] // 16, 1) if isinstance(kernel, ProductKernel) else 1
        operations += sum(map(row_numel, kernel.tensors)) * depth * (loop.repeat.length or 1)
    return max(LEAST_ROWS, -(-LEAST_OPERATIONS // max(operations, 1)))


def _is_by_rows(kernel: Kernel) -> bool:
    if isinstance(kernel, Loop):
        return all(_computes_its_row(kernel, member) for member in kernel.members)
    if isinstance(kernel, ProductKernel):
        return _multiplies_its_row(kernel)
    if not isinstance(kernel, Call) or not isinstance(lowering_of(kernel.tensor), Join):
        return False
    rank = kernel.tensor.ndim
    return kernel.tensor.attributes["axis"] % rank != 0 and all(_lies_by_row(view, rank) for view in kernel.reads)


def _computes_its_row(loop: Loop, member: LoopMember) -> bool:
    rank = len(loop.space)
    lowering = lowering_of(member.tensor)
    if member.kind == "sum" or not rank or marked(loop.space)[0] != (1, True):
        return False
    if isinstance(lowering, Element) and lowering.by_last and member.axes[-1:] == (0,):  # which row it is
        return False
    if member.kind == "gather" and has_rows(member.reads[0].root):
        return False
    return _lies_by_row(member.view, rank) and all(_lies_by_row(view, rank) for view in member.reads)


def _multiplies_its_row(kernel: ProductKernel) -> bool:
    a, b = kernel.product.inputs
    of_a, of_b = kernel.reads
    return (
        kernel.product is kernel.tensor
        and a.ndim == kernel.tensor.ndim
        and has_rows(of_a.root)
        and _lies_by_row(of_a, a.ndim)
        and (not has_rows(of_b.root) or (a.ndim > 2 and b.ndim == a.ndim and _lies_by_row(of_b, b.ndim)))
    )


def _lies_by_row(view: View, rank: int) -> bool:
    """Whether a reader's row lies in the same row of the root, or the root has none.

    A stride of a whole row says so: beginning anywhere else, the last row would lie outside.
    """
    indices = [index for index, _ in view.place.terms]
    if not all(index is None or (isinstance(index, Axis) and isinstance(index.name, int)) for index in indices):
        return False
    stride = view.strides(rank)[0]
    if not has_rows(view.root):
        return stride == NOTHING
    row = row_numel(view.root)
    return row > 0 and stride == (row, 0)
