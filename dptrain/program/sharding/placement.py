"""Places a program of the whole batch on a mesh of ranks: it becomes one that each rank executes on its part.

Over each axis of the mesh a tensor is *replicated* (every rank has it), *sharded* (a rank has its part along one of the
tensor's axes) or *partial* (a rank has a summand; the value is the sum over the ranks). The batch is sharded over
`BATCH`, variables as their layout says, by default replicated. Each op has a sharding rule (`Op.letters`), and is
linear in some operands (`Op.linear`). The rest follows:

- For each axis of the mesh an op takes one letter among those along which an operand is sharded over it: rows of the
  batch first, then the one with most bytes. Replicated operands are sliced along it; operands sharded along another
  letter are gathered.
- A letter of the output shards the output; one that is summed over makes it partial.
- What is linear in a partial tensor, with all else replicated, is partial.
- Any other use of a partial tensor needs the sum: an all-reduce is inserted, as late as linearity allows; or a
  reduce-scatter, if the op needs only parts.
- Finally each variable's new value moves to the variable's own placement.

Data parallelism is the mesh with the one axis `BATCH`. Slots sharded over it are ZeRO-1, weights too FSDP, kernels
`(None, "model")` and `("model", None)` Megatron's pair.

A division by a partial number (a sum of sample weights) is *deferred*: the quotient goes on as its numerator, and the
divisor is summed together with whatever needs the quotient. So sums of gradients and of weights travel in one message.
A quotient of data is not deferred where zeros come beside it, which a divisor of 0 would turn into NaN. A sum of
quotients over no rows is 0, whatever the divisor.

Weight gradients may travel in another type than they are computed in: each rank rounds its summand.

Source of the rules: Y. Xu et al., "GSPMD: General and scalable parallelization for ML computation graphs",
arXiv:2105.04663, and DTensor of PyTorch.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dptrain.comm.mesh import BATCH
from dptrain.errors import ConfigError
from dptrain.program.body import Body, body_of, closed, has_body, steps_of, with_steps
from dptrain.program.dims import Dim
from dptrain.program.gradient import topological
from dptrain.program.lowering import Element, Insert, Join, Scatter
from dptrain.program.op import Op
from dptrain.program.operand import METHODS, OPERATORS
from dptrain.program.program import Program
from dptrain.program.shapes import Shape, row_axis, size
from dptrain.program.sharding.mesh import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Axes,
    PlacedProgram,
    Placement,
)
from dptrain.program.sharding.messages import scheduled
from dptrain.program.sharding.moves import Divisor, Mover, Part, bytes_to_gather
from dptrain.program.sharding.rows import RowAxis, as_numbers, same_rows
from dptrain.program.sharding.sharding_rule import ShardingRule
from dptrain.program.steps import unrolled, with_branches_selected
from dptrain.program.tensor import Node, Tensor, Variable, placeholder

# A loop whose placement has not converged after so many rounds is unrolled.
_ROUNDS = 8


def place(
    program: Program,
    summed: Collection[Variable] = (),
    *,
    bucket_bytes: int | None = None,
    comm_dtype: str | None = None,
    layouts: Mapping[Variable, Axes] | None = None,
    slots: Mapping[Variable, Collection[Variable]] | None = None,
    alone: bool = False,
) -> PlacedProgram:
    """Return the program of one rank.

    Args:
        program: inputs whose shape counts rows are sharded over `BATCH`, the others replicated. Outputs are replicated,
            but for those whose shape counts rows, of which each rank has its part.
        summed: variables of which each rank should keep a summand (totals of metrics, summed when they are read), if
            their updates allow it; `PlacedProgram.summed` has those that do.
        bucket_bytes: limit of sums in one message; None for no limit.
        comm_dtype: half precision in which weight gradients are sent; None for their own type.
        layouts: for each axis of a variable the axis of the mesh that shards it, or None; other variables are
            replicated. Executors take such a program as `local.localized` returns it.
        slots: of trained variables: if these, or the variable, are sharded over `BATCH`, its gradient is
            reduce-scattered as soon as it is computed, and an optimizer works on a rank's part.
        alone: there are no other ranks, for whose sums branches would be unrolled.

    Raises:
        ConfigError: an op needs the rows of all ranks at once, or a layout does not fit its variable.
    """
    placements = {variable: laid_out(variable, axes) for variable, axes in (layouts or {}).items()}
    placements = {variable: placement for variable, placement in placements.items() if not placement.is_replicated}
    while True:
        try:
            placed = _placed(program, set(summed), bucket_bytes, comm_dtype, placements, slots or {}, alone)
            return placed if placements else scheduled(placed)
        except _MeetsInLoopError as meets:
            if steps_of(meets.node) is not None:
                program = unrolled(program, meets.node.__eq__)
            elif any(
                has_body(tensor) and body_of(tensor).guarded
                for tensor in with_steps(topological(body_of(meets.node).results))
            ):
                program = with_branches_selected(program)
            else:
                raise ConfigError(
                    "not supported: a while_loop whose length is not known, around another loop that needs all ranks "
                    "in each step, or weights sharded over them; pass maximum_iterations"
                ) from None


def _placed(
    program: Program,
    chosen: set[Variable],
    bucket_bytes: int | None,
    comm_dtype: str | None,
    layouts: Mapping[Variable, Placement],
    slots: Mapping[Variable, Collection[Variable]],
    alone: bool,
) -> PlacedProgram:
    """See `place`; raises a _MeetsInLoopError where a loop would communicate in every step."""
    rounded = _alone_for_weights(program) if comm_dtype is not None else set()
    for_gradients = _for_gradients(program)
    scattered = _gradient_layouts(program, layouts, slots)
    while True:
        placing = _Placer(chosen, layouts, rounded, comm_dtype, for_gradients, alone)
        for tensor in program.tensors:
            placing.add(tensor)
            if tensor in scattered:
                placing.scatter(tensor, scattered[tensor])
            if comm_dtype is not None and tensor in program.weight_gradients:
                placing.reduce(tensor)  # now, not later as a part of something else
        refused = {variable for variable in chosen if not placing.stays_partial(program.updates.get(variable))}
        if not refused:
            break
        chosen -= refused  # their values must be whole: place them and their results again
    outputs = {name: placing.finished(tensor) for name, tensor in program.outputs.items()}
    updates = {
        variable: placing.parts[tensor].tensor if variable in chosen else placing.finished(tensor, variable)
        for variable, tensor in program.updates.items()
    }
    specialised = program.shape_specialised or placing.needs_all_rows
    placed = (program.inputs, program.state, outputs, updates, program.derived, program.rows, specialised)
    gradients = {
        placing.parts[tensor].tensor: to for tensor, to in program.weight_gradients.items() if tensor in placing.parts
    }
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "layouts": layouts, "weight_gradients": gradients}
    return PlacedProgram(*placed, placements=placing.placements, summed=frozenset(chosen), **options)


def _alone_for_weights(program: Program) -> set[Tensor]:
    """Return the weight gradients, and tensors of their size that only they depend on."""
    readers, results = _readers(program), set(program.results)
    tensors = set(program.weight_gradients)
    for tensor in reversed(program.tensors):
        if tensor in readers and row_axis(tensor.shape) is None and tensor not in results:
            elements = size(tensor.shape)
            if all(reader in tensors and size(reader.shape) == elements for reader in readers[tensor]):
                tensors.add(tensor)
    return tensors


def _for_gradients(program: Program) -> set[Tensor]:
    """Return the weight gradients, and tensors that only they depend on."""
    readers, results = _readers(program), set(program.results)
    tensors = set(program.weight_gradients)
    for tensor in reversed(program.tensors):
        if tensor in readers and tensor not in results and tensors.issuperset(readers[tensor]):
            tensors.add(tensor)
    return tensors


def _readers(program: Program) -> dict[Tensor, list[Tensor]]:
    readers: dict[Tensor, list[Tensor]] = {}
    for tensor in program.tensors:
        for operand in tensor.inputs:
            readers.setdefault(operand, []).append(tensor)
    return readers


def _gradient_layouts(
    program: Program, layouts: Mapping[Variable, Placement], slots: Mapping[Variable, Collection[Variable]]
) -> dict[Tensor, Axes]:
    """Return the layouts of gradients sharded over `BATCH`: the variable's, or its slots' if all are equal."""
    times = Counter(program.weight_gradients.values())
    axes_of = {}
    for gradient, variable in program.weight_gradients.items():
        beside = [slot for slot in slots.get(variable, ()) if slot.shape == variable.shape and slot in layouts]
        axes = {layouts[sharded_variable].axes for sharded_variable in ([variable] if variable in layouts else beside)}
        if times[variable] == 1 and len(axes) == 1 and BATCH in (axes_alone := axes.pop()):
            axes_of[gradient] = axes_alone
    return axes_of


def laid_out(variable: Variable, axes: Axes) -> Placement:
    """Return a layout as a placement; ConfigError if it does not fit its variable."""
    mesh_axes = [axis for axis in axes if axis is not None]
    if len(axes) != len(variable.shape) or len(set(mesh_axes)) < len(mesh_axes):
        raise ConfigError(
            f"layout {axes} of {variable._path!r}, of shape {variable.shape}: expected an axis of the mesh or None for "
            "each of its axes, and none twice"
        )
    return Placement(tuple(axes))


class _MeetsInLoopError(Exception):
    """A loop, `node` of the program being placed, would communicate in every step."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node


class _Placer(Mover):
    def __init__(
        self,
        summed: Collection[Variable],
        layouts: Mapping[Variable, Placement],
        rounded: Collection[Tensor],
        comm_dtype: str | None,
        for_gradients: Collection[Tensor],
        alone: bool,
    ) -> None:
        super().__init__(comm_dtype, alone)
        self._summed, self._layouts, self._for_gradients = summed, layouts, for_gradients
        self._rounded = rounded
        meshes = [mesh for layout in layouts.values() for mesh in layout.axes if mesh is not None]
        self._mesh = list(dict.fromkeys([BATCH, *meshes]))
        self.parts: dict[Tensor, Part] = {}
        self._over_rows: dict[Divisor, Divisor] = {}
        self._numbers: set[Tensor] = set()  # uniform functions of constants and variables
        self._zeros: set[Tensor] = set()  # initial carries, whose placement is not yet known
        self._loops: dict[Node, list[Part]] = {}

    def add(self, tensor: Tensor) -> None:
        """Place a tensor whose inputs have been placed."""
        is_leaf = tensor.op is None and (tensor.value is not None or tensor.variable is not None)
        if (is_leaf and tensor.shape == ()) or (tensor.inputs and self._numbers.issuperset(tensor.inputs)):
            self._numbers.add(tensor)
        if tensor.op is None:
            self.parts[tensor] = self._note(tensor, self._given(tensor))
        elif has_body(tensor):
            if tensor.node not in self._loops:
                self._loops[tensor.node] = self._loop(tensor.node)
            self.parts[tensor] = self._loops[tensor.node][tensor.index]
        else:
            parts = [self.parts[operand] for operand in tensor.inputs]
            part = self.parts[tensor] = self._place(tensor.op, tensor, parts)
            if tensor in self._rounded and all(operand_part.tensor is not part.tensor for operand_part in parts):
                self._travels_rounded.add(part.tensor)  # the deferred quotient's numerator may have other readers

    def reduce(self, tensor: Tensor) -> None:
        """All-reduce a tensor for all its readers."""
        self.parts[tensor] = self._whole(self.parts[tensor])

    def scatter(self, tensor: Tensor, axes: Axes) -> None:
        """Reduce-scatter a tensor for all its readers."""
        part = self.parts[tensor]
        if BATCH in part.placement.partial and part.placement.join == "sum":
            self.parts[tensor] = self._moved(part, axes, None, part.placement.partial)

    def _given(self, tensor: Tensor) -> Placement:
        """Return the placement of a leaf."""
        axes = _of_rows(tensor.shape) if tensor.value is None else (None,) * tensor.ndim
        if tensor.variable is not None and tensor.variable in self._layouts:
            return self._layouts[tensor.variable]
        return Placement(axes, (BATCH,) if tensor.variable in self._summed else ())

    def stays_partial(self, tensor: Tensor | None) -> bool:
        """Whether a variable's new value is a summand as the old one was."""
        part = None if tensor is None else self.parts[tensor]
        return part is None or (_is_summand(part) and part.divisor is None)

    def finished(self, tensor: Tensor, variable: Variable | None = None) -> Tensor:
        """Return a result summed, divided and in its variable's placement."""
        part = self._divided(self.parts[tensor])
        layout = None if variable is None else self._layouts.get(variable)
        if layout is not None:
            return self._moved(part, layout.axes, None).tensor
        return self._of_own_rows(part, tensor.shape).tensor

    def _place(self, op: Op, tensor: Tensor, parts: list[Part]) -> Part:
        converts = isinstance(op.lowering, Element) and op.lowering.converts
        if converts and not self._summed and parts[0].tensor.dtype.itemsize < tensor.dtype.itemsize:
            parts = [self._whole(parts[0])]  # the narrower type makes the smaller message
        if op.quotient is not None and self._can_wait(tensor, *parts):
            divisor_of_result = Divisor(self._number(parts[1]), op, tensor.inputs[0] in self._numbers)
            return self._note(parts[0].tensor, parts[0].placement, divisor_of_result)
        parts = [self._whole(part) if part.placement.join == "max" else part for part in parts]
        divisor = self._common_divisor(op, tensor, parts)
        if divisor is not None:
            parts = [Part(part.tensor, part.placement) for part in parts]
        parts = [replace(self._scattered.get(part.tensor, part), divisor=part.divisor) for part in parts]
        shape = tensor.shape
        if row_axis(tensor.shape) is not None or any(any(part.placement.axes) for part in parts):
            parts, placement, shape = self._in_parts(op, tensor, parts)
        else:
            parts = [self._divided(part) for part in parts]
            parts, partial = self._linear(op, parts, self._mesh)
            placement = Placement((None,) * tensor.ndim, partial)
        return self._note(self._on_parts(tensor, [part.tensor for part in parts], shape), placement, divisor)

    def _in_parts(self, op: Op, tensor: Tensor, parts: list[Part]) -> tuple[list[Part], Placement, Shape]:
        """Return the moved inputs of a sharded op, and its output's placement and shape."""
        rule = op.sharding_rule(tensor)
        chosen = self._chosen(rule, tensor, parts)
        dims = self._row_dims(rule, tensor, parts, chosen)
        by_rows = any(dim is not None for dim in dims)
        axes_of_all = [  # a tensor without rows is whole
            tuple(None if by_rows and dim is None and mesh == BATCH else mesh for mesh in map(chosen.get, names))
            for names, dim in zip((*rule.inputs, rule.output), dims, strict=True)
        ]
        *wanted_axes, axes = axes_of_all
        parts = [  # scattered tensors are divided afterwards: their parts, by a sum that travels beside them
            part if not by_rows and part.placement.partial in [(mesh,) for mesh in wanted] else self._divided(part)
            for part, wanted in zip(parts, wanted_axes, strict=True)
        ]
        parts, partial = self._linear(op, parts, [mesh for mesh in self._mesh if mesh not in chosen.values()])
        moved = [
            self._moved(part, wanted, rows, partial)
            for part, wanted, rows in zip(parts, wanted_axes, dims, strict=False)
        ]
        shape = tuple(
            dims[-1] if mesh == BATCH and by_rows else self._all(n) for n, mesh in zip(tensor.shape, axes, strict=True)
        )
        partial += tuple(mesh for letter, mesh in chosen.items() if letter not in rule.output)
        return moved, Placement(axes, partial, op.partial_reduce if partial else "sum"), shape

    def _row_dims(
        self, rule: ShardingRule, tensor: Tensor, parts: list[Part], chosen: dict[str, str]
    ) -> list[Dim | None]:
        """Return each operand's and the result's dim along the letter that `BATCH` shards by rows.

        Where ranks cannot compute their parts of the result from their own rows, the letter is dropped from `chosen`.
        """
        none: list[Dim | None] = [None] * (len(parts) + 1)
        letter = next((letter for letter, mesh in chosen.items() if mesh == BATCH), None)
        if letter is None:
            return none
        placed = []
        for part, names in zip(parts, rule.inputs, strict=True):
            axis = names.find(letter)
            length = part.tensor.shape[axis] if axis >= 0 and part.placement.axes[axis] == BATCH else None
            placed.append(length if isinstance(length, Dim) else None)
        dims = RowAxis(tensor, rule, letter, placed, [bytes_to_gather(part.tensor) for part in parts]).dims(
            alone=self._alone
        )
        if dims is None:
            del chosen[letter]
        return dims or none

    def _chosen(self, rule: ShardingRule, tensor: Tensor, parts: list[Part]) -> dict[str, str]:
        """Return the letters that shard an op, each with its axis of the mesh."""
        chosen: dict[str, str] = {}
        for mesh in self._mesh:
            nbytes: dict[str, int] = {}  # bytes of operands sharded along a letter
            for part, names in zip(parts, rule.inputs, strict=True):
                axis = part.placement.axis(mesh)
                if axis is not None:
                    by_rows = isinstance(part.tensor.shape[axis], Dim)
                    part_bytes = bytes_to_gather(part.tensor) if by_rows else _bytes(part.tensor)
                    nbytes[names[axis]] = nbytes.get(names[axis], 0) + part_bytes
            counted = [letter for letter, n in _axes_of(rule, tensor) if mesh == BATCH and isinstance(n, Dim)]
            if not nbytes:  # what a rank has all rows of stays so until it meets what is sharded
                counted = [letter for letter in counted if not _has_rows(rule, tensor, letter)]
            free = [letter for letter in (*counted, *nbytes) if letter.islower() and letter not in chosen]
            if free:
                chosen[max(free, key=lambda letter: (letter in counted, nbytes.get(letter, 0)))] = mesh
        return chosen

    def _own_count(self, tensor: Tensor) -> Tensor | None:
        """Return this rank's summand of a count of rows; None for other numbers."""
        if tensor.counts_rows:
            own_count = Tensor(None, (), tensor.attributes | {"own": True}, tensor.shape, tensor.dtype, tensor.value)
            return self._note(own_count, _summand(own_count)).tensor
        if tensor.op is None or tensor.op.linear is None:
            return None
        own_counts = [self._own_count(operand) for operand in tensor.inputs]
        counted = [number for number, operand_count in enumerate(own_counts) if operand_count is not None]
        others_known = all(
            operand.op is None and operand.value is not None
            for operand, own_count in zip(tensor.inputs, own_counts, strict=True)
            if own_count is None
        )
        if len(counted) != 1 or not others_known or tensor.op.linear != "each":
            return None
        if tensor.op.linear_in is not None and counted[0] not in tensor.op.linear_in:
            return None
        inputs = [
            operand if own_count is None else own_count
            for operand, own_count in zip(tensor.inputs, own_counts, strict=True)
        ]
        scaled_count = Tensor(tensor.op, inputs, tensor.attributes, tensor.shape, tensor.dtype)
        return self._note(scaled_count, _summand(scaled_count)).tensor

    def _with_own_counts(self, op: Op, parts: list[Part]) -> list[Part]:
        """Replace counts of rows beside partial inputs of a sum by those of each rank."""
        if not self._summed or op.linear != "joint" or not any(BATCH in part.placement.partial for part in parts):
            return parts
        counted_parts = []
        for part in parts:
            own_count = self._own_count(part.tensor) if part.placement.is_replicated else None
            counted_parts.append(part if own_count is None else Part(own_count, _summand(own_count)))
        return counted_parts

    def _linear(self, op: Op, parts: list[Part], meshes: Iterable[str]) -> tuple[list[Part], tuple[str, ...]]:
        """Return the inputs, reduced over these mesh axes where needed, and the axes that stay partial."""
        stays: tuple[str, ...] = ()
        for mesh in meshes:
            if any(mesh in part.placement.partial for part in parts):
                parts = self._with_own_counts(op, parts) if mesh == BATCH else parts
                keep = self._kept_partial(op, parts, mesh)
                parts = [part if number in keep else self._reduce(part, mesh) for number, part in enumerate(parts)]
                stays += (mesh,) if keep else ()
        return parts, stays

    def _kept_partial(self, op: Op, parts: list[Part], mesh: str) -> list[int]:
        """Return the inputs that can stay partial, which makes the output partial."""
        partial = [number for number, part in enumerate(parts) if mesh in part.placement.partial]
        tensors = {parts[number].tensor for number in partial}
        if all(self._is_reduced(parts[number], mesh) for number in partial):
            return []  # the sums have been sent already; linearity would send others
        if op.linear == "each" and len(tensors) < len(partial):
            return []  # a square needs the sum
        linear_in = range(len(parts)) if op.linear_in is None else op.linear_in
        if op.linear == "joint" and partial == self._not_zero(parts, linear_in):
            return partial
        candidates = [number for number in partial if number in linear_in]
        if op.linear == "each" and candidates:
            most = max(candidates, key=lambda number: size(parts[number].tensor.shape))
            return [] if self._is_reduced(parts[most], mesh) else [most]
        return []

    def _can_wait(self, tensor: Tensor, numerator: Part, denominator: Part) -> bool:
        """Whether a division can be deferred: by a scalar, of an undivided numerator of the same shape and type."""
        return (
            _is_summand(denominator)
            and denominator.divisor is None
            and size(denominator.tensor.shape) == 1
            and numerator.divisor is None
            and numerator.tensor.shape == tensor.shape
            and numerator.tensor.dtype == tensor.dtype
        )

    def _number(self, part: Part) -> Part:
        if part.tensor.shape == ():
            return part
        scalar = Tensor(OPERATORS["reshape"], (part.tensor,), {"shape": ()}, (), part.tensor.dtype)
        return self._note(scalar, replace(part.placement, axes=()))

    def _common_divisor(self, op: Op, tensor: Tensor, parts: list[Part]) -> Divisor | None:
        """Return the divisor that an output takes over from its inputs, or None."""
        if all(part.divisor is None for part in parts):
            return None
        rule = op.sharding_rule(tensor)
        summed = [n for letter, n in _axes_of(rule, tensor) if letter != "1" and letter not in rule.output]
        if 0 in [n for n in summed if not isinstance(n, Dim)]:
            return None  # a sum of nothing is 0, not 0 / 0
        divisor = self._taken_over(op, parts, tensor in self._for_gradients)
        if divisor is None or divisor.over_rows or not any(isinstance(n, Dim) for n in summed):
            return divisor
        return self._over_rows.setdefault(divisor, replace(divisor, over_rows=True))

    def _taken_over(self, op: Op, parts: list[Part], for_gradients: bool) -> Divisor | None:
        divisors = [part.divisor for part in parts]
        divided_numbers = [number for number, divisor in enumerate(divisors) if divisor is not None]
        linear_in = range(len(parts)) if op.linear_in is None else op.linear_in
        puts_zeros = _puts_zeros(op, len(divided_numbers) < len(linear_in))
        if puts_zeros and not (for_gradients and all(self._may_divide_zeros(divisor) for divisor in divisors)):
            return None  # with a sum of 0 they would be 0 / 0, not 0
        if op.linear == "each" and len(divided_numbers) == 1 and divided_numbers[0] in linear_in:
            return divisors[divided_numbers[0]]
        if (
            op.linear == "joint"
            and divided_numbers
            and divided_numbers == self._not_zero(parts, linear_in)
            and len({divisor for divisor in divisors if divisor is not None}) == 1
        ):
            return divisors[divided_numbers[0]]
        return None

    def _may_divide_zeros(self, divisor: Divisor | None) -> bool:
        """Whether zeros may be divided later: in a gradient, whose loss is not finite either with a divisor of 0."""
        if divisor is None:
            return True
        is_known = any(self._is_reduced(divisor.number, mesh) for mesh in divisor.number.placement.partial)
        return divisor.of_number and not is_known

    def _is_zero(self, part: Part) -> bool:
        """Whether a part is the constant 0, or a carry that begins as 0."""
        tensor = part.tensor
        value = tensor.value if tensor.op is None and not tensor.counts_rows else None
        return tensor in self._zeros or (value is not None and value.size == 1 and not value.any())

    def _not_zero(self, parts: Sequence[Part], numbers: Iterable[int]) -> list[int]:
        """Return the parts that are not 0, which is its own summand and quotient."""
        return [number for number in numbers if not self._is_zero(parts[number])]

    # Loops

    def _loop(self, node: Node) -> list[Part]:
        """Place a loop whose inputs stay partial if its steps can do with that; else they are reduced before it.

        If its length is not known, ranks may communicate in its steps.
        """
        for partial in (self._mesh, ()):
            try:
                return self._loop_of(node, partial)
            except _MeetsInLoopError:
                if not partial and steps_of(node) is not None:
                    raise
        return self._loop_of(node, (), meets=True)

    def _loop_of(self, node: Node, partial: Collection[str], meets: bool = False) -> list[Part]:
        """Place a loop, whose carries' placements are a fixed point of its body, or raise a _MeetsInLoopError.

        Sharded inputs are gathered before it, but for rows; they may be partial over the axes in `partial`.
        """
        # Zeros have any placement, so carries that begin as zeros are free in the first round. Messages that depend on
        # captures alone are sent once, before the loop; without `meets` none may be left in the body.
        body = body_of(node)
        count, ends = len(body.begun), len(body.begun) + len(body.slices)
        parts = [self._divided(self.parts[operand]) for operand in node.inputs]
        parts = [self._whole(part) if part.placement.join == "max" else part for part in parts]
        for number, part in enumerate(parts):
            lengths = list(zip(part.tensor.shape, part.placement.axes, strict=True))
            axes = tuple(mesh if isinstance(n, Dim) else None for n, mesh in lengths)
            if count <= number < ends:
                axes = (None, *axes[1:])
            parts[number] = self._moved(part, axes, _rows(part.tensor.shape, axes), partial)
        shapes = [part.tensor.shape for part in parts[:count]] + [_of_first_rows(t.shape) for t in body.carries[count:]]
        shapes += [part.tensor.shape[1:] for part in parts[count:ends]] + [part.tensor.shape for part in parts[ends:]]
        begins = [None if self._is_zero(part) else part.placement for part in parts[:count]] + [None] * body.sums
        slices = [replace(part.placement, axes=part.placement.axes[1:]) for part in parts[count:ends]]
        captures = [part.placement for part in parts[ends:]]
        try:
            inner, following, carried, leaves = _fixed_point(self, node, begins, shapes, [*slices, *captures], meets)
            stacked = [inner.out_of_step(tensor) for tensor in body.stacked]
        except _MeetsInLoopError:
            raise _MeetsInLoopError(node) from None
        for number, (part, placement) in enumerate(zip(parts[:count], carried, strict=False)):
            if begins[number] is not None and set(placement.partial) - set(part.placement.partial):
                raise _MeetsInLoopError(node)
            rows = _rows(following[number].tensor.shape, placement.axes)
            parts[number] = self._moved(part, placement.axes, rows, placement.partial)
        if meets:  # sums may differ in their last bits, and all must send as many messages
            parts[0], following[0] = self._agreed(parts[0]), inner._agreed(following[0])
        captured_tensors = {
            leaves[capture]: part.tensor for capture, part in zip(body.captures, parts[ends:], strict=True)
        }
        results = ([part.tensor for part in following], [part.tensor for part in stacked])
        guard = parts[ends].tensor if body.guarded else None
        carries, body_slices = ([leaves[leaf] for leaf in body_leaves] for body_leaves in (body.carries, body.slices))
        placed, captured, new = closed(carries, body_slices, *results, captured_tensors, body.sums, guard)
        for old, tensor in new.items():
            self.placements.setdefault(tensor, inner.placements[old])
            self._kept.append(tensor)
        for inner_tensor, outside in zip(placed.captures, captured, strict=True):
            self._note(inner_tensor, self.placements[outside])
        if self._alone and (body.guarded or meets):
            placed = self._without_sums(placed)
        refused = (ALL_GATHER, REDUCE_SCATTER) if meets else (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
        if any(tensor.op in refused for tensor in with_steps(topological(placed.results))):
            raise _MeetsInLoopError(node)
        inputs = [*(part.tensor for part in parts[:ends]), *captured]
        placed = replace(placed, counted=body.counted)
        values = node.op.values_of(inputs, {**node.attributes, "body": placed})
        of_stacked = [replace(part.placement, axes=(None, *part.placement.axes)) for part in stacked]
        return [self._note(value, placement) for value, placement in zip(values, [*carried, *of_stacked], strict=True)]

    def _without_sums(self, body: Body) -> Body:
        new: dict[Tensor, Tensor] = {}
        for tensor in topological(body.results):
            inputs = [new[operand] for operand in tensor.inputs]
            new[tensor] = inputs[0] if tensor.op is ALL_REDUCE else tensor.with_inputs(inputs)
            if new[tensor] not in self.placements:
                self._note(new[tensor], self.placements[tensor])
        following, stacked = (tuple(new[tensor] for tensor in ends) for ends in (body.following, body.stacked))
        return replace(body, following=following, stacked=stacked)

    def _agreed(self, condition: Part) -> Part:
        """Return a condition that is true on all ranks if it is on any."""
        part = self._note(METHODS["cast"](condition.tensor, "int32"), condition.placement)
        for mesh in self._mesh:
            part = self._sent(ALL_REDUCE, part, part.placement, over="max", mesh=mesh)
        return self._note(METHODS["cast"](part.tensor, "bool"), part.placement)

    def _of_own_rows(self, part: Part, shape: Shape) -> Part:
        """Shard a part of a tensor of this traced shape along the first axis that counts rows, and nothing else."""
        axis = row_axis(shape)
        rows = None if axis is None else shape[axis]
        if axis is not None and part.placement.axes[axis] == BATCH and isinstance(part.tensor.shape[axis], Dim):
            rows = part.tensor.shape[axis]  # in the order that it is in
        return self._moved(part, _of_rows(shape), rows)

    def out_of_step(self, tensor: Tensor) -> Part:
        """Return a result of a loop's step, divided; it may stay a summand."""
        part = self._divided(self.parts[tensor])
        return self._whole(part) if part.placement.join == "max" else part


def _fixed_point(
    outer: _Placer,
    node: Node,
    begins: Sequence[Placement | None],
    shapes: Sequence[Shape],
    other_placements: Sequence[Placement],
    meets: bool,
) -> tuple[_Placer, list[Part], list[Placement], dict[Tensor, Tensor]]:
    """Return the placed body, its next carries, the carries' placements, and the placed body's leaf for each leaf."""
    body, assumed, assumed_shapes = body_of(node), list(begins), list(shapes)
    for _ in range(_ROUNDS):
        inner, leaves = _Placer((), outer._layouts, (), None, (), outer._alone), dict[Tensor, Tensor]()
        for tensor, placement, shape in zip(
            body.placeholders, [*assumed, *other_placements], assumed_shapes, strict=True
        ):
            leaf = tensor if same_rows(shape, tensor.shape) else placeholder(shape, tensor.dtype, tensor.name)
            leaves[tensor] = leaf
            inner.parts[tensor] = inner._note(leaf, placement or Placement((None,) * tensor.ndim))
            if placement is None:
                inner._zeros.add(leaf)
        for value in topological(body.results):
            if value not in inner.parts:
                inner.add(value)
        following = [inner.out_of_step(tensor) for tensor in body.following]
        if meets:
            following = [inner._whole(part) for part in following]
        # Zeros that a step passes on would stay whole, but each rank has its rows of them.
        following = [
            inner._of_own_rows(part, tensor.shape) if begin is None and _is_whole(part, tensor) else part
            for begin, part, tensor in zip(begins, following, body.following, strict=True)
        ]
        placements, next_shapes = [part.placement for part in following], [part.tensor.shape for part in following]
        if placements == assumed and all(map(same_rows, next_shapes, assumed_shapes)):
            outer.needs_all_rows |= inner.needs_all_rows
            return inner, following, placements, leaves
        assumed, assumed_shapes[: len(next_shapes)] = list(placements), next_shapes
    raise _MeetsInLoopError(node)


def _is_whole(part: Part, tensor: Tensor) -> bool:
    """Whether all ranks have all rows of the tensor."""
    return row_axis(tensor.shape) is not None and not part.placement.partial and BATCH not in part.placement.axes


def _of_first_rows(shape: Shape) -> Shape:
    """Return the shape of a part that is sharded along the first axis that counts rows."""
    return tuple(n if axis == row_axis(shape) else as_numbers(n) for axis, n in enumerate(shape))


def _axes_of(rule: ShardingRule, tensor: Tensor) -> Iterator[tuple[str, int]]:
    for names, operand in zip((rule.output, *rule.inputs), (tensor, *tensor.inputs), strict=True):
        yield from zip(names, operand.shape, strict=True)


def _has_rows(rule: ShardingRule, tensor: Tensor, letter: str) -> bool:
    """Whether an operand has the letter, and elements along it."""
    axes = ((names.find(letter), operand.shape) for names, operand in zip(rule.inputs, tensor.inputs, strict=True))
    return any(axis >= 0 and (isinstance(shape[axis], Dim) or shape[axis] != 0) for axis, shape in axes)


def _bytes(tensor: Tensor) -> int:
    return size(tensor.shape) * tensor.dtype.itemsize


def _of_rows(shape: Shape) -> Axes:
    """Return the layout of inputs and outputs: `BATCH` shards the first axis that counts rows."""
    row = row_axis(shape)
    return tuple(BATCH if axis == row else None for axis in range(len(shape)))


def _rows(shape: Shape, axes: Axes) -> Dim | None:
    """Return the row count along the axis that `BATCH` shards, or None."""
    return next((n for n, mesh in zip(shape, axes, strict=True) if mesh == BATCH and isinstance(n, Dim)), None)


def _summand(tensor: Tensor) -> Placement:
    return Placement((None,) * tensor.ndim, (BATCH,))


def _is_summand(part: Part) -> bool:
    return bool(part.placement.partial) and part.placement.join == "sum" and not any(part.placement.axes)


def _puts_zeros(op: Op, beside: bool) -> bool:
    """Whether an op pads with zeros, or passes on zeros of operands that are not divided (`beside`)."""
    chooses = isinstance(op.lowering, Element) and bool(op.lowering.conditions)
    return isinstance(op.lowering, Insert | Scatter) or (beside and (chooses or isinstance(op.lowering, Join)))
