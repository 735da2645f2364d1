"""The fuser: which tensors of a program are stored, and which nest computes each.

A few tensors are *anchors*: results, reductions, what externs compute and read, and expensive tensors used for many
elements. All others are recomputed at each use. An anchor joins the nest of an operand if a role fits, if it loads of
that nest only the current element, and if all else is stored before the nest begins. What a backend wants is its
`Policy`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from dptrain.program.codegen.index_expr import ONE, IndexExpr, numel
from dptrain.program.lowering import WHOLE, ConvolutionLowering, Element, Product, Reduction, in_order, lowering_of
from dptrain.program.operand import OPERATORS
from dptrain.program.program import Program
from dptrain.program.schedule import members
from dptrain.program.schedule.nest import Axes, Nest, Role, weights
from dptrain.program.schedule.order import assign_levels, overwrite
from dptrain.program.schedule.policy import Policy
from dptrain.program.schedule.schedule import Schedule
from dptrain.program.shapes import Shape, size
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.sharding.messages import SENT, stages
from dptrain.program.tensor import Node, Tensor
from dptrain.runtime.types import is_narrow


def fuse(program: Program, policy: Policy) -> Schedule:
    """Return a program as nests in order, with their statements."""
    schedule = _Fuser(program, policy).schedule
    written = schedule.written
    for nest in schedule.nests:
        extern = next(iter(nest.members))
        if nest.frame in _WHOLE or (nest.frame == "product" and policy.epilogue(extern) is None):
            nest.results = tuple(nest.members)
        else:
            members.write(nest, schedule.is_stored, written)
    overwrite(schedule)
    assign_levels(schedule, policy)
    return schedule


class _Fuser:
    def __init__(self, program: Program, policy: Policy) -> None:
        self._policy = policy
        tensors = [tensor for tensor in program.tensors if tensor.op is not None]
        parts = {tensor: _part(tensor) for tensor in tensors if tensor.op in SENT}
        order = stages(program)
        self.schedule = Schedule(program, [stage.messages for stage in order], parts)
        self._alike: dict[tuple[int, tuple[object, ...]], list[Nest]] = {}  # by level and space
        self._of_nodes: dict[Node, Nest] = {}
        # The old value of each update, and the nests that read values from before the step.
        self._old = {new: program.state[variable] for variable, new in program.updates.items()}
        self._readers: dict[Tensor, set[Nest]] = {}
        self._find_anchors(tensors)
        self._floor = self._highest = 0  # levels of all nests in earlier stages, and of all
        anchors, nest_of = self.schedule.anchors, self.schedule.nest_of
        for stage, stage_tensors in enumerate(order):
            for tensor in stage_tensors.order:
                part = parts.get(tensor, tensor)
                if part is tensor and tensor in anchors:
                    self._add(tensor, stage)
                elif part is not tensor and part in anchors and part not in nest_of and part not in parts:
                    self._add_copy(part, stage)
            self._floor = self._highest

    # Anchors

    def _find_anchors(self, tensors: Sequence[Tensor]) -> None:
        self._known_as_cheap = dict[Tensor, tuple[bool, int]]()
        policy, anchors = self._policy, self.schedule.anchors
        anchors |= dict.fromkeys(result for result in self.schedule.program.results if result.op is not None)
        for tensor in tensors:
            lowering = lowering_of(tensor)
            if isinstance(lowering, Reduction):
                anchors[tensor] = None
            elif (part := self.schedule.parts.get(tensor)) is not None:
                anchors |= dict.fromkeys([tensor, *([part] if part.op is not None else [])])
            elif _is_rounding(tensor) and self._has_epilogue(tensor.inputs[0]):
                anchors[tensor] = None  # half the bytes of the product, which then need not be stored
            elif isinstance(lowering, (*WHOLE, Product, ConvolutionLowering)) or policy.extern(tensor):
                anchors |= dict.fromkeys([tensor, *(read for read in policy.operands(tensor) if read.op is not None)])
        for candidate in tensors:
            for read in candidate.inputs:
                if size(read.shape) < size(candidate.shape) and (expensive := self._expensive(read)) is not None:
                    anchors[expensive] = None
        self._cut_chains(tensors)

    def _has_epilogue(self, tensor: Tensor) -> bool:
        return self._policy.extern(tensor) == "product" and self._policy.epilogue(tensor) is not None

    def _cut_chains(self, tensors: Sequence[Tensor]) -> None:
        """Store what several anchors would recompute by many ops, and ends of long chains, such as recurrences."""
        anchors = self.schedule.anchors
        of: dict[Tensor, set[Tensor]] = {}  # two of the anchors computed from a tensor
        for tensor in reversed(tensors):
            ends = {tensor} if tensor in anchors else of.get(tensor, set())
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
            is_shared = len(ops) > self._policy.recomputed and len(of.get(tensor, ())) > 1
            if ops and (depth > self._policy.chain or is_shared):
                anchors[tensor] = None
            if tensor not in anchors:
                beneath[tensor], depths[tensor] = ops, depth

    def _expensive(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor to compute once where a smaller tensor is used for many elements, or None."""
        while tensor.op is not None and tensor.op.is_view:
            if numel(tensor.inputs[0].shape) != numel(tensor.shape):
                return None  # the view's input is considered separately
            tensor = tensor.inputs[0]
        if tensor.op is None or tensor in self.schedule.anchors or self._cheap(tensor):
            return None
        return tensor

    def _cheap(self, tensor: Tensor) -> bool:
        """Whether recomputing an element involves nothing expensive."""
        if tensor.op is None or tensor in self.schedule.anchors:
            return True
        cheap, anchors = self._known_as_cheap.get(tensor, (False, -1))
        if not cheap and anchors != len(self.schedule.anchors):  # additional anchors make more tensors cheap
            if tensor.op.expensive:  # except of known numbers, which wait for nothing
                cheap = all(operand.op is None and operand.value is not None for operand in tensor.inputs)
            else:
                cheap = all(self._cheap(operand) for operand in tensor.inputs)
            self._known_as_cheap[tensor] = cheap, len(self.schedule.anchors)
        return cheap

    # Nests

    def _add(self, tensor: Tensor, stage: int) -> None:
        node = tensor.node if self._policy.extern(tensor) in _OF_NODES else None
        if node in self._of_nodes:
            self._include(tensor, self._of_nodes[node], "main")
            return
        new, nest_of = self._own_nest(tensor, stage), self.schedule.nest_of
        read = dict.fromkeys(nest_of[anchor] for anchor in self._reads(tensor) if anchor in nest_of)
        before = max((nest.level for nest in read), default=0)
        level = max(before, self._floor) + 1
        beside = [nest for nest in self._alike.get((level, new.space), []) if nest not in read]
        for nest in [*(nest for nest in read if nest.level == before), *beside]:
            if nest.level > self._floor and nest.stage == stage and self._joins(tensor, nest):
                return
        new.level = level
        self._append(new)
        joined = self._joins(tensor, new)
        assert joined, f"{tensor} has no nest"
        if node is not None:
            self._of_nodes[node] = new

    def _include(self, tensor: Tensor, nest: Nest, role: Role) -> None:
        nest.members[tensor] = role
        self.schedule.nest_of[tensor] = nest

    def _append(self, nest: Nest) -> None:
        self.schedule.nests.append(nest)
        self._alike.setdefault((nest.level, nest.space), []).append(nest)
        self._highest = max(self._highest, nest.level)

    def _add_copy(self, part: Tensor, stage: int) -> None:
        """Add a copy to send: before all others of its stage, if it depends on none of them."""
        copy = Nest("map", (("row", part.shape),), stage, self._floor)  # a level to itself
        if _is_of_state(part) and self._joins(part, copy):
            self._append(copy)
            self.schedule.early.add(copy)
        else:
            self._add(part, stage)

    def _own_nest(self, tensor: Tensor, stage: int) -> Nest:
        extern, bound = self._policy.extern(tensor), self._policy.reduction(tensor)
        if extern == "product":
            return Nest("product", (("row", tensor.shape[:-1]), ("column", tensor.shape[-1:])), stage, 0)
        if bound is not None:
            return Nest(*bound, stage, 0)
        return Nest(extern or "map", (("row", tensor.shape),), stage, 0)

    def _reads(self, tensor: Tensor) -> list[Tensor]:
        if self._policy.extern(tensor):
            return [operand for operand in self._policy.operands(tensor) if operand in self.schedule.anchors]
        visited, stack = set[Tensor](), list(tensor.inputs)
        anchors_read: list[Tensor] = []
        while stack:
            current = stack.pop()
            if current in visited:
                continue
            visited.add(current)
            if current in self.schedule.anchors:
                anchors_read.append(current)
            else:
                stack += current.inputs
        return anchors_read

    def _joins(self, tensor: Tensor, nest: Nest) -> bool:
        is_extern, nest_of = self._policy.extern(tensor) is not None, self.schedule.nest_of
        for role in self.roles_in(tensor, nest):
            if is_extern:
                loads = dict[Tensor, set[IndexExpr | None]]((read, {None}) for read in self._policy.operands(tensor))
            else:
                loads = members.loads_of(nest, tensor, role, self.schedule.is_stored)
            if self._fits(tensor, nest, role, loads):
                self._include(tensor, nest, role)
                if is_extern:
                    nest.operands, nest.row_operand = tuple(loads), self._policy.row_operand(tensor)
                other_anchors = [loaded for loaded in loads if nest_of.get(loaded, nest) is not nest]
                self.schedule.used.update(other_anchors)
                for loaded in (leaf for leaf in loads if leaf.op is None):
                    self._readers.setdefault(loaded, set()).add(nest)
                nest.after |= {nest_of[anchor] for anchor in other_anchors}
                return True
        return False

    def _fits(self, tensor: Tensor, nest: Nest, role: Role, loads: Mapping[Tensor, set[IndexExpr | None]]) -> bool:
        if nest.frame == "product" and nest.members and not self._follows(tensor, nest):
            return False
        for loaded in loads:
            maker = self.schedule.nest_of.get(loaded)
            if maker is None:
                continue
            if maker is not nest:
                if maker.level >= nest.level:
                    return False
            elif nest.members[loaded] not in _KNOWN_BY[role] or loads[loaded] != {nest.position(nest.members[loaded])}:
                return False
        return True

    def _follows(self, tensor: Tensor, nest: Nest) -> bool:
        """Whether the nest of a product should compute a function of its result."""
        epilogue = self._policy.epilogue(next(iter(nest.members)))
        if epilogue is None or tensor not in self._old:
            return epilogue is not None
        # A new value waits for all readers of the old one, often the product beside this one.
        readers = self._readers.get(self._old[tensor], set())
        return epilogue.updates and all(reader is nest or reader.level < nest.level for reader in readers)

    # Roles

    def roles_in(self, tensor: Tensor, nest: Nest) -> Iterator[Role]:
        """Yield the roles that an anchor can have in a nest by its shape."""
        if (bound := self._policy.reduction(tensor)) is not None:
            yield from self._roles_of_reduction(tensor, *bound, nest)
            return
        extern = self._policy.extern(tensor)
        if extern is not None:
            if nest.frame == extern and not nest.members:
                yield "main"
            return
        if nest.frame in _WHOLE:
            return
        count = numel(tensor.shape)
        if nest.frame == "map" and count == numel(nest.lead):
            yield "main"
        if nest.frame == "rows" and count == numel(nest.lead):
            yield "row"
        if nest.frame != "map" and _is_dealt(tensor.shape, nest):
            yield "main"
        if nest.of("sum") and count == (numel(nest.inner) if nest.by_column else ONE):
            yield "final"

    def _roles_of_reduction(self, tensor: Tensor, frame: str, axes: Axes, nest: Nest) -> Iterator[Role]:
        if frame == "map":
            terms = tensor.inputs[0].shape
            is_of_row = numel(terms) == numel(nest.lead)
            if nest.frame in ("map", "rows") and (is_of_row or (nest.frame == "rows" and _is_dealt(terms, nest))):
                yield "sum"
            return
        is_own = frame == nest.frame or (frame == "columns" and self._reduces_results(tensor, nest))
        if is_own and weights(axes) == weights(nest.axes):
            yield "reduce" if frame == "rows" else "sum"

    def _reduces_results(self, tensor: Tensor, nest: Nest) -> bool:
        """Whether a product's nest should reduce its results over the rows."""
        if nest.frame != "product" or not nest.members:
            return False
        epilogue, lowering = self._policy.epilogue(next(iter(nest.members))), lowering_of(tensor)
        return epilogue is not None and isinstance(lowering, Reduction) and lowering.join in epilogue.joins


# Frames that compute all values of a node, and frames of externs that store their results themselves.
_OF_NODES = ("loop", "attention")
_WHOLE = ("call", *_OF_NODES)
# Roles whose values a member can use within its nest.
_KNOWN_BY: dict[Role, tuple[Role, ...]] = {
    "main": ("main", "row", "reduce"),
    "row": ("row", "reduce"),
    "reduce": ("main", "row", "reduce"),
    "sum": ("main", "row", "reduce"),
    "final": ("sum", "final"),
}


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


def _is_rounding(tensor: Tensor) -> bool:
    """Whether a tensor is a conversion to half precision."""
    lowering = lowering_of(tensor)
    return isinstance(lowering, Element) and lowering.converts and is_narrow(tensor.dtype)


def _is_dealt(shape: Shape, nest: Nest) -> bool:
    """Whether a shape has a nest's elements in order, its axes cut into some of the nest's."""
    return _aligns([(n,) for n in shape], [lengths for _, lengths in nest.axes])


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
