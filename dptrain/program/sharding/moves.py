"""Moves of a rank's part of a tensor to another placement: sums, gathers, scatters and slices, each added once.

Rows of all ranks are gathered as a sum of tensors with a rank's rows among zeros: exact, whatever rows a rank has, and
without a rank's counts, which a program for any rank does not know.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dptrain.comm.mesh import BATCH
from dptrain.program.body import has_body
from dptrain.program.dims import Dim, counting, number_of
from dptrain.program.lowering import Element
from dptrain.program.op import Op
from dptrain.program.operand import METHODS, OPERATORS
from dptrain.program.shapes import Shape, is_one, size
from dptrain.program.sharding.mesh import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_ROWS,
    OWN_PART,
    REDUCE_SCATTER,
    Axes,
    Placement,
)
from dptrain.program.sharding.rows import attributes_with_rows, same_rows, whole_along
from dptrain.program.tensor import Tensor, constant, row_count
from dptrain.runtime.types import is_floating


@dataclass(frozen=True, eq=False)
class Part:
    """A rank's part of a tensor, its placement, and the divisor of a deferred division."""

    tensor: Tensor
    placement: Placement
    divisor: "Divisor | None" = None


@dataclass(frozen=True, eq=False)
class Divisor:
    """Denominator of a deferred division `op`: the partial scalar `number`.

    `of_number`: the numerator is one number that depends on no sample, such as at the beginning of a mean's gradient.
    `over_rows`: quotients were summed over the rows of the batch; over no rows the sum is 0.
    """

    number: Part
    op: Op
    of_number: bool
    over_rows: bool = False


class Mover:
    """Adds moves of parts to a program; `comm_dtype` as for `place`, `alone`: there are no other ranks."""

    def __init__(self, comm_dtype: str | None, alone: bool) -> None:
        self._comm_dtype, self._alone = comm_dtype, alone
        self.placements: dict[Tensor, Placement] = {}
        self.needs_all_rows = False  # so that the program holds for this batch size
        self._nodes: dict[Any, Tensor] = {}
        self._attributes: dict[Any, dict[str, Any]] = {}  # of nodes on parts
        self._scattered: dict[Tensor, Part] = {}
        self._travels_rounded: set[Tensor] = set()
        self._of_state: set[Tensor] = set()  # elementwise functions of constants and variables
        self._kept: list[Tensor] = []  # kept alive so that ids stay unique

    def _note(self, tensor: Tensor, placement: Placement, divisor: Divisor | None = None) -> Part:
        self.placements[tensor] = placement
        self._kept.append(tensor)
        is_leaf = tensor.variable is not None or tensor.value is not None
        if is_leaf or ((is_elementwise(tensor) or tensor.op is OWN_PART) and self._of_state.issuperset(tensor.inputs)):
            self._of_state.add(tensor)
        return Part(tensor, placement, divisor)

    def _on_parts(self, tensor: Tensor, inputs: list[Tensor], shape: Shape) -> Tensor:
        """Return a tensor's op on parts, of this shape; the values of a node share one record of attributes."""
        is_traced = all(
            same_rows(new.shape, old.shape) for new, old in zip(inputs, tensor.inputs, strict=True)
        ) and same_rows(shape, tensor.shape)
        if is_traced:
            return tensor.with_inputs(inputs)
        key = "attributes", id(tensor.attributes), *map(id, inputs)
        if key not in self._attributes:
            shapes = [operand.shape for operand in inputs]
            self._attributes[key] = attributes_with_rows(tensor, shapes, shape)
            self._kept.append(tensor)
        attributes = self._attributes[key]
        return Tensor(tensor.op, inputs, attributes, shape, tensor.dtype, name=tensor.name, index=tensor.index)

    def _all(self, length: Any) -> Any:
        """Return the length of an axis of which a rank has all."""
        self.needs_all_rows |= isinstance(length, Dim)
        return number_of(length)

    def _whole(self, part: Part) -> Part:
        part = self._divided(part)
        for mesh in part.placement.partial:
            part = self._reduce(part, mesh)
        return part

    def _divided(self, part: Part) -> Part:
        if part.divisor is None:
            return part
        numerator, by = self._whole(Part(part.tensor, part.placement)), self._whole(part.divisor.number).tensor
        if part.divisor.over_rows and part.divisor.op.quotient != 0:
            by = self._one_of_no_rows(by)
        quotient = Tensor(part.divisor.op, (numerator.tensor, by), {}, numerator.tensor.shape, numerator.tensor.dtype)
        return self._note(quotient, numerator.placement)

    def _one_of_no_rows(self, number: Tensor) -> Tensor:
        """Replace a replicated number by 1 for a batch without rows."""
        key = "of no rows", id(number)
        if key not in self._nodes:
            rows, one_constant = row_count(constant(1), 1), constant(1, number.dtype)
            safe_number = Tensor(OPERATORS["select"], (rows, number, one_constant), {}, (), number.dtype)
            for tensor in (rows, one_constant, safe_number):
                self._note(tensor, Placement(()))
            self._nodes[key] = safe_number
        return self._nodes[key]

    def _reduce(self, part: Part, mesh: str) -> Part:
        if mesh not in part.placement.partial:
            return part
        placement, attributes = part.placement.without(mesh), {"over": part.placement.join, "mesh": mesh}
        if part.tensor in self._travels_rounded and not self._is_reduced(part, mesh):
            narrow = METHODS["cast"](part.tensor, self._comm_dtype)
            total = self._sent(ALL_REDUCE, self._note(narrow, part.placement), placement, **attributes)
            self._nodes[ALL_REDUCE, id(part.tensor), mesh] = METHODS["cast"](total.tensor, part.tensor.dtype)
        return self._sent(ALL_REDUCE, part, placement, **attributes)

    def _is_reduced(self, part: Part, mesh: str) -> bool:
        return (ALL_REDUCE, id(part.tensor), mesh) in self._nodes

    def _sent(self, op: Op, part: Part, placement: Placement, **attributes: Any) -> Part:
        """Add a collective on a part, once however often it is used."""
        key = op, id(part.tensor), *(attributes[name] for name in ("mesh", "axis") if name in attributes)
        if key not in self._nodes:
            self._nodes[key] = Tensor(op, (part.tensor,), attributes, part.tensor.shape, part.tensor.dtype)
        return self._note(self._nodes[key], placement)

    def _moved(self, part: Part, axes: Axes, rows: Dim | None, partial: Collection[str] = ()) -> Part:
        """Move a part, with a divisor only if it is scattered, to another placement.

        The mesh's `axes` shard it; it may stay partial over those in `partial`. `rows`: its length where `BATCH` shards
        it by rows, None if `BATCH` shards other lengths.
        """
        divisor = part.divisor
        for axis, mesh in enumerate(part.placement.axes):
            length, stays = part.tensor.shape[axis], axes[axis] == mesh
            if mesh is None or (stays and (mesh != BATCH or self._has_rows(length, rows))):
                continue
            if not isinstance(length, Dim):
                part = self._sent(ALL_GATHER, part, part.placement.without(mesh), mesh=mesh, axis=axis)
            elif stays and rows is not None and self._can_be_made(part.tensor, axis):
                part = self._note(self._made(part.tensor, axis, rows), part.placement)
            else:
                part = self._all_rows(part, axis)
        for mesh in part.placement.partial:
            if mesh in axes and not (mesh == BATCH and rows is not None):
                axis, before = axes.index(mesh), part
                over = part.placement.join
                placement = part.placement.without(mesh).sharded(axis, mesh)
                attributes = {"over": over, "mesh": mesh, "axis": axis}
                if part.tensor in self._travels_rounded:
                    narrow = METHODS["cast"](part.tensor, self._comm_dtype)
                    scattered = self._sent(REDUCE_SCATTER, self._note(narrow, part.placement), placement, **attributes)
                    part = self._note(METHODS["cast"](scattered.tensor, part.tensor.dtype), placement)
                else:
                    part = self._sent(REDUCE_SCATTER, part, placement, **attributes)
                self._scattered[before.tensor] = part
            elif mesh not in partial:
                part = self._reduce(part, mesh)
        if divisor is not None:
            part = self._divided(replace(part, divisor=divisor))
        for axis, mesh in enumerate(axes):
            if mesh is not None and part.placement.axes[axis] != mesh:
                part = self._own(part.tensor, axis, mesh, rows if mesh == BATCH else None)
        return part

    def _has_rows(self, length: Any, rows: Dim | None) -> bool:
        """Whether a rank's part of this length is the one of `rows`; None: of another length than rows."""
        if not isinstance(length, Dim) or rows is None:
            return not isinstance(length, Dim) and rows is None
        return self._alone or same_rows((length,), (rows,))

    def _can_be_made(self, tensor: Tensor, axis: int) -> bool:
        """Whether all of a tensor's parts along an axis are equal, as of zeros, so that each rank makes its own."""
        if tensor.op is None or tensor.op.by_row or axis < 0 or has_body(tensor):
            return False
        rule = tensor.op.sharding_rule(tensor)
        if rule.output[axis] in rule.own():
            return True
        inputs = [(operand, axis - tensor.ndim + operand.ndim) for operand in tensor.inputs]
        return is_elementwise(tensor) and all(
            at < 0 or is_one(operand.shape[at]) or self._can_be_made(operand, at) for operand, at in inputs
        )

    def _made(self, tensor: Tensor, axis: int, rows: Dim) -> Tensor:
        """Return a tensor that can be made for other rows."""
        inputs = []
        for operand in tensor.inputs:
            at = axis - tensor.ndim + operand.ndim
            is_spread = at < 0 or is_one(operand.shape[at])
            inputs.append(operand if is_spread else self._made(operand, at, rows))
        shape = (*tensor.shape[:axis], rows, *tensor.shape[axis + 1 :])
        made = self._on_parts(tensor, inputs, shape)
        return self._note(made, self.placements[tensor]).tensor

    def _all_rows(self, part: Part, axis: int) -> Part:
        """Gather the rows of all ranks along an axis, whose length becomes a number."""
        x, placement = part.tensor, part.placement.without(BATCH)
        self.needs_all_rows = True
        if x.op is OPERATORS["transpose"]:  # gather its operand, of which other readers may need all rows too
            order = x.attributes["axes"]
            axes = tuple(part.placement.axes[order.index(at)] for at in range(x.ndim))
            below = self._all_rows(Part(x.inputs[0], replace(part.placement, axes=axes)), order[axis])
            return self._note(self._on_parts(x, [below.tensor], whole_along(x.shape, axis)), placement)
        if x.op is OPERATORS["broadcast"]:  # gather what it repeats
            repeated, at = x.inputs[0], axis - x.ndim + x.inputs[0].ndim
            if at >= 0 and not is_one(repeated.shape[at]):
                repeated = self._all_rows(Part(repeated, self.placements[repeated]), at).tensor
            return self._note(self._on_parts(x, [repeated], whole_along(x.shape, axis)), placement)
        key = ALL_ROWS, id(x), axis
        if key not in self._nodes:
            self._nodes[key] = self._all_rows_of(part, axis)
        return self._note(self._nodes[key], placement)

    def _all_rows_of(self, part: Part, axis: int) -> Tensor:
        """Return a sum over the ranks of tensors with a rank's rows among zeros."""
        x, length = part.tensor, part.tensor.shape[axis]
        if self._alone:
            return Tensor(ALL_ROWS, (x,), {}, whole_along(x.shape, axis), x.dtype)
        sum_dtype = x.dtype if x.dtype.itemsize > 1 else np.dtype(np.float32 if is_floating(x.dtype) else np.int32)
        order = (axis, *(at for at in range(x.ndim) if at != axis))
        part = self._converted(self._transposed(part, order), sum_dtype)
        numbers = self._note(constant(np.arange(length.number), np.int64), Placement((None,))).tensor
        own_numbers = self._own(numbers, 0, BATCH, length).tensor
        placement = part.placement.without(BATCH)
        summand = Tensor(
            OPERATORS["scatter"],
            (part.tensor, own_numbers),
            {"length": length.number},
            whole_along(part.tensor.shape, 0),
            sum_dtype,
        )
        attributes = {"over": "sum", "mesh": BATCH, "gathers_rows": True}
        summand_part = self._note(summand, replace(placement, partial=(*placement.partial, BATCH)))
        summed = self._sent(ALL_REDUCE, summand_part, placement, **attributes)
        back = tuple(order.index(at) for at in range(x.ndim))
        return self._transposed(self._converted(summed, x.dtype), back).tensor

    def _transposed(self, part: Part, order: tuple[int, ...]) -> Part:
        if order == tuple(range(len(order))):
            return part
        axes = tuple(part.placement.axes[at] for at in order)
        return self._note(METHODS["transpose"](part.tensor, order), replace(part.placement, axes=axes))

    def _converted(self, part: Part, dtype: Any) -> Part:
        return part if part.tensor.dtype == dtype else self._note(METHODS["cast"](part.tensor, dtype), part.placement)

    def _own(self, tensor: Tensor, axis: int, mesh: str, rows: Dim | None) -> Part:
        """Slice a replicated tensor; elementwise functions of variables slice the variables instead."""
        stack = [(tensor, axis)]
        while stack:
            current, along = stack[-1]
            read = []
            if current in self._of_state and rows is None and is_elementwise(current):
                read = [(below, along - current.ndim + below.ndim) for below in current.inputs]
                read = [(below, at) for below, at in read if at >= 0 and below.shape[at] != 1]
            keys = {below: (OWN_PART, id(below), at, mesh, rows and rows.blocks) for below, at in read}
            known_parts = {below: self._nodes[key] for below, key in keys.items() if key in self._nodes}
            if missing := dict.fromkeys((below, at) for below, at in read if below not in known_parts):
                stack += missing
                continue
            stack.pop()
            if read:
                own_tensor = current.with_inputs([known_parts.get(below, below) for below in current.inputs])
            else:
                own_tensor = self._own_part(current, along, mesh, rows)
            self._nodes[OWN_PART, id(current), along, mesh, rows and rows.blocks] = own_tensor
            part = self._note(own_tensor, self.placements[current].sharded(along, mesh))
        return part

    def _own_part(self, tensor: Tensor, axis: int, mesh: str, rows: Dim | None) -> Tensor:
        """Slice a replicated tensor; along a concatenation's rows each of its parts."""
        shape, placement = tensor.shape, self.placements[tensor]
        attributes = {"mesh": mesh, "axis": axis}
        if rows is None:
            return Tensor(OWN_PART, (tensor,), attributes, shape, tensor.dtype)
        length, start, own_parts = counting(rows, shape[axis]), 0, []
        blocks = (length.scale,) if self._alone else length.blocks
        for scale in blocks:
            block, block_length = tensor, length.times(scale)
            if len(blocks) > 1:
                key = (*(slice(None),) * axis, slice(start, start + block_length.number))
                block = self._note(METHODS["[]"](tensor, key), placement).tensor
            start += block_length.number
            own_shape = (*shape[:axis], block_length, *shape[axis + 1 :])
            own_part = Tensor(OWN_PART, (block,), attributes, own_shape, tensor.dtype)
            own_parts.append(self._note(own_part, placement.sharded(axis, mesh)).tensor)
        if len(own_parts) == 1:
            return own_parts[0]
        own_shape = (*shape[:axis], length, *shape[axis + 1 :])
        return Tensor(OPERATORS["join"], own_parts, {"axis": axis}, own_shape, tensor.dtype)


def bytes_to_gather(tensor: Tensor) -> int:
    """Return the bytes of a tensor's rows that ranks gather, of what it repeats if it does."""
    while tensor.op is OPERATORS["broadcast"]:
        tensor = tensor.inputs[0]
    return size(tensor.shape) * tensor.dtype.itemsize


def is_elementwise(tensor: Tensor) -> bool:
    """Whether each element depends only on the same element of each input."""
    if tensor.op is None or not tensor.inputs:
        return False
    lowering = tensor.op.lowering
    return tensor.op is OPERATORS["identity"] or (isinstance(lowering, Element) and not lowering.by_last)
