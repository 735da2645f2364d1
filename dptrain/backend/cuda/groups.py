"""Fusion for a GPU: which tensors of a program one kernel function computes together.

A few tensors are *anchors*: results, sums, products, operands of products and convolutions, and expensive tensors used
for many elements. All others are recomputed at each use. An anchor joins the group of an operand if each element needs
only elements that the same thread (or the threads of the same row) has at that moment, and everything else is stored
before the group begins. Groups that do not wait for each other share a launch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Literal

from dptrain.backend.cuda.expressions import join_of, same
from dptrain.backend.cuda.libraries.providers import is_by_library, is_product
from dptrain.program.body import has_body
from dptrain.program.codegen.index_expr import ONE, ZERO_INDEX, Axis, IndexExpr, Numel, numel, ravel, symbol, unravel
from dptrain.program.codegen.kernels import reduced_axes
from dptrain.program.dims import Dim
from dptrain.program.lowering import (
    WHOLE,
    AttentionKernel,
    ConvolutionLowering,
    Element,
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
from dptrain.program.operand import OPERATORS
from dptrain.program.program import Program
from dptrain.program.schedule.build import Builder, Index
from dptrain.program.schedule.statements import loads as loads_of
from dptrain.program.shapes import Shape, is_one, size
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.sharding.messages import SENT, stages
from dptrain.program.tensor import Node, Tensor, Variable
from dptrain.runtime.types import is_narrow

# How a group iterates over its elements: "map" one by one; "rows" a warp or a block a row; "columns" sums over rows,
# with a lane for each column; "totals" the same, with a block for one column; "product" by tiles of a matrix product,
# whose results it consumes, and for a convolution may also sum over the rows; "call" by a user's kernel, or on the
# host; "loop" by the groups of a body, step by step; "attention" by blocks of a head's queries or keys.
GroupKind = Literal["map", "rows", "columns", "totals", "product", "call", "loop", "attention"]
# Whether an axis of a group's elements belongs to the row's index or to the column's, within the row.
Side = Literal["row", "column"]
# All axes of a group's elements in memory order, with adjacent ones of a side merged: for sums over H and W of
# (B, H, W, C) the rows are B and C, around the columns H x W.
Axes = tuple[tuple[Side, Shape], ...]
# Sums over axes that are apart, or between others: terms from which threads share a sum, and from which blocks do if
# the batch's rows do not share the work; and how many must be adjacent for lanes to iterate along them.
_LONG_SUM, _LONG_TOTAL, _SIDE_BY_SIDE = 32, 2048, 8
# Elementwise ops: at most so many are recomputed for several anchors, and at most so many in a chain for one.
_COMPUTED_AGAIN, _DEEP = 32, 64
# A member's role in its group: "main" has an element at each place of the group, "row" one for each row, "reduce" one
# of each row's reduced terms; "sum" reduces terms of all places, or of all rows for each column; "final" is computed
# from these.
Role = Literal["main", "row", "reduce", "sum", "final"]


@dataclass(eq=False)
class Group:
    """Anchors that one function computes.

    Attributes:
        axes: of its elements; all of a map belong to the row.
        stage: between two sync points of the ranks.
        level: groups of lower levels run before.
        roles: of its members, in executable order.
        after: groups that must run before.
    """

    kind: GroupKind
    axes: Axes
    stage: int
    level: int
    roles: dict[Tensor, Role] = field(default_factory=dict)
    after: set["Group"] = field(default_factory=set)

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
        """Whether it sums over the rows, for each column."""
        return self.kind in ("columns", "totals", "product")

    @property
    def space(self) -> tuple[object, ...]:
        """A key, equal for groups that can share a loop."""
        return self.kind, weights(self.axes)

    @cached_property
    def places(self) -> "Places":
        """Indices of its elements."""
        return Places(self)

    def of(self, *roles: Role) -> list[Tensor]:
        """Return the members with these roles."""
        return [tensor for tensor, role in self.roles.items() if role in roles]


def operand_of(tensor: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor in memory behind a factor of a product, and whether its last two axes are transposed there.

    A transpose is looked through if the views outside it keep the matrices: a reshape to other matrices reads elements
    in the order of the transpose, which is nowhere in memory. Inside it any reshape will do.
    """
    matrix, transposed = tensor.shape[-2:], False
    while tensor.op is not None and tensor.op.is_view:
        last = tensor.ndim - 1
        exchanges = axes_of(tensor) == (*range(last - 1), last, last - 1)
        if exchanges and not transposed and same(tensor.shape[-2:], matrix):
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


def _part(travels: Tensor) -> Tensor:
    """Return the tensor in memory, in order, that a rank sends for a collective's result.

    An all-reduce overwrites its operand, so the result stands for both. Other operands, also of the state, are sent
    from their memory. An operand is copied, in the stage that sends it, if it is stored in another order, changes with
    every step, or depends on the state alone: rounded weights of all layers need not be stored at once.
    """
    if travels.op is ALL_REDUCE:
        return travels
    operand = travels.inputs[0]
    beneath = in_order(operand)
    if beneath.variable is not None or not (beneath.op is None or beneath.op.is_view or _is_of_state(beneath)):
        return beneath
    return Tensor(OPERATORS["identity"], (operand,), {}, operand.shape, operand.dtype)


def _is_of_state(tensor: Tensor) -> bool:
    """Whether a tensor is an elementwise function of variables and constants."""
    visited, stack = set[Tensor](), [tensor]
    while stack:
        current = stack.pop()
        is_leaf_value = current.variable is not None or current.value is not None
        if not (
            is_leaf_value if current.op is None else current.op.is_view or isinstance(current.op.lowering, Element)
        ):
            return False
        visited.add(current)
        stack += [read for read in current.inputs if read not in visited]
    return True


def is_rounding(tensor: Tensor) -> bool:
    """Whether a tensor is a conversion to half precision."""
    lowering = lowering_of(tensor)
    return isinstance(lowering, Element) and lowering.converts and is_narrow(tensor.dtype)


def is_call(tensor: Tensor) -> bool:
    """Whether a user's kernel or the host computes a tensor."""
    return isinstance(lowering_of(tensor), UserKernel | HostCall)


def has_group_of_node(tensor: Tensor) -> bool:
    """Whether all values of a tensor's node, and no other tensors, are a group: of a loop, or of attention."""
    return has_body(tensor) or isinstance(lowering_of(tensor), AttentionKernel)


def runs_alone(tensor: Tensor) -> bool:
    """Whether a tensor is its own group with contiguous inputs: a call, or a value of a node that has a group."""
    return is_call(tensor) or has_group_of_node(tensor)


def _kind_alone(tensor: Tensor) -> GroupKind:
    return "call" if is_call(tensor) else "loop" if has_body(tensor) else "attention"


class Grouping:
    """The groups of a program, in executable order.

    Attributes:
        anchors: tensors that groups compute or other ranks send; `used` are those that other groups read.
        parts: what this rank sends for each collective's result; see `_part`.
        early: groups that run before the others of their stage, so that their results can be sent meanwhile.
        updates: new values of variables.
    """

    def __init__(self, program: Program) -> None:
        self.groups: list[Group] = []
        self._alike: dict[tuple[int, tuple[object, ...]], list[Group]] = {}  # by level and space
        self.group_of: dict[Tensor, Group] = {}
        self._of_nodes: dict[Node, Group] = {}
        self.used: set[Tensor] = set()
        self.updates: Mapping[Variable, Tensor] = program.updates
        # The old value of each update, and the groups that read values from before the step.
        self._old = {new: program.state[variable] for variable, new in program.updates.items()}
        self._readers: dict[Tensor, set[Group]] = {}
        tensors = [tensor for tensor in program.tensors if tensor.op is not None]
        self.parts = {tensor: _part(tensor) for tensor in tensors if tensor.op in SENT}
        self.early: set[Group] = set()
        self.anchors: dict[Tensor, None] = {}
        self._find_anchors(program, tensors)
        order = stages(program)
        self.stage_count = len(order)
        self._floor = self._highest = 0  # levels of all groups in earlier stages, and of all
        for stage, stage_tensors in enumerate(order):
            for tensor in stage_tensors.order:
                part = self.parts.get(tensor, tensor)
                if part is tensor and tensor in self.anchors:
                    self._add(tensor, stage)
                elif (
                    part is not tensor and part in self.anchors and part not in self.group_of and part not in self.parts
                ):
                    self._add_copy(part, stage)
            self._floor = self._highest

    # Anchors

    def _find_anchors(self, program: Program, tensors: Sequence[Tensor]) -> None:
        self._known_as_cheap = dict[Tensor, tuple[bool, int]]()
        anchors = dict.fromkeys(result for result in program.results if result.op is not None)
        for tensor in tensors:
            if tensor.op is None:
                continue
            lowering = tensor.op.lowering
            if isinstance(lowering, Reduction):
                anchors[tensor] = None
            elif (part := self.parts.get(tensor)) is not None:
                anchors |= dict.fromkeys([tensor, *([part] if part.op is not None else [])])
            elif isinstance(lowering, Product | ConvolutionLowering):
                anchors |= dict.fromkeys([tensor, *(base for base, _ in factors_of(tensor) if base.op is not None)])
            elif is_rounding(tensor) and is_product(tensor.inputs[0]) and not is_by_library(tensor.inputs[0]):
                anchors[tensor] = None  # half the bytes of the product, which then need not be stored
            elif isinstance(lowering, WHOLE) or runs_alone(tensor):
                anchors |= dict.fromkeys([tensor, *(read for read in tensor.inputs if read.op is not None)])
        self.anchors = anchors
        for candidate in tensors:
            for read in candidate.inputs:
                if size(read.shape) < size(candidate.shape) and (expensive := self._expensive(read)) is not None:
                    anchors[expensive] = None
        self._cut_chains(tensors)

    def _cut_chains(self, tensors: Sequence[Tensor]) -> None:
        """Store what several anchors would recompute by many ops, and ends of long chains, such as recurrences."""
        of: dict[Tensor, set[Tensor]] = {}  # two of the anchors computed from a tensor
        for tensor in reversed(tensors):
            ends = {tensor} if tensor in self.anchors else of.get(tensor, set())
            for read in tensor.inputs:
                readers = of.setdefault(read, set())
                readers |= set(islice(ends - readers, 2 - min(len(readers), 2)))
        beneath: dict[Tensor, set[Tensor]] = {}  # ops that compute an element from stored tensors
        depths: dict[Tensor, int] = {}
        for tensor in tensors:
            reads = [read for read in tensor.inputs if read in beneath]
            depth = 1 + max((depths[read] for read in reads), default=0)
            ops = set[Tensor]() if tensor.op is None or tensor.op.is_view else {tensor}
            ops = ops.union(*(beneath[read] for read in reads))
            if ops and (depth > _DEEP or (len(ops) > _COMPUTED_AGAIN and len(of.get(tensor, ())) > 1)):
                self.anchors[tensor] = None
            if tensor not in self.anchors:
                beneath[tensor], depths[tensor] = ops, depth

    def _expensive(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor to compute once where a smaller tensor is used for many elements, or None."""
        while tensor.op is not None and tensor.op.is_view:
            if numel(tensor.inputs[0].shape) != numel(tensor.shape):
                return None  # the view's input is considered separately
            tensor = tensor.inputs[0]
        if tensor.op is None or tensor in self.anchors or self._cheap(tensor):
            return None
        return tensor

    def _cheap(self, tensor: Tensor) -> bool:
        """Whether recomputing an element involves nothing expensive."""
        if tensor.op is None or tensor in self.anchors:
            return True
        cheap, anchors = self._known_as_cheap.get(tensor, (False, -1))
        if not cheap and anchors != len(self.anchors):  # additional anchors make more tensors cheap
            if tensor.op.expensive:  # except of known numbers, which wait for nothing
                cheap = all(operand.op is None and operand.value is not None for operand in tensor.inputs)
            else:
                cheap = all(self._cheap(operand) for operand in tensor.inputs)
            self._known_as_cheap[tensor] = cheap, len(self.anchors)
        return cheap

    # Groups

    def _add(self, tensor: Tensor, stage: int) -> None:
        if has_group_of_node(tensor) and tensor.node in self._of_nodes:
            self._include(tensor, self._of_nodes[tensor.node], "main")
            return
        own_group = self._own_group(tensor, stage)
        read = self._reads(tensor)
        before = max((self.group_of[anchor].level for anchor in read if anchor in self.group_of), default=0)
        level = max(before, self._floor) + 1
        groups_read = dict.fromkeys(self.group_of[anchor] for anchor in read if anchor in self.group_of)
        beside = [
            candidate for candidate in self._alike.get((level, own_group.space), []) if candidate not in groups_read
        ]
        for group in [*(candidate for candidate in groups_read if candidate.level == before), *beside]:
            if group.level > self._floor and group.stage == stage and self._joins(tensor, group):
                return
        own_group.level = level
        self._append(own_group)
        joined = self._joins(tensor, own_group)
        assert joined, f"{tensor} has no group"
        if has_group_of_node(tensor):
            self._of_nodes[tensor.node] = own_group

    def _include(self, tensor: Tensor, group: Group, role: Role) -> None:
        group.roles[tensor] = role
        self.group_of[tensor] = group

    def _append(self, group: Group) -> None:
        self.groups.append(group)
        self._alike.setdefault((group.level, group.space), []).append(group)
        self._highest = max(self._highest, group.level)

    def _add_copy(self, part: Tensor, stage: int) -> None:
        """Add a copy to send: before all others of its stage, if it depends on none of them."""
        copy_group = Group("map", (("row", part.shape),), stage, self._floor)  # a level to itself
        if _is_of_state(part) and self._joins(part, copy_group):
            self._append(copy_group)
            self.early.add(copy_group)
        else:
            self._add(part, stage)

    def _own_group(self, tensor: Tensor, stage: int) -> Group:
        if is_product(tensor):
            return Group("product", (("row", tensor.shape[:-1]), ("column", tensor.shape[-1:])), stage, 0)
        if runs_alone(tensor):
            return Group(_kind_alone(tensor), (("row", tensor.shape),), stage, 0)
        if (how_reduced := reduction(tensor)) is not None:
            kind, axes = how_reduced
            return Group("map" if kind == "all" else kind, axes, stage, 0)
        return Group("map", (("row", tensor.shape),), stage, 0)

    def _reads(self, tensor: Tensor) -> list[Tensor]:
        if is_product(tensor):
            return [base for base, _ in factors_of(tensor) if base in self.anchors]
        visited, stack = set[Tensor](), list(tensor.inputs)
        anchors_read: list[Tensor] = []
        while stack:
            current = stack.pop()
            if current in visited:
                continue
            visited.add(current)
            if current in self.anchors:
                anchors_read.append(current)
            else:
                stack += current.inputs
        return anchors_read

    def _joins(self, tensor: Tensor, group: Group) -> bool:
        for role in roles_in(tensor, group):
            if is_product(tensor) or runs_alone(tensor):
                whole_inputs = tensor.inputs if runs_alone(tensor) else [base for base, _ in factors_of(tensor)]
                loads = dict[Tensor, set[IndexExpr | None]]((input_tensor, {None}) for input_tensor in whole_inputs)
            else:
                builder = Builder(lambda candidate: candidate is not tensor and self.is_stored(candidate))
                group.places.pull(builder, tensor, role)
                loads = loads_of(builder.statements)
            if self._fits(tensor, group, role, loads):
                self._include(tensor, group, role)
                other_anchors = [loaded for loaded in loads if self.group_of.get(loaded, group) is not group]
                self.used.update(other_anchors)
                for loaded in (leaf for leaf in loads if leaf.op is None):
                    self._readers.setdefault(loaded, set()).add(group)
                group.after |= {self.group_of[anchor] for anchor in other_anchors}
                return True
        return False

    def _fits(self, tensor: Tensor, group: Group, role: Role, loads: Mapping[Tensor, set[IndexExpr | None]]) -> bool:
        if group.kind == "product" and group.roles and not self._follows(tensor, group):
            return False
        for loaded in loads:
            group_of = self.group_of.get(loaded)
            if group_of is None:
                continue
            if group_of is not group:
                if group_of.level >= group.level:
                    return False
            elif group.roles[loaded] not in _KNOWN_BY[role] or loads[loaded] != {group.places.of(group.roles[loaded])}:
                return False
        return True

    def _follows(self, tensor: Tensor, group: Group) -> bool:
        """Whether the blocks of a product should compute a function of its result."""
        product = next(iter(group.roles))
        if is_by_library(product):
            return False
        if isinstance(lowering_of(product), Product):
            return tensor not in self._old
        # A convolution's kernel is small compared with its gradient's sums. But the new kernel waits for all readers of
        # the old one: often the product beside this one.
        readers = self._readers.get(self._old[tensor], set()) if tensor in self._old else set()
        return all(reader is group or reader.level < group.level for reader in readers)

    def is_stored(self, tensor: Tensor) -> bool:
        """Whether groups that do not compute a tensor load it from memory."""
        return tensor in self.anchors or (tensor.op is None and (tensor.value is None or tensor.value.size != 1))


# Roles whose values a member can use within its group.
_KNOWN_BY: dict[Role, tuple[Role, ...]] = {
    "main": ("main", "row", "reduce"),
    "row": ("row", "reduce"),
    "reduce": ("main", "row", "reduce"),
    "sum": ("main", "row", "reduce"),
    "final": ("sum", "final"),
}


def reduction(tensor: Tensor) -> tuple[Literal["all", "rows", "columns", "totals"], Axes] | None:
    """Return how, and over which elements, a reduction is computed for any number of rows; None for a single thread."""
    if join_of(tensor) is None:
        return None
    shape, axes = tensor.inputs[0].shape, reduced_axes(tensor)
    long_axes = [axis for axis, n in enumerate(shape) if not is_one(n)]
    over = [axis for axis in long_axes if axis in axes]
    kept_axes = [axis for axis in long_axes if axis not in axes]
    if not over:
        return None
    if not kept_axes:
        return "all", (("row", shape),)
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
    sides_found: list[tuple[Side, Shape]] = []
    for axis, n in enumerate(shape):
        side = sides.get(axis, sides_found[-1][0] if sides_found else next(iter(sides.values())))
        if sides_found and sides_found[-1][0] == side:
            sides_found[-1] = side, (*sides_found[-1][1], n)
        else:
            sides_found.append((side, (n,)))
    return tuple(sides_found)


def weights(axes: Axes) -> tuple[tuple[Side, Numel], ...]:
    """Return a key of axes, for any number of rows."""
    return tuple((side, numel(shape)) for side, shape in axes)


def roles_in(tensor: Tensor, group: Group) -> Iterator[Role]:
    """Yield the roles that an anchor can have in a group by its shape."""
    how_reduced, count = reduction(tensor), numel(tensor.shape)
    lead, inner = numel(group.lead), numel(group.inner)
    if how_reduced is not None:
        kind, axes = how_reduced
        is_own = kind == group.kind or (kind == "columns" and _sums_results(tensor, group))
        if is_own and weights(axes) == weights(group.axes):
            yield "reduce" if kind == "rows" else "sum"
        if kind == "all" and group.kind in ("map", "rows"):
            terms = tensor.inputs[0].shape
            if numel(terms) == lead or (group.kind == "rows" and is_dealt(terms, group)):
                yield "sum"
        return
    if is_product(tensor) or runs_alone(tensor):
        own_kind = "product" if is_product(tensor) else _kind_alone(tensor)
        if group.kind == own_kind and not group.roles:
            yield "main"
        return
    if group.kind in ("call", "loop", "attention"):
        return
    if group.kind == "map" and count == lead:
        yield "main"
    if group.kind == "rows" and count == lead:
        yield "row"
    if group.kind != "map" and is_dealt(tensor.shape, group):
        yield "main"
    if group.of("sum") and count == (inner if group.by_column else ONE):
        yield "final"


def _sums_results(tensor: Tensor, group: Group) -> bool:
    """Whether a group's blocks should sum its results over the rows: many for a convolution, few for a product."""
    products = [member for member in group.roles if is_product(member)]
    return bool(products) and isinstance(lowering_of(products[0]), ConvolutionLowering) and join_of(tensor) == "Sum"


def is_dealt(shape: Shape, group: Group) -> bool:
    """Whether a shape has a group's elements in order, its axes cut into some of the group's."""
    return _aligns([(n,) for n in shape], [lengths for _, lengths in group.axes])


def _aligns(first: Sequence[Shape], second: Sequence[Shape]) -> bool:
    """Whether two lists of lengths can be cut into blocks of equal numbers of elements."""
    if not first and not second:
        return True
    for count in range(1, len(second) + 1):
        elements = numel(n for shape in second[:count] for n in shape)
        for blocks in range(len(first) + 1):
            if numel(n for shape in first[:blocks] for n in shape) == elements and _aligns(
                first[blocks:], second[count:]
            ):
                return True
    return False


class Places:
    """Indices of a group's current element, its row and column, and of tensors computed from sums (`final`)."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.row = symbol(Axis("i" if group.kind == "map" else "r", numel(group.lead), 1))
        # The columns of sums are known before the rows, and after them; a product's are known with the rows.
        self.column = symbol(Axis("c", numel(group.inner), 0 if group.kind in ("columns", "totals") else 2))
        self.final = symbol(Axis("c", numel(group.inner), 0)) if group.by_column else ZERO_INDEX
        sides = {
            side: iter(unravel(place, [n for axis_side, shape in group.axes if axis_side == side for n in shape]))
            for side, place in (("row", self.row), ("column", self.column))
        }
        places = [next(sides[side]) for side, shape in group.axes for _ in shape]
        self.element = ravel(places, [n for _, shape in group.axes for n in shape])

    def index(self, shape: Shape, role: Role) -> Index:
        """Return the index of a tensor's current element."""
        return unravel(self.of(role), shape)

    def of(self, role: Role) -> IndexExpr:
        """Return the flat index of a member's current element."""
        return {"main": self.element, "sum": self.final, "final": self.final}.get(role, self.row)

    def pull(self, builder: Builder, tensor: Tensor, role: Role) -> None:
        """Build a member's element, or the term that it reduces."""
        if role in ("reduce", "sum"):
            builder.value(*self.term(tensor))
        else:
            builder.computed(tensor, self.index(tensor.shape, role))

    def term(self, tensor: Tensor) -> tuple[Tensor, Index]:
        """Return the tensor and index of the term that a reduction adds at the current element."""
        x = tensor.inputs[0]
        return x, self.index(x.shape, "row" if self.is_of_rows(tensor) else "main")

    def place_of_term(self, tensor: Tensor) -> IndexExpr:
        """Return the number of that term within its sum."""
        if self.group.roles[tensor] == "reduce":
            return self.column
        return self.row if self.group.by_column or self.is_of_rows(tensor) else self.element

    def is_of_rows(self, tensor: Tensor) -> bool:
        """Whether a sum in a group of rows has one term for each row."""
        how_reduced = reduction(tensor)
        terms = numel(tensor.inputs[0].shape) if tensor.inputs else None
        return (
            self.group.kind == "rows"
            and how_reduced is not None
            and how_reduced[0] == "all"
            and terms == numel(self.group.lead)
        )
