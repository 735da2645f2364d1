"""Sync points of ranks, and the messages there: everything that can be sent without waiting for another message."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dptrain.comm.base import Communicator, pack, unpack
from dptrain.comm.mesh import BATCH
from dptrain.comm.node_sum import TreeSum
from dptrain.errors import ConfigError
from dptrain.program.body import with_steps
from dptrain.program.lowering import Element
from dptrain.program.passes import rewritten
from dptrain.program.program import Program
from dptrain.program.shapes import is_one, row_axis, size
from dptrain.program.sharding.mesh import ALL_GATHER, ALL_REDUCE, ALL_ROWS, REDUCE_SCATTER, PlacedProgram
from dptrain.program.tensor import Array, Tensor, placeholder

# Bytes of a subtree that ranks exchange at a time; the memory is this times the subtrees of all ranks.
_GATHERED = 1 << 20


# Ops that send data between ranks; see `mesh`.
SENT = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)
# Largest message of gathers, relative to a program's largest gather.
_BESIDE = 1.25
# From so many bytes on a separate message costs less than the copies to join others.
_LARGE = 1 << 20


@dataclass(frozen=True, eq=False)
class Stage:
    """Tensors computed between two sync points, and the messages that follow, each a list of collectives."""

    tensors: list[Tensor]
    messages: list[list[Tensor]]

    @property
    def order(self) -> list[Tensor]:
        """Computed tensors, then received ones."""
        return [*self.tensors, *(tensor for message in self.messages for tensor in message)]


def stages(program: Program) -> list[Stage]:
    """Cut a program into stages; the last one ends without a message.

    A tensor belongs to the first stage at which all messages that it needs have arrived. So a step whose all-reduces
    are independent has one message, however many gradients it sums; or several *buckets* of at most
    `PlacedProgram.bucket_bytes`, earliest first, so that a device can go on with the backward pass while a bucket
    travels. Gathers are sent as late as possible, see `levels`.

    Raises:
        ConfigError: variables are sharded, and the program is not yet that of one rank.
    """
    if isinstance(program, PlacedProgram) and program.layouts:
        names = ", ".join(repr(variable._path) for variable in program.layouts)
        raise ConfigError(f"a program whose variables are sharded must be localized before it is executed: {names}")
    level, sent_at = levels(program)
    depth: dict[Tensor, int] = {}  # how many ops precede a tensor
    alone: dict[int, list[Tensor]] = {}
    travels: dict[int, list[Tensor]] = {}
    for tensor in program.tensors:
        depth[tensor] = 1 + max((depth[operand] for operand in tensor.inputs), default=0)
        if tensor in sent_at:
            travels.setdefault(sent_at[tensor], []).append(tensor)
        else:
            alone.setdefault(level[tensor], []).append(tensor)

    def order(tensor: Tensor) -> int:
        number: int = tensor.attributes.get("number", depth[tensor])
        return number

    last = max(level.values(), default=0)
    most = program.bucket_bytes if isinstance(program, PlacedProgram) else None
    return [Stage(alone.get(n, []), _together(sorted(travels.get(n, []), key=order), most)) for n in range(last + 1)]


def levels(program: Program) -> tuple[dict[Tensor, int], dict[Tensor, int]]:
    """Return the stage of each tensor, and for messages also the stage at whose end they are sent.

    Sums are sent as early as possible. A gather is sent just before its first reader, so that gathered weights are not
    all in memory at once: together with other gathers up to about the largest one. Layers take turns naturally; updates
    that gather, as Muon's, are made to. Placed programs have fixed stages, see `scheduled`.
    Elementwise ops on leaves wait for their first reader too: decayed weights and slots would otherwise stay in memory
    throughout the backward pass.
    """
    tensors = program.tensors
    level: dict[Tensor, int] = {}
    sent_at: dict[Tensor, int] = {}
    ready: dict[Tensor, int] = {}  # of gathers not yet read
    behind: dict[Tensor, Tensor] = {}  # the gather behind a tensor: itself or one read through it
    most = _BESIDE * max((_bytes(operand) for operand in tensors if operand.op is ALL_GATHER), default=0)
    gathered: dict[int, float] = {}  # bytes of gathers sent at a stage's end
    for_updates: dict[int, float] = {}  # bytes of gathers that could be sent earlier and have no rows of the batch

    def turn(gather: Tensor) -> int:
        """Return the earliest stage of a gather, with a limit on gathers that updates read at a time."""
        at, nbytes = ready[gather], _bytes(gather)
        if at > 0 and row_axis(gather.shape) is None:
            while at in for_updates and for_updates[at] + nbytes > max(most, _LARGE):
                at += 1
            for_updates[at] = for_updates.get(at, 0) + nbytes
        return at

    def send(gather: Tensor, reader_level: int) -> None:
        at, nbytes = max(reader_level, ready.pop(gather)), _bytes(gather)
        if at - 1 in gathered and level_of(gather.inputs) <= at - 1 and gathered[at - 1] + nbytes <= most:
            at -= 1
        gathered[at] = gathered.get(at, 0) + nbytes
        sent_at[gather], level[gather] = at, at + 1

    def level_of(inputs: Iterable[Tensor]) -> int:
        highest = 0
        for operand in inputs:
            gather = behind.get(operand)
            highest = max(highest, level[operand if gather is None else gather])
        return highest

    for tensor in tensors:
        pending = [
            gather for operand in tensor.inputs if (gather := behind.get(operand)) in ready and gather is not None
        ]
        if pending and is_read_through(tensor):
            behind[tensor] = pending[0]
            continue
        ready_operands = [operand for operand in tensor.inputs if behind.get(operand) not in ready]
        for gather in dict.fromkeys(pending):
            send(gather, max(level_of(ready_operands), turn(gather)))
        own_level = level_of(tensor.inputs)
        if tensor.op in SENT and "stage" in tensor.attributes:
            sent_at[tensor], level[tensor] = tensor.attributes["stage"], tensor.attributes["stage"] + 1
        elif tensor.op is ALL_GATHER:
            ready[tensor], behind[tensor] = own_level, tensor
        elif tensor.op in SENT:
            sent_at[tensor], level[tensor] = own_level, own_level + 1
        else:
            level[tensor] = own_level
            if is_read_through(tensor) and tensor.inputs[0] in behind:
                behind[tensor] = behind[tensor.inputs[0]]
    for gather in list(ready):
        send(gather, 0)
    for tensor, gather in behind.items():
        level[tensor] = level[gather]
    _wait_for_readers(program, level, sent_at)
    return level, sent_at


def _wait_for_readers(program: Program, level: dict[Tensor, int], sent_at: Mapping[Tensor, int]) -> None:
    """Move elementwise ops on leaves to the first stage that reads them."""
    deferred: set[Tensor] = set()
    for tensor in program.tensors:
        of_elements = tensor.op is not None and (tensor.op.is_view or isinstance(tensor.op.lowering, Element))
        if (
            of_elements
            and tensor.inputs
            and all(operand.op is None or operand in deferred for operand in tensor.inputs)
        ):
            deferred.add(tensor)
    first = dict.fromkeys(program.results, max(level.values(), default=0))
    for tensor in reversed(program.tensors):
        if tensor in deferred:
            level[tensor] = first[tensor]
        at = sent_at.get(tensor, level[tensor])
        for operand in tensor.inputs:
            first[operand] = min(first.get(operand, at), at)


def scheduled(program: PlacedProgram) -> PlacedProgram:
    """Fix stage and order of messages while all ranks have the same ops: later passes differ by rank and device."""
    _, sent_at = levels(program)
    ends = dict[Tensor, int]()  # how many ops precede a tensor
    for tensor in program.tensors:
        ends[tensor] = 1 + max((ends[read] for read in tensor.inputs), default=0)
    order = {
        tensor: number
        for number, tensor in enumerate(sorted(sent_at, key=lambda tensor: (sent_at[tensor], ends[tensor])))
    }
    new: dict[Tensor, Tensor] = {}
    for tensor in program.tensors:
        new[tensor] = tensor.with_inputs([new[read] for read in tensor.inputs])
        if tensor in sent_at:
            attributes = {**tensor.attributes, "stage": sent_at[tensor], "number": order[tensor]}
            new[tensor] = Tensor(
                tensor.op, new[tensor].inputs, attributes, tensor.shape, tensor.dtype, name=tensor.name
            )
    return replaced(program, new)


def replaced(program: PlacedProgram, new: Mapping[Tensor, Tensor]) -> PlacedProgram:
    """Return the program with other tensors for its own, which have their placements."""
    return replace(
        program,
        outputs={name: new[tensor] for name, tensor in program.outputs.items()},
        updates={variable: new[tensor] for variable, tensor in program.updates.items()},
        placements={new.get(tensor, tensor): placement for tensor, placement in program.placements.items()},
        weight_gradients={new.get(tensor, tensor): variable for tensor, variable in program.weight_gradients.items()},
    )


def is_read_through(tensor: Tensor) -> bool:
    """Whether a tensor is a view or conversion of its operand, so that its readers need that operand."""
    op = tensor.op
    return op is not None and (op.is_view or (isinstance(op.lowering, Element) and op.lowering.converts))


def _bytes(tensor: Tensor) -> int:
    elements: int = tensor.attributes.get("whole") or size(tensor.shape)
    return elements * tensor.dtype.itemsize


def _together(tensors: Iterable[Tensor], most: int | None) -> list[list[Tensor]]:
    """Group tensors into messages of one type, one kind and at most so many bytes."""
    buckets_of: dict[tuple[Any, ...], list[list[Tensor]]] = {}
    for tensor in tensors:
        attributes = tensor.attributes
        key = tensor.op, attributes.get("mesh", BATCH), attributes.get("over"), tensor.dtype.name
        buckets = buckets_of.setdefault(key, [[]])
        if tensor.op is not ALL_REDUCE and _bytes(tensor) >= _LARGE and is_contiguous([tensor]):
            buckets.insert(0, [tensor])  # in place, without a copy
            continue
        bucket_nbytes = sum(map(_bytes, buckets[-1]))
        if most is not None and buckets[-1] and bucket_nbytes + _bytes(tensor) > most:
            buckets.append([])
        buckets[-1].append(tensor)
    return [bucket for buckets in buckets_of.values() for bucket in buckets if bucket]


def count(program: PlacedProgram) -> int:
    """Return the number of messages of one execution."""
    return sum(len(stage.messages) for stage in stages(program))


def exchange(message: Sequence[Tensor], parts: Sequence[Array], out: Sequence[Array], comm: Communicator) -> None:
    """Send a message of reduce-scatters or gathers along a mesh axis, from `parts` into `out`. Collective."""
    first, group = message[0], comm.along(message[0].attributes["mesh"])
    gathers = first.op is ALL_GATHER
    counts = [counts_of(tensor, array.shape) for tensor, array in zip(message, out if gathers else parts, strict=True)]
    totals = [sum(sizes) for sizes in zip(*counts, strict=True)]
    if gathers:
        flat = _flat(parts)
        flat_whole = out[0].reshape(-1) if is_contiguous(message) else np.empty(sum(totals), flat.dtype)
        group.all_gather(flat, flat_whole, totals)
        if not is_contiguous(message):
            _cut_up(flat_whole, message, out, counts)
        return
    flat_whole = parts[0].reshape(-1) if is_contiguous(message) else np.empty(sum(totals), first.dtype)
    if not is_contiguous(message):
        _lined_up(flat_whole, message, parts, counts)
    mine = out[0].reshape(-1) if len(out) == 1 else np.empty(totals[group.rank], first.dtype)
    group.reduce_scatter(flat_whole, mine, totals, first.attributes["over"])
    if len(out) > 1:
        ends = np.cumsum([array.size for array in out])
        for array, flat_part in zip(out, np.split(mine, ends[:-1]), strict=True):
            np.copyto(array, flat_part.reshape(array.shape))


def whole_of(part: Array, axis: int, counts: Sequence[int], comm: Communicator) -> Array:
    """Gather an array of which each rank has a part along an axis, with these lengths. Collective."""
    first = np.ascontiguousarray(np.moveaxis(part, axis, 0))
    beside = size(first.shape[1:])
    gathered_array = np.empty((sum(counts), *first.shape[1:]), part.dtype)
    comm.all_gather(first.reshape(-1), gathered_array.reshape(-1), [n * beside for n in counts])
    return np.ascontiguousarray(np.moveaxis(gathered_array, 0, axis))


def counts_of(tensor: Tensor, whole_shape: Sequence[int]) -> list[int]:
    """Return the elements of each rank's part of a tensor of this whole shape."""
    axis = tensor.attributes["axis"]
    beside = math.prod([*whole_shape[:axis], *whole_shape[axis + 1 :]])
    return [n * beside for n in tensor.attributes["counts"]]


def is_contiguous(message: Sequence[Tensor]) -> bool:
    """Whether a message is a single tensor with the ranks' parts in order."""
    return len(message) == 1 and all(map(is_one, message[0].shape[: message[0].attributes["axis"]]))


def _flat(parts: Sequence[Array]) -> Array:
    return parts[0].reshape(-1) if len(parts) == 1 else np.concatenate([part.reshape(-1) for part in parts])


def layout(message: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield each tensor's part of each rank in message order: tensor, first element, begin along its axis, length."""
    start = 0
    for rank in range(len(counts[0])):
        for number, (tensor, part_counts) in enumerate(zip(message, counts, strict=True)):
            lengths = tensor.attributes["counts"]
            yield number, start, sum(lengths[:rank]), lengths[rank]
            start += part_counts[rank]


def _pieces(
    flat: Array, message: Sequence[Tensor], wholes: Sequence[Array], counts: Sequence[Sequence[int]]
) -> Iterator[tuple[Array, Array]]:
    """Yield each rank's part of each tensor as a view of `flat` and a view of the tensor."""
    for number, start, begin, length in layout(message, counts):
        part = wholes[number][(slice(None),) * message[number].attributes["axis"] + (slice(begin, begin + length),)]
        yield flat[start : start + part.size].reshape(part.shape), part


def _lined_up(flat: Array, message: Sequence[Tensor], wholes: Sequence[Array], counts: Sequence[Sequence[int]]) -> None:
    for place, part in _pieces(flat, message, wholes, counts):
        np.copyto(place, part)


def _cut_up(flat: Array, message: Sequence[Tensor], wholes: Sequence[Array], counts: Sequence[Sequence[int]]) -> None:
    for place, part in _pieces(flat, message, wholes, counts):
        np.copyto(part, place)


def all_reduce(flat: Array, over: str, comm: Communicator) -> None:
    """Replace a flat array by its sum, or elementwise maximum, over the ranks."""
    if over == "sum":
        comm.allreduce_sum(flat)
        return
    gathered(flat, comm).max(axis=0, out=flat)


def gathered(flat: Array, comm: Communicator) -> Array:
    """Return every rank's flat array as (ranks, elements), in one message. Collective."""
    by_rank = np.full((comm.size, flat.size), -0.0, flat.dtype)  # adding -0 changes no number, not even -0
    by_rank[comm.rank] = flat
    comm.allreduce_sum(by_rank)
    return by_rank


def all_reduced(parts: Sequence[Array], comm: Communicator | None, over: str = "sum") -> list[Array]:
    """Return the sums, or elementwise maxima, of arrays over the ranks; one message for each type."""
    if comm is None or comm.size == 1:
        return list(parts)
    flats = concatenated(parts)
    for flat in flats:
        all_reduce(flat, over, comm)
    return separated(flats, parts)


def tree_reduced(tree: TreeSum, shards: int, comm: Communicator | None) -> list[Array]:
    """Sum arrays over all shards (this rank's are in `tree`), the same bits on any number of ranks. Collective."""
    if comm is None or comm.size == 1:
        return tree.total()
    like = tree.subtrees[0][1]
    subtrees = [(summands, concatenated(arrays)) for summands, arrays in tree.subtrees]
    shards_per_rank, remainder = divmod(shards, comm.size)
    is_one_subtree = (
        remainder == 0 and shards_per_rank.bit_count() == 1
    )  # every rank has one subtree, all of the same size
    sums: list[Array] = []
    for number, flat in enumerate(subtrees[0][1]):
        if is_one_subtree and comm.sums_in_a_tree(flat.nbytes):
            comm.allreduce_sum(flat)
            sums.append(flat)
        else:
            sums.append(_gathered_sum([(summands, flats[number]) for summands, flats in subtrees], comm))
    return separated(sums, like)


def _gathered_sum(subtrees: Sequence[tuple[int, Array]], comm: Communicator) -> Array:
    """Exchange subtrees, (number of summands, flat array) each, and sum them."""
    total = np.empty_like(subtrees[0][1])
    sizes = [summands for summands, _ in subtrees]
    step = _GATHERED // total.itemsize
    for start in range(0, total.size, step):
        span = slice(start, start + step)
        packed = pack(sizes, b"".join(flat[span].tobytes() for _, flat in subtrees))
        tree = TreeSum()
        for rank, message in enumerate(comm.allgather_bytes(packed)):
            mail = unpack(rank, message)
            rows = np.frombuffer(mail.content, total.dtype).reshape(len(mail.fact), -1)
            for summands, row in zip(mail.fact, rows, strict=True):
                tree.add([row], summands)
        total[span] = tree.total()[0]
    return total


def _by_type(arrays: Sequence[Array]) -> list[list[int]]:
    return [
        [n for n, array in enumerate(arrays) if array.dtype == kind] for kind in dict.fromkeys(a.dtype for a in arrays)
    ]


def concatenated(arrays: Sequence[Array]) -> list[Array]:
    """Concatenate the arrays of each type into flat copies."""
    return [np.concatenate([arrays[n].reshape(-1) for n in numbers]) for numbers in _by_type(arrays)]


def separated(flats: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Split flat arrays into arrays like those that were concatenated."""
    arrays = list(like)
    for flat, numbers in zip(flats, _by_type(like), strict=True):
        ends = np.cumsum([like[n].size for n in numbers])
        for n, part in zip(numbers, np.split(flat, ends[:-1]), strict=True):
            arrays[n] = part.reshape(like[n].shape)
    return arrays


def split(program: PlacedProgram) -> tuple[Program, Program]:
    """Split a step at its one sync point with the other ranks.

    The first program's outputs are to be summed, and have the names of the second's inputs. The second has all updates.
    All variables are replicated.

    Raises:
        ConfigError: there is more than one sync point, or the second program needs the rank's own rows again.
    """
    summed = [tensor for stage in stages(program) for message in stage.messages for tensor in message]
    placeholders = {
        tensor: placeholder(tensor.shape, tensor.dtype, f"sum {number}") for number, tensor in enumerate(summed)
    }
    sums = {f"sum {n}": tensor.inputs[0] for n, tensor in enumerate(summed)}
    before = Program(program.inputs, program.state, sums, {}, rows=program.rows)
    rewritten_program = rewritten(program, lambda tensor: placeholders.get(tensor, tensor))
    after = Program(
        {tensor.name: tensor for tensor in placeholders.values()},
        program.state,
        rewritten_program.outputs,
        rewritten_program.updates,
        rows=program.rows,
    )
    data = set(program.inputs.values())
    reads_data_again = any(tensor in data for tensor in after.tensors)
    if (
        reads_data_again
        or any(tensor.op in (ALL_REDUCE, ALL_ROWS) for tensor in with_steps(before.tensors))
        or any(tensor.attributes["over"] == "max" for tensor in summed)
    ):
        raise ConfigError(
            "a layer or loss of this model needs the whole batch at once: a fixed number of shards is not supported; "
            "leave train.shards_per_batch and --reproducible out"
        )
    return before, after
