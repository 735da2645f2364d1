"""A program as text: its ops with shapes, placements, floating-point operations, bytes and messages."""

from collections.abc import Iterator

from dptrain.program.messages import count
from dptrain.program.placement import ALL_REDUCE, PlacedProgram
from dptrain.program.program import Program
from dptrain.program.shapes import Rows, Shape, size
from dptrain.program.tensor import Tensor


def explain(program: Program) -> str:
    """Return a table with a line for each op, and the sums below it.

    Numbers are those of the global batch: a rank computes its part of what is sharded. A product of matrices counts two
    operations for each of its multiplications, any other op one for each element of its output; views count none. Bytes
    are those of the output.

    Args:
        program: traced, or placed, which adds placements and messages.
    """
    tensors = program.tensors
    names = _names(program, tensors)
    lines = [["", "op", "shape", "type", "placement", "operations", "bytes"]]
    operations = moved = reductions = sent = 0
    for tensor in tensors:
        if tensor.op is None:
            continue
        inputs = ", ".join(names[id(one)] for one in tensor.inputs)
        work, nbytes = flops(tensor), 0 if tensor.op.is_view else size(tensor.shape) * tensor.dtype.itemsize
        operations, moved = operations + work, moved + nbytes
        if tensor.op is ALL_REDUCE:
            reductions, sent = reductions + 1, sent + size(tensor.shape) * tensor.dtype.itemsize
        placement = str(program.placements[id(tensor)]) if isinstance(program, PlacedProgram) else ""
        lines.append(
            [
                names[id(tensor)],
                f"{tensor.op.name}({inputs})",
                shown(tensor.shape),
                tensor.dtype.name,
                placement,
                f"{work:,}",
                f"{nbytes:,}",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    results = {**program.outputs, **{variable.path: one for variable, one in program.updates.items()}}
    table += [f"{name} = {names[id(one)]}" for name, one in results.items()]
    total = f"{len(lines) - 1} ops, {operations:,} operations, {moved:,} bytes written"
    if isinstance(program, PlacedProgram):
        total += f", {reductions} all-reduces in {count(program)} message{'' if count(program) == 1 else 's'}"
        total += f" of {sent:,} bytes" if sent else ""
    return "\n".join([*table, total])


def flops(tensor: Tensor) -> int:
    """Return the floating-point operations of the op that makes a tensor, over the global batch."""
    if tensor.op is None or tensor.op.is_view:
        return 0
    if tensor.op.name == "batch_matmul":
        return 2 * size(tensor.shape) * int(tensor.inputs[0].shape[-1])
    if tensor.op.name.startswith("conv2d"):  # y of x and kernel, or either of y and the other: as many products
        y, kernel = _convolution(tensor)
        return 2 * size(y.shape) * size(kernel.shape[:-1])
    return size(tensor.inputs[0].shape) if tensor.op.name.startswith("reduce_") else size(tensor.shape)


def _convolution(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and kernel of a convolution, or of that whose gradient it is."""
    assert tensor.op is not None
    first, second = tensor.inputs
    if tensor.op.name == "conv2d":
        return tensor, second
    return (first, second) if tensor.op.name == "conv2d_input" else (second, tensor)


def shown(shape: Shape) -> str:
    """Return a shape as text, in which B is the number of rows of the batch."""
    return f"({', '.join(_length(n) for n in shape)})"


def _length(n: int) -> str:
    if not isinstance(n, Rows):
        return str(n)
    return "B" if n.scale == 1 else f"{n.scale} B"


def _names(program: Program, tensors: list[Tensor]) -> dict[int, str]:
    """Return what tensors are called: inputs by their names, constants by their value, the others by number."""

    def found() -> Iterator[tuple[int, str]]:
        number = 0
        for tensor in tensors:
            if tensor.op is not None:
                number += 1
                yield id(tensor), f"%{number}"
            elif tensor.counts_rows:
                yield id(tensor), _length(Rows(1, tensor.attributes["rows"]))
            elif tensor.value is not None and tensor.value.size == 1:
                yield id(tensor), f"{tensor.value.item():.6g}"
            else:
                yield id(tensor), tensor.name or f"constant {shown(tensor.shape)}"

    return dict(found())
