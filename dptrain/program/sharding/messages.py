"""When ranks meet, and what travels together: all that can be sent before any other message has to be waited for."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain.comm.base import Communicator, pack, unpack
from dptrain.comm.mesh import BATCH
from dptrain.comm.node_sum import TreeSum
from dptrain.errors import ConfigError
from dptrain.program.lowering import Element
from dptrain.program.passes import rewritten
from dptrain.program.program import Program
from dptrain.program.shapes import is_one, row_axis, size
from dptrain.program.sharding.mesh import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, PlacedProgram
from dptrain.program.tensor import Array, Tensor, placeholder

# Bytes of a subtree that ranks exchange at a time: the memory it takes is this times the subtrees of all ranks.
_GATHERED = 1 << 20


# What travels between ranks; see `mesh`.
SENT = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)
# Beside the largest gather of a program a message of gathers may have so much of it more.
_BESIDE = 1.25
# From so many bytes on a message costs less than the copies that let one travel with others.
_LARGE = 1 << 20


@dataclass(frozen=True, eq=False)
class Stage:
    """What a rank does between two sync points with the others.

    Attributes:
        tensors: what it computes by itself, each after its inputs.
        messages: what it then gets from the others: tensors of one of the ops `SENT`, of which each list is one
            message.
    """

    tensors: list[Tensor]
    messages: list[list[Tensor]]

    @property
    def order(self) -> list[Tensor]:
        """What it computes, and then what it gets."""
        return [*self.tensors, *(one for message in self.messages for one in message)]


def stages(program: Program) -> list[Stage]:
    """Return the stages of a program, in order; the last one ends without a message.

    A tensor belongs to the stage before which all messages have come that it needs. So a step whose all-reduces do not
    need each other has one message, however many gradients it sums; or several *buckets* of
    `PlacedProgram.bucket_bytes` at most, what is known first in the first: so a device can go on with the backward pass
    while a bucket travels. Gathers are sent as late as they can be, see `levels`.

    Raises:
        ConfigError: variables are sharded, and the program is not yet that of one rank.
    """
    if isinstance(program, PlacedProgram) and program.layouts:
        names = ", ".join(repr(one._path) for one in program.layouts)
        raise ConfigError(f"a program whose variables are sharded is to be localized before it is executed: {names}")
    level, sent = levels(program)
    depth: dict[Tensor, int] = {}  # how many ops lie behind a tensor
    alone: dict[int, list[Tensor]] = {}
    travels: dict[int, list[Tensor]] = {}
    for tensor in program.tensors:
        depth[tensor] = 1 + max((depth[one] for one in tensor.inputs), default=0)
        if tensor in sent:
            travels.setdefault(sent[tensor], []).append(tensor)
        else:
            alone.setdefault(level[tensor], []).append(tensor)

    def order(one: Tensor) -> int:
        number: int = one.attributes.get("number", depth[one])
        return number

    last = max(level.values(), default=0)
    most = program.bucket_bytes if isinstance(program, PlacedProgram) else None
    return [Stage(alone.get(n, []), _together(sorted(travels.get(n, []), key=order), most)) for n in range(last + 1)]


def levels(program: Program) -> tuple[dict[Tensor, int], dict[Tensor, int]]:
    """Return the stage in which each tensor is there, and of what travels also the one at whose end it is sent.

    Sums are sent as soon as they can be. A gather is sent just before the first reader needs it, so that gathered
    weights do not all lie in memory at once: with what else is gathered then, up to about the largest gather. Layers
    take turns by themselves; updates that gather something, as Muon's, are made to. Programs of a mesh's ranks say the
    stage themselves, see `local.scheduled`. Elements of what is there from the beginning wait for their first reader
    too: an optimizer's decayed weights and slots would lie in memory throughout the backward pass.
    """
    tensors = program.tensors
    level: dict[Tensor, int] = {}
    sent: dict[Tensor, int] = {}
    ready: dict[Tensor, int] = {}  # of gathers that nobody has read so far
    behind: dict[Tensor, Tensor] = {}  # the gather that a tensor is, or that is read through it
    most = _BESIDE * max((_bytes(one) for one in tensors if one.op is ALL_GATHER), default=0)
    gathered: dict[int, float] = {}  # bytes of those that are sent at a stage's end
    for_updates: dict[int, float] = {}  # bytes of those that could be sent earlier and have no rows of the batch

    def turn(gather: Tensor) -> int:
        """Return the stage from which on a gather can be sent: of those that updates read, not too many at a time."""
        at, nbytes = ready[gather], _bytes(gather)
        if at > 0 and row_axis(gather.shape) is None:
            while at in for_updates and for_updates[at] + nbytes > max(most, _LARGE):
                at += 1
            for_updates[at] = for_updates.get(at, 0) + nbytes
        return at

    def send(gather: Tensor, wanted: int) -> None:
        at, nbytes = max(wanted, ready.pop(gather)), _bytes(gather)
        if at - 1 in gathered and level_of(gather.inputs) <= at - 1 and gathered[at - 1] + nbytes <= most:
            at -= 1
        gathered[at] = gathered.get(at, 0) + nbytes
        sent[gather], level[gather] = at, at + 1

    def level_of(inputs: Iterable[Tensor]) -> int:
        found = 0
        for one in inputs:
            gather = behind.get(one)
            found = max(found, level[one if gather is None else gather])
        return found

    for tensor in tensors:
        waiting = [gather for one in tensor.inputs if (gather := behind.get(one)) in ready and gather is not None]
        if waiting and is_read_through(tensor):
            behind[tensor] = waiting[0]
            continue
        others = [one for one in tensor.inputs if behind.get(one) not in ready]
        for gather in dict.fromkeys(waiting):
            send(gather, max(level_of(others), turn(gather)))
        own = level_of(tensor.inputs)
        if tensor.op in SENT and "stage" in tensor.attributes:
            sent[tensor], level[tensor] = tensor.attributes["stage"], tensor.attributes["stage"] + 1
        elif tensor.op is ALL_GATHER:
            ready[tensor], behind[tensor] = own, tensor
        elif tensor.op in SENT:
            sent[tensor], level[tensor] = own, own + 1
        else:
            level[tensor] = own
            if is_read_through(tensor) and tensor.inputs[0] in behind:
                behind[tensor] = behind[tensor.inputs[0]]
    for gather in list(ready):
        send(gather, 0)
    for tensor, gather in behind.items():
        level[tensor] = level[gather]
    _wait_for_readers(program, level, sent)
    return level, sent


def _wait_for_readers(program: Program, level: dict[Tensor, int], sent: Mapping[Tensor, int]) -> None:
    """Put elements of what is there from the beginning into the first stage that reads them."""
    waits: set[Tensor] = set()
    for tensor in program.tensors:
        of_elements = tensor.op is not None and (tensor.op.is_view or isinstance(tensor.op.lowering, Element))
        if of_elements and tensor.inputs and all(one.op is None or one in waits for one in tensor.inputs):
            waits.add(tensor)
    first = dict.fromkeys(program.results, max(level.values(), default=0))
    for tensor in reversed(program.tensors):
        if tensor in waits:
            level[tensor] = first[tensor]
        at = sent.get(tensor, level[tensor])
        for one in tensor.inputs:
            first[one] = min(first.get(one, at), at)


def is_read_through(tensor: Tensor) -> bool:
    """Whether a tensor is what it is made of in another order or type: who reads it is who needs that."""
    op = tensor.op
    return op is not None and (op.is_view or (isinstance(op.lowering, Element) and op.lowering.converts))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of what travels, as a whole: the same number on all ranks."""
    elements: int = tensor.attributes.get("whole") or size(tensor.shape)
    return elements * tensor.dtype.itemsize


def _together(sent: Iterable[Tensor], most: int | None) -> list[list[Tensor]]:
    """Return what travels by the messages that it fits into: of one type, of one kind, and of so many bytes at most."""
    found: dict[tuple[Any, ...], list[list[Tensor]]] = {}
    for one in sent:
        about = one.attributes
        key = one.op, about.get("mesh", BATCH), about.get("over"), one.dtype.name
        buckets = found.setdefault(key, [[]])
        if one.op is not ALL_REDUCE and _bytes(one) >= _LARGE and is_contiguous([one]):
            buckets.insert(0, [one])  # as it lies, without a copy
            continue
        held = sum(map(_bytes, buckets[-1]))
        if most is not None and buckets[-1] and held + _bytes(one) > most:
            buckets.append([])
        buckets[-1].append(one)
    return [bucket for buckets in found.values() for bucket in buckets if bucket]


def count(program: PlacedProgram) -> int:
    """Return how many messages one execution sends."""
    return sum(len(stage.messages) for stage in stages(program))


def exchange(message: Sequence[Tensor], parts: Sequence[Array], out: Sequence[Array], comm: Communicator) -> None:
    """Send a message of reduce-scatters or of gathers, and put what comes into `out`. Collective.

    Args:
        message: of one kind, one type, and along one axis of the mesh.
        parts: what each of them takes, contiguous.
        out: what each of them makes, contiguous.
        comm: the ranks, as a mesh.
    """
    first, group = message[0], comm.along(message[0].attributes["mesh"])
    gathers = first.op is ALL_GATHER
    counts = [counts_of(one, whole.shape) for one, whole in zip(message, out if gathers else parts, strict=True)]
    totals = [sum(own) for own in zip(*counts, strict=True)]
    if gathers:
        flat = _flat(parts)
        whole = out[0].reshape(-1) if is_contiguous(message) else np.empty(sum(totals), flat.dtype)
        group.all_gather(flat, whole, totals)
        if not is_contiguous(message):
            _cut_up(whole, message, out, counts)
        return
    whole = parts[0].reshape(-1) if is_contiguous(message) else np.empty(sum(totals), first.dtype)
    if not is_contiguous(message):
        _lined_up(whole, message, parts, counts)
    mine = out[0].reshape(-1) if len(out) == 1 else np.empty(totals[group.rank], first.dtype)
    group.reduce_scatter(whole, mine, totals, first.attributes["over"])
    if len(out) > 1:
        ends = np.cumsum([one.size for one in out])
        for one, own in zip(out, np.split(mine, ends[:-1]), strict=True):
            np.copyto(one, own.reshape(one.shape))


def whole_of(part: Array, axis: int, counts: Sequence[int], comm: Communicator) -> Array:
    """Return an array of which each rank has a part along an axis. Collective.

    Args:
        part: this rank's.
        axis: as above.
        counts: lengths of the ranks' parts along it.
        comm: these ranks.
    """
    first = np.ascontiguousarray(np.moveaxis(part, axis, 0))
    beside = size(first.shape[1:])
    whole = np.empty((sum(counts), *first.shape[1:]), part.dtype)
    comm.all_gather(first.reshape(-1), whole.reshape(-1), [n * beside for n in counts])
    return np.ascontiguousarray(np.moveaxis(whole, 0, axis))


def counts_of(tensor: Tensor, whole: Sequence[int]) -> list[int]:
    """Return the elements of each rank's part of what travels, of which the whole has this shape."""
    axis = tensor.attributes["axis"]
    beside = math.prod([*whole[:axis], *whole[axis + 1 :]])
    return [n * beside for n in tensor.attributes["counts"]]


def is_contiguous(message: Sequence[Tensor]) -> bool:
    """Whether what travels is one tensor, of which each rank's part lies behind that of the rank before it."""
    return len(message) == 1 and all(map(is_one, message[0].shape[: message[0].attributes["axis"]]))


def _flat(parts: Sequence[Array]) -> Array:
    return parts[0].reshape(-1) if len(parts) == 1 else np.concatenate([one.reshape(-1) for one in parts])


def layout(message: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield each rank's part of each tensor, in the order in which they travel.

    Args:
        message: the tensors.
        counts: of each of them, the elements of each rank's part.

    Yields:
        The tensor's number; at which element the part begins in the message; where along the tensor's axis it begins,
        and its length there.
    """
    start = 0
    for rank in range(len(counts[0])):
        for number, (one, own) in enumerate(zip(message, counts, strict=True)):
            lengths = one.attributes["counts"]
            yield number, start, sum(lengths[:rank]), lengths[rank]
            start += own[rank]


def _pieces(
    flat: Array, message: Sequence[Tensor], wholes: Sequence[Array], counts: Sequence[Sequence[int]]
) -> Iterator[tuple[Array, Array]]:
    """Yield each rank's part of each tensor: where it lies in `flat`, and in the tensor."""
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
    """Replace a flat array by its sum over the ranks, or by the greatest of each element."""
    if over == "sum":
        comm.allreduce_sum(flat)
        return
    gathered(flat, comm).max(axis=0, out=flat)


def gathered(flat: Array, comm: Communicator) -> Array:
    """Return every rank's flat array as (ranks, elements), in one message. Collective."""
    found = np.full((comm.size, flat.size), -0.0, flat.dtype)  # what changes no number, -0 neither
    found[comm.rank] = flat
    comm.allreduce_sum(found)
    return found


def all_reduced(parts: Sequence[Array], comm: Communicator | None, over: str = "sum") -> list[Array]:
    """Return the sums of arrays over the ranks, or the greatest of each element; those of one type are one message."""
    if comm is None or comm.size == 1:
        return list(parts)
    flats = concatenated(parts)
    for flat in flats:
        all_reduce(flat, over, comm)
    return separated(flats, parts)


def tree_reduced(tree: TreeSum, shards: int, comm: Communicator | None) -> list[Array]:
    """Return the sums of arrays over all shards of a batch, whose bits are the same on any number of ranks. Collective.

    Args:
        tree: of this rank's shards, a contiguous run that begins where that of the rank before it ends.
        shards: of all ranks, dealt out as `dptrain.comm.parts.cut` does.
        comm: the ranks.
    """
    if comm is None or comm.size == 1:
        return tree.total()
    like = tree.subtrees[0][1]
    subtrees = [(summands, concatenated(arrays)) for summands, arrays in tree.subtrees]
    each, rest = divmod(shards, comm.size)
    whole = rest == 0 and each.bit_count() == 1  # every rank has one subtree, all of the same size
    sums: list[Array] = []
    for number, flat in enumerate(subtrees[0][1]):
        if whole and comm.sums_in_a_tree(flat.nbytes):
            comm.allreduce_sum(flat)
            sums.append(flat)
        else:
            sums.append(_gathered_sum([(summands, flats[number]) for summands, flats in subtrees], comm))
    return separated(sums, like)


def _gathered_sum(subtrees: Sequence[tuple[int, Array]], comm: Communicator) -> Array:
    """Return the sum of all ranks' subtrees, (number of summands, flat array) each, after exchanging them."""
    total = np.empty_like(subtrees[0][1])
    sizes = [summands for summands, _ in subtrees]
    step = _GATHERED // total.itemsize
    for start in range(0, total.size, step):
        piece = slice(start, start + step)
        own = pack(sizes, b"".join(flat[piece].tobytes() for _, flat in subtrees))
        tree = TreeSum()
        for rank, message in enumerate(comm.allgather_bytes(own)):
            mail = unpack(rank, message)
            rows = np.frombuffer(mail.content, total.dtype).reshape(len(mail.fact), -1)
            for summands, row in zip(mail.fact, rows, strict=True):
                tree.add([row], summands)
        total[piece] = tree.total()[0]
    return total


def _by_type(arrays: Sequence[Array]) -> list[list[int]]:
    return [[n for n, one in enumerate(arrays) if one.dtype == kind] for kind in dict.fromkeys(a.dtype for a in arrays)]


def concatenated(arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays of each type one after the other, in flat copies."""
    return [np.concatenate([arrays[n].reshape(-1) for n in alike]) for alike in _by_type(arrays)]


def separated(flats: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Return the arrays, shaped like these, that were joined."""
    found = list(like)
    for flat, alike in zip(flats, _by_type(like), strict=True):
        ends = np.cumsum([like[n].size for n in alike])
        for n, piece in zip(alike, np.split(flat, ends[:-1]), strict=True):
            found[n] = piece.reshape(like[n].shape)
    return found


def split(program: PlacedProgram) -> tuple[Program, Program]:
    """Return what a step does before its one sync point with the other ranks, and what after it.

    The first program's outputs are what is summed, under names that are the second's inputs. All updates are the
    second's. All variables are replicated.

    Raises:
        ConfigError: there is more than one sync point, or what follows needs the rank's own rows again.
    """
    summed = [one for stage in stages(program) for message in stage.messages for one in message]
    known = {one: placeholder(one.shape, one.dtype, f"sum {number}") for number, one in enumerate(summed)}
    sums = {f"sum {n}": one.inputs[0] for n, one in enumerate(summed)}
    before = Program(program.inputs, program.state, sums, {}, rows=program.rows)
    rest = rewritten(program, lambda one: known.get(one, one))
    after = Program(
        {one.name: one for one in known.values()}, program.state, rest.outputs, rest.updates, rows=program.rows
    )
    data = set(program.inputs.values())
    again = any(one in data for one in after.tensors)
    if (
        again
        or any(one.op is ALL_REDUCE for one in before.tensors)
        or any(one.attributes["over"] == "max" for one in summed)
    ):
        raise ConfigError(
            "a layer or loss of this model needs all samples of a batch at once: a fixed number of shards is not "
            "supported; leave train.shards_per_batch and --reproducible out"
        )
    return before, after
