"""Chunks of positions: the logits of large vocabularies are computed, differentiated and dropped a few at a time.

A step of a language model computes logits (rows, positions, classes), their exponentials, the loss's gradient in them
and products with that gradient. `with_chunked_logits` makes all of it one loop over chunks of positions, which holds
these arrays for a chunk alone. Nothing is computed twice: the loop also adds up the gradients of the last layer's
weights. It computes the same numbers; sums over positions are added in another order.

Source: P.-L. Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, section 3.2.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dptrain.ops.elementwise import cast
from dptrain.ops.manipulation import reshape, transpose
from dptrain.ops.scan import SCAN
from dptrain.program.body import closed, is_number
from dptrain.program.dims import Dim
from dptrain.program.gradient import topological
from dptrain.program.lowering import Element, Product, Reduction, lowering_of
from dptrain.program.operand import OPERATORS
from dptrain.program.program import Program
from dptrain.program.shapes import Shape, size
from dptrain.program.tensor import Tensor, placeholder, scope, tracing
from dptrain.runtime.types import type_of

# Logits of fewer elements stay whole. A chunk has at most so many, in float32 128 and 32 MiB, or half as many as the
# weights, to whose gradient each chunk adds.
LEAST_LOGITS, CHUNK = 1 << 25, 1 << 23
# Of a layer with fewer classes for each feature, other arrays are as large.
LEAST_WIDENING = 8
# The axis of a sum over positions.
_SUMMED = -1


def with_chunked_logits(program: Program, replicas: int = 1) -> Program:
    """Return a program that computes large logits, and all that is as large, in chunks of positions.

    Logits stay whole where the program returns them, where an op mixes positions, where what follows from them leads
    back to them by a sum over positions, such as a mean of logits in a loss, or where chunks of equal lengths are too
    small or too large.

    Args:
        program: of a step, before it is placed.
        replicas: among which the batch's rows are divided.
    """
    tried = 0
    while True:
        products = [tensor for tensor in program.tensors if _makes_logits(tensor, replicas)]
        if len(products) <= tried:
            return program
        chunked = _chunked(program, products[tried], replicas)
        if chunked is None:
            tried += 1
        else:
            program = chunked


def _makes_logits(tensor: Tensor, replicas: int) -> bool:
    """Whether a tensor is a product of features and weights with large results."""
    if not isinstance(lowering_of(tensor), Product) or size(tensor.shape) < LEAST_LOGITS * replicas:
        return False
    features, weights = tensor.inputs
    counts_rows = any(isinstance(length, Dim) for length in weights.shape)
    return not counts_rows and tensor.shape[-1] >= LEAST_WIDENING * features.shape[-1]


def _chunked(program: Program, product: Tensor, replicas: int) -> Program | None:
    """Return a program that computes all that is as large as a product in chunks; None if that cannot be."""
    axis = product.ndim - 2
    length = product.shape[axis]
    positions = length.scale if isinstance(length, Dim) else length  # of a row
    elements = -(-size(product.shape) // (positions * replicas))  # of a position, in all rows of a replica
    most = max(CHUNK, size(product.inputs[1].shape) // 2) // elements
    chunk = next((chunk for chunk in range(min(positions, most), 0, -1) if positions % chunk == 0), positions)
    if chunk == positions or 4 * chunk < most:
        return None
    region = _Region(program, product, positions)
    if not region.is_closed:
        return None
    with tracing(), scope(product.name):
        new = _Loop(region, chunk).results()
        for tensor in program.tensors:
            if tensor not in new and tensor not in region.axes:
                new[tensor] = tensor.with_inputs([new[operand] for operand in tensor.inputs])
    return program.with_substitutes(new)


class _Region:
    """All that depends on a product and is as large, what leads from there to there, and what follows from it at once.

    Attributes:
        order: these tensors, each after those that it reads.
        axes: the axis of positions of each, `_SUMMED` for sums over them.
        results: those that others read.
        positions: of a row.
        large: elements of the product.
        is_closed: whether chunks of positions can compute it.
    """

    def __init__(self, program: Program, product: Tensor, positions: int) -> None:
        self.positions, self.large = positions, size(product.shape)
        self.axes: dict[Tensor, int] = {product: product.ndim - 2}
        self.order: list[Tensor] = []
        self.results: list[Tensor] = []
        self._readers = defaultdict[Tensor, list[Tensor]](list)
        for tensor in program.tensors:
            for operand in tensor.inputs:
                self._readers[operand].append(tensor)
        self.is_closed = self._follows(program, product)

    def _follows(self, program: Program, product: Tensor) -> bool:
        """Find the region; return whether chunks of positions can compute it."""
        dependent = {product}
        for tensor in program.tensors:
            if any(operand in dependent for operand in tensor.inputs):
                dependent.add(tensor)
                if (axis := self._axis(tensor, dependent)) is not None:
                    self.axes[tensor] = axis
        needed = {tensor for tensor in dependent if self.axes.get(tensor, _SUMMED) >= 0 and self._is_large(tensor)}
        needed = {tensor for tensor in topological(needed) if tensor in dependent}
        ends = dict[Tensor, None]()
        for tensor in needed:
            if self.axes.get(tensor, _SUMMED) == _SUMMED:
                return False
            if self._is_large(tensor):
                ends |= dict.fromkeys(reader for reader in self._readers[tensor] if reader not in needed)
        members = needed | ends.keys()
        for end in list(ends):
            while any(isinstance(length, Dim) for length in end.shape) and self.axes.get(end) == _SUMMED:
                members.add(end)
                readers = self._readers[end]
                if len(readers) != 1 or not _sums_rows(readers[0]):
                    return False
                end = readers[0]
                self.axes[end] = _SUMMED
            members.add(end)
        if any(tensor not in self.axes for tensor in members):
            return False
        self.order = [tensor for tensor in program.tensors if tensor in members]
        returned = set(program.results)
        self.results = [
            tensor
            for tensor in self.order
            if tensor in returned or any(reader not in members for reader in self._readers[tensor])
        ]
        self.axes = {tensor: self.axes[tensor] for tensor in self.order}
        return not any(self._is_large(tensor) and self.axes[tensor] >= 0 for tensor in self.results)

    def _is_large(self, tensor: Tensor) -> bool:
        return size(tensor.shape) >= self.large

    def _axis(self, tensor: Tensor, dependent: set[Tensor]) -> int | None:
        """Return the axis of positions of a tensor by its operands'; None if chunks cannot compute it."""
        read = [(operand, self.axes.get(operand)) for operand in tensor.inputs if operand in dependent]
        if any(axis is None or axis == _SUMMED for _, axis in read):
            return None
        axis = self._result_axis(tensor, read[0][0], self.axes[read[0][0]])
        if axis is None:
            return None
        needed = self.operand_axes(tensor, axis)
        by_operand = zip(tensor.inputs, needed, strict=True)
        return axis if all(self.axes[operand] == of for operand, of in by_operand if operand in dependent) else None

    def _result_axis(self, tensor: Tensor, operand: Tensor, axis: int) -> int | None:
        """Return the axis of positions of a tensor whose operand has it there."""
        lowering, attributes = lowering_of(tensor), tensor.attributes
        from_end = operand.ndim - axis
        if isinstance(lowering, Product):
            contracted = 1 if operand is tensor.inputs[0] else 2
            return _SUMMED if from_end == contracted else tensor.ndim - from_end
        if isinstance(lowering, Reduction):
            reduced = _reduced_axes(tensor)
            if axis in reduced:
                return _SUMMED if lowering.join == "sum" else None
            dropped = 0 if attributes.get("keepdims") else sum(other < axis for other in reduced)
            return axis - dropped
        if isinstance(lowering, Element):
            return axis if lowering.by_last else tensor.ndim - from_end
        if tensor.op is OPERATORS["transpose"]:
            return int(attributes["axes"].index(axis))
        if tensor.op is OPERATORS["reshape"]:
            return _reshaped_axis(operand.shape, axis, tensor.shape, self.positions)
        return axis if _keeps_axes(tensor) else None

    def operand_axes(self, tensor: Tensor, axis: int) -> list[int | None]:
        """Return the axis of positions that a tensor needs of each operand, None if the operand has none."""
        lowering, operands = lowering_of(tensor), tensor.inputs
        if isinstance(lowering, Product):
            if axis == _SUMMED:
                return [operands[0].ndim - 1, operands[1].ndim - 2]
            from_end = tensor.ndim - axis
            left = None if from_end == 1 else operands[0].ndim - from_end
            right = None if from_end == 2 else operands[1].ndim - from_end
            return [self._existing(tensor, axis, *pair) for pair in zip(operands, (left, right), strict=True)]
        if isinstance(lowering, Reduction):
            (operand,) = operands
            return [self.axes.get(operand)]
        if isinstance(lowering, Element) and not lowering.by_last:
            aligned = [axis - (tensor.ndim - operand.ndim) for operand in operands]
            return [self._existing(tensor, axis, *pair) for pair in zip(operands, aligned, strict=True)]
        if tensor.op is OPERATORS["transpose"]:
            return [tensor.attributes["axes"][axis]]
        if tensor.op is OPERATORS["reshape"]:
            return [_reshaped_axis(tensor.shape, axis, operands[0].shape, self.positions)]
        return [self._existing(tensor, axis, operand, axis) for operand in operands]

    @staticmethod
    def _existing(tensor: Tensor, axis: int, operand: Tensor, operand_axis: int | None) -> int | None:
        """Return an operand's axis if it is as long as a tensor's, not missing and not of length 1."""
        if operand_axis is None or operand_axis < 0 or operand.shape[operand_axis] != tensor.shape[axis]:
            return None
        return operand_axis


def _sums_rows(tensor: Tensor) -> bool:
    """Whether a tensor is a sum over all axes that count rows."""
    if lowering_of(tensor) != Reduction("sum"):
        return False
    lengths = enumerate(tensor.inputs[0].shape)
    return {axis for axis, length in lengths if isinstance(length, Dim)} <= set(_reduced_axes(tensor))


def _reduced_axes(tensor: Tensor) -> tuple[int, ...]:
    attributes = tensor.attributes
    return tuple(attributes["axes"]) if "axes" in attributes else (attributes["axis"],)


def _keeps_axes(tensor: Tensor) -> bool:
    """Whether a tensor is its operand, broadcast or not."""
    return tensor.op in (OPERATORS["broadcast"], OPERATORS["identity"], OPERATORS["same"])


def _reshaped_axis(shape: Shape, axis: int, new: Shape, positions: int) -> int | None:
    """Return the axis of positions after a reshape, which may join it with the axis of rows before it, or part them."""
    before, after = math.prod(shape[: axis + 1]), math.prod(shape[axis + 1 :])
    for new_axis, length in enumerate(new):
        has_positions = length.scale % positions == 0 if isinstance(length, Dim) else length == positions
        if has_positions and math.prod(new[: new_axis + 1]) == before and math.prod(new[new_axis + 1 :]) == after:
            return new_axis
    return None


@dataclass(eq=False)
class _Loop:
    """A loop over chunks of positions that computes a region.

    Attributes:
        slices: what the loop reads by chunks, by tensor and axis of positions.
        captures: what all chunks read.
    """

    region: _Region
    chunk: int
    slices: dict[tuple[Tensor, int], Tensor] = field(default_factory=dict)
    captures: dict[Tensor, Tensor] = field(default_factory=dict)

    def results(self) -> dict[Tensor, Tensor]:
        """Return the new tensor for each result of the region."""
        region = self.region
        of_chunk: dict[Tensor, Tensor] = {}
        for tensor in region.order:
            operands = self._operands(tensor, region.axes[tensor], of_chunk)
            of_chunk[tensor] = self._of_chunk(tensor, region.axes[tensor], operands)
        summed = [tensor for tensor in region.results if region.axes[tensor] == _SUMMED]
        stacked = [tensor for tensor in region.results if region.axes[tensor] != _SUMMED]
        totals = [placeholder(tensor.shape, type_of(tensor.dtype).compute, "sum") for tensor in summed]
        following = [total + cast(of_chunk[tensor], total.dtype) for total, tensor in zip(totals, summed, strict=True)]
        stacks = [of_chunk[tensor] for tensor in stacked]
        outer = {tensor: tensor for tensor in self.captures}
        body, captured, _ = closed(totals, list(self.slices.values()), following, stacks, outer, len(totals))
        inputs = [self._stack(tensor, axis) for tensor, axis in self.slices]
        values = SCAN.values(*inputs, *captured, body=body, length=region.positions // self.chunk, reverse=False)
        new = {tensor: cast(value, tensor.dtype) for tensor, value in zip(summed, values, strict=False)}
        for tensor, value in zip(stacked, values[len(summed) :], strict=True):
            new[tensor] = self._whole(value, region.axes[tensor], tensor.shape)
        return new

    def _operands(self, tensor: Tensor, axis: int, of_chunk: Mapping[Tensor, Tensor]) -> list[Tensor]:
        axes = self.region.operand_axes(tensor, axis)
        return [
            of_chunk[operand] if operand in of_chunk else self._read(operand, operand_axis, of_chunk)
            for operand, operand_axis in zip(tensor.inputs, axes, strict=True)
        ]

    def _read(self, tensor: Tensor, axis: int | None, of_chunk: Mapping[Tensor, Tensor]) -> Tensor:
        """Return a chunk of a tensor from outside: recomputed if it is large, else read."""
        if axis is None:
            if not is_number(tensor):
                self.captures[tensor] = tensor
            return tensor
        lowering = lowering_of(tensor)
        is_view = tensor.op in (OPERATORS["transpose"], OPERATORS["reshape"]) or _keeps_axes(tensor)
        if is_view or (isinstance(lowering, Element) and size(tensor.shape) >= self.region.large):
            axes = self.region.operand_axes(tensor, axis)
            if tensor.op is not OPERATORS["reshape"] or axes[0] is not None:
                return self._of_chunk(tensor, axis, self._operands(tensor, axis, of_chunk))
        if (tensor, axis) not in self.slices:
            shape = self._chunk_shape(tensor.shape, axis)
            self.slices[tensor, axis] = placeholder(shape, tensor.dtype, f"chunk {len(self.slices)}")
        return self.slices[tensor, axis]

    def _of_chunk(self, tensor: Tensor, axis: int, operands: Sequence[Tensor]) -> Tensor:
        """Return the op of a tensor on operands of a chunk."""
        assert tensor.op is not None
        shape = tensor.shape if axis == _SUMMED else self._chunk_shape(tensor.shape, axis)
        attributes = {**tensor.attributes, "shape": shape} if "shape" in tensor.attributes else tensor.attributes
        return Tensor(tensor.op, operands, attributes, shape, tensor.dtype, name=tensor.name)

    def _chunk_shape(self, shape: Shape, axis: int) -> Shape:
        return (*shape[:axis], self._part(shape[axis], self.chunk), *shape[axis + 1 :])

    def _part(self, length: Any, positions: int) -> Any:
        """Return a length of positions, or of rows and positions, for so many positions a row."""
        return length.times(length.scale // self.region.positions * positions) if isinstance(length, Dim) else positions

    def _parts(self, shape: Shape, axis: int) -> Iterator[Any]:
        """Yield a shape with the axis of positions as rows, if it counts them, chunks and positions of a chunk."""
        yield from shape[:axis]
        if isinstance(shape[axis], Dim):
            yield self._part(shape[axis], 1)
        yield self.region.positions // self.chunk
        yield self.chunk
        yield from shape[axis + 1 :]

    def _stack(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the chunks of a tensor along a new first axis."""
        parts = tuple(self._parts(tensor.shape, axis))
        chunks = axis + isinstance(tensor.shape[axis], Dim)
        order = (chunks, *(other for other in range(len(parts)) if other != chunks))
        stacked = transpose(reshape(tensor, parts), order)
        return reshape(stacked, (parts[chunks], *self._chunk_shape(tensor.shape, axis)))

    def _whole(self, stacked: Tensor, axis: int, shape: Shape) -> Tensor:
        """Return a tensor of this shape of its stacked chunks."""
        parts = tuple(self._parts(shape, axis))
        chunks = axis + isinstance(shape[axis], Dim)
        moved = reshape(stacked, (parts[chunks], *parts[:chunks], *parts[chunks + 1 :]))
        order = (*range(1, chunks + 1), 0, *range(chunks + 1, len(parts)))
        return reshape(transpose(moved, order), shape)
