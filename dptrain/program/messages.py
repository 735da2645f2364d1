"""Which sums over the ranks travel together: all that can be sent before any other has to be waited for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dptrain.comm.base import Communicator, pack, unpack
from dptrain.comm.node_sum import TreeSum
from dptrain.errors import ConfigError
from dptrain.program.mesh import ALL_REDUCE, PlacedProgram
from dptrain.program.passes import rewritten
from dptrain.program.program import Program
from dptrain.program.shapes import size
from dptrain.program.tensor import Array, Tensor, placeholder

# Bytes of a subtree that ranks exchange at a time: the memory it takes is this times the subtrees of all ranks.
_GATHERED = 1 << 20


@dataclass(frozen=True, eq=False)
class Stage:
    """What a rank does between two sync points with the others.

    Attributes:
        tensors: what it computes by itself, each after its inputs.
        messages: what it then sums with the others: all-reduces, of which each list is one message.
    """

    tensors: list[Tensor]
    messages: list[list[Tensor]]

    @property
    def order(self) -> list[Tensor]:
        """What it computes, and then what it sums."""
        return [*self.tensors, *(one for message in self.messages for one in message)]


def stages(program: Program) -> list[Stage]:
    """Return the stages of a program, in order; the last one ends without a message.

    A tensor belongs to the stage before which all messages have come that it needs. So a step whose all-reduces do not
    need each other has one message, however many gradients it sums; or several *buckets* of
    `PlacedProgram.bucket_bytes` at most, what is known first in the first: so a device can go on with the backward pass
    while a bucket travels.

    Raises:
        ConfigError: variables are sharded.
    """
    if isinstance(program, PlacedProgram) and program.layouts:
        names = ", ".join(repr(one.path) for one in program.layouts)
        raise ConfigError(f"not supported: executing a program whose variables are sharded: {names}")
    stage: dict[Tensor, int] = {}
    depth: dict[Tensor, int] = {}  # how many ops lie behind a tensor
    alone: dict[int, list[Tensor]] = {}
    summed: dict[int, list[Tensor]] = {}
    for tensor in program.tensors:
        own = max((stage[one] for one in tensor.inputs), default=0)
        depth[tensor] = 1 + max((depth[one] for one in tensor.inputs), default=0)
        if tensor.op is ALL_REDUCE:
            summed.setdefault(own, []).append(tensor)
            own += 1
        else:
            alone.setdefault(own, []).append(tensor)
        stage[tensor] = own
    last = max(stage.values(), default=0)
    most = program.bucket_bytes if isinstance(program, PlacedProgram) else None
    return [
        Stage(alone.get(n, []), _together(sorted(summed.get(n, []), key=lambda one: depth[one]), most))
        for n in range(last + 1)
    ]


def _together(reductions: Iterable[Tensor], most: int | None) -> list[list[Tensor]]:
    """Return all-reduces by the messages that they fit into: of one type, of one kind, and of so many bytes at most."""
    found: dict[tuple[str, str], list[list[Tensor]]] = {}
    for one in reductions:
        buckets = found.setdefault((one.attributes["over"], one.dtype.name), [[]])
        held = sum(size(other.shape) for other in buckets[-1]) * one.dtype.itemsize
        if most is not None and buckets[-1] and held + size(one.shape) * one.dtype.itemsize > most:
            buckets.append([])
        buckets[-1].append(one)
    return [bucket for buckets in found.values() for bucket in buckets]


def count(program: PlacedProgram) -> int:
    """Return how many messages one execution sends."""
    return sum(len(stage.messages) for stage in stages(program))


def all_reduce(flat: Array, over: str, comm: Communicator) -> None:
    """Replace a flat array by its sum over the ranks, or by the greatest of each element."""
    if over == "sum":
        comm.allreduce_sum(flat)
        return
    gathered(flat, comm).max(axis=0, out=flat)


def gathered(flat: Array, comm: Communicator) -> Array:
    """Return every rank's flat array as (ranks, elements), in one message. Collective."""
    found = np.zeros((comm.size, flat.size), flat.dtype)
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
        shards: of all ranks, dealt out as `dptrain.data.parts.cut` does.
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
    second's.

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
