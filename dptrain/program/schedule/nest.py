"""A nest: the tensors that one kernel function computes together, over which axes, each in which role.

A nest says what runs together, not on which device: `fuse.py` decides it by the policy of a backend, and the backend's
renderer writes a frame of loops, threads or tiles around it. A hand-written kernel is an *extern*: a nest whose frame
computes a product, a user's kernel, a loop's steps or attention from whole operands; what follows is its epilogue.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from dptrain.program.codegen.index_expr import ZERO_INDEX, Axis, IndexExpr, Numel, numel, ravel, symbol, unravel
from dptrain.program.schedule.build import Index
from dptrain.program.schedule.statements import For, Statement, loads, stores
from dptrain.program.shapes import Shape, is_one
from dptrain.program.tensor import Tensor

# How a nest iterates over its elements: "map" one by one; "rows" a row at a time, with reductions along it; "columns"
# reductions over rows, several columns side by side; "totals" the same, one column at a time; "product" by tiles of a
# matrix product, whose results it consumes, and for a convolution may also reduce over the rows; "call" by a user's
# kernel, or on the host; "loop" by the nests of a body, step by step; "attention" by a head's queries or keys.
Frame = Literal["map", "rows", "columns", "totals", "product", "call", "loop", "attention"]
# Whether an axis of a nest's elements belongs to the row's index or to the column's, within the row.
Side = Literal["row", "column"]
# All axes of a nest's elements in memory order, with adjacent ones of a side merged: for sums over H and W of
# (B, H, W, C) the rows are B and C, around the columns H x W.
Axes = tuple[tuple[Side, Shape], ...]
# A member's role in its nest: "main" has an element at each place of the nest, "row" one for each row, "reduce" one
# of each row's reduced terms; "sum" reduces terms of all places, or of all rows for each column; "final" is computed
# from these.
Role = Literal["main", "row", "reduce", "sum", "final"]


@dataclass(eq=False)
class Nest:
    """Tensors that one function computes.

    Attributes:
        axes: of its elements; all of a map belong to the row.
        stage: between two sync points of the ranks.
        level: nests of lower levels run before.
        members: with their roles, in executable order.
        operands, results: what an extern reads and stores in whole, in an order of its own.
        row_operand: the operand of which each row of an extern's results reads the same row alone; None if none.
        after: nests that must run before.
        body: statements of its elements; `finals` follow when all reductions to sums are complete.
    """

    frame: Frame
    axes: Axes
    stage: int
    level: int
    members: dict[Tensor, Role] = field(default_factory=dict)
    operands: tuple[Tensor, ...] = ()
    results: tuple[Tensor, ...] = ()
    row_operand: Tensor | None = None
    after: set["Nest"] = field(default_factory=set)
    body: Sequence[Statement] = ()
    finals: Sequence[Statement] = ()

    @property
    def lead(self) -> Shape:
        """Lengths of all axes of a map, else of the rows."""
        return tuple(n for side, shape in self.axes for n in shape if side == "row")

    @property
    def inner(self) -> Shape:
        """Lengths of the axes within a row, the columns."""
        return tuple(n for side, shape in self.axes for n in shape if side == "column")

    @property
    def by_column(self) -> bool:
        """Whether it reduces over the rows, for each column."""
        return self.frame in ("columns", "totals", "product")

    @property
    def space(self) -> tuple[object, ...]:
        """A key, equal for nests that can share a loop."""
        return self.frame, weights(self.axes)

    def of(self, *roles: Role) -> list[Tensor]:
        """Return the members with these roles."""
        return [tensor for tensor, role in self.members.items() if role in roles]

    @property
    def loop(self) -> For:
        """The loop over its elements; a nest of one element has none."""
        (loop,) = (statement for statement in self.body if isinstance(statement, For))
        return loop

    # What its statements read and write

    @cached_property
    def reads(self) -> dict[Tensor, set[IndexExpr | None]]:
        """The flat indices at which it reads tensors, None for all elements in any order."""
        positions = loads([*self.body, *self.finals])
        for operand in self.operands:
            positions.setdefault(operand, set()).add(None)
        return positions

    @cached_property
    def writes(self) -> dict[Tensor, IndexExpr | None]:
        """The flat index at which it stores each tensor, None for all elements in any order."""
        return stores([*self.body, *self.finals]) | dict.fromkeys(self.results)

    @cached_property
    def computed(self) -> list[Tensor]:
        """The tensors of which it computes elements, stored or not, in topological order."""
        order, visited = list[Tensor](), set[Tensor]()
        stack = [(member, False) for member in self.members]
        while stack:
            tensor, inputs_done = stack.pop()
            if inputs_done:
                order.append(tensor)
            elif (
                tensor not in visited and tensor.op is not None and (tensor in self.members or tensor not in self.reads)
            ):
                visited.add(tensor)
                stack.append((tensor, True))
                stack += [(operand, False) for operand in tensor.inputs]
        return order

    # Indices of the current element

    @cached_property
    def row_axis(self) -> Axis:
        """The index of the row; of a map that of the element."""
        return Axis("i" if self.frame == "map" else "r", numel(self.lead), 1)

    @cached_property
    def column_axis(self) -> Axis:
        """The index of the column; that of sums is known before the rows, a product's with the rows."""
        return Axis("c", numel(self.inner), 0 if self.frame in ("columns", "totals") else 2)

    @property
    def row(self) -> IndexExpr:
        """The current row; of a map the current element."""
        return symbol(self.row_axis)

    @property
    def column(self) -> IndexExpr:
        """The current column."""
        return symbol(self.column_axis)

    @cached_property
    def final(self) -> IndexExpr:
        """The position of a sum, and of what is computed from sums."""
        return symbol(Axis("c", numel(self.inner), 0)) if self.by_column else ZERO_INDEX

    @cached_property
    def element(self) -> IndexExpr:
        """The position of the current element in memory."""
        sides = {
            side: iter(unravel(index, [n for axis_side, shape in self.axes if axis_side == side for n in shape]))
            for side, index in (("row", self.row), ("column", self.column))
        }
        indices = [next(sides[side]) for side, shape in self.axes for _ in shape]
        return ravel(indices, [n for _, shape in self.axes for n in shape])

    def position(self, role: Role) -> IndexExpr:
        """Return the flat index of a member's current element."""
        return {"main": self.element, "sum": self.final, "final": self.final}.get(role, self.row)

    def index(self, shape: Shape, role: Role) -> Index:
        """Return the index of a tensor's current element."""
        return unravel(self.position(role), shape)

    # Terms of reductions

    def has_term_of_row(self, tensor: Tensor) -> bool:
        """Whether a sum in a nest of rows has one term for each row."""
        is_total = bool(tensor.inputs) and all(map(is_one, tensor.shape))
        return self.frame == "rows" and is_total and numel(tensor.inputs[0].shape) == numel(self.lead)

    def term(self, tensor: Tensor) -> tuple[Tensor, Index]:
        """Return the tensor and index of the term that a reduction joins at the current element."""
        operand = tensor.inputs[0]
        return operand, self.index(operand.shape, "row" if self.has_term_of_row(tensor) else "main")

    def position_of_term(self, tensor: Tensor) -> IndexExpr:
        """Return the index of that term within its reduction."""
        if self.members[tensor] == "reduce":
            return self.column
        return self.row if self.by_column or self.has_term_of_row(tensor) else self.element


def weights(axes: Axes) -> tuple[tuple[Side, Numel], ...]:
    """Return a key of axes, for any number of rows."""
    return tuple((side, numel(shape)) for side, shape in axes)


def may_overwrite(nest: Nest, new: Tensor, old: Tensor) -> bool:
    """Whether no element of an old value is read, by this nest, once another thread may have stored the new value.

    The order of a nest's elements is the renderer's: what one reads, only the same one may overwrite.
    """
    read, position = nest.reads.get(old, set()), nest.writes[new]
    if None in read:  # externs read all elements, in any order
        return False
    if nest.members[new] == "final" and not nest.by_column:
        return True  # all elements have been read when the reductions are complete
    if nest.frame == "rows" and position == ZERO_INDEX:
        return not read  # what all rows read, they read at the beginning
    return read <= {position}
