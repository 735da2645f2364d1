"""Which sums over the ranks travel together: all that can be sent before any other has to be waited for."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError
from dptrain.program.placement import ALL_REDUCE, PlacedProgram
from dptrain.program.program import Program
from dptrain.program.shapes import size
from dptrain.program.tensor import Array, Tensor, placeholder


@dataclass(frozen=True)
class Stage:
    """What a rank does between two meetings with the others.

    Attributes:
        tensors: what it computes by itself, each after its inputs.
        messages: what it then sums with the others: all-reduces, of which each list is one message.
    """

    tensors: list[Tensor]
    messages: list[list[Tensor]]


def stages(program: Program) -> list[Stage]:
    """Return the stages of a program, in order; the last one ends without a message.

    A tensor belongs to the stage before which all messages have come that it needs. So a step whose all-reduces do not
    need each other has one message, however many gradients it sums; or several *buckets* of
    `PlacedProgram.bucket_bytes` at most, what is known first in the first: so a device can go on with the backward pass
    while a bucket travels.
    """
    stage: dict[int, int] = {}
    depth: dict[int, int] = {}  # how many ops lie behind a tensor
    alone: dict[int, list[Tensor]] = {}
    summed: dict[int, list[Tensor]] = {}
    for tensor in program.tensors:
        own = max((stage[id(one)] for one in tensor.inputs), default=0)
        depth[id(tensor)] = 1 + max((depth[id(one)] for one in tensor.inputs), default=0)
        if tensor.op is ALL_REDUCE:
            summed.setdefault(own, []).append(tensor)
            own += 1
        else:
            alone.setdefault(own, []).append(tensor)
        stage[id(tensor)] = own
    last = max(stage.values(), default=0)
    most = program.bucket_bytes if isinstance(program, PlacedProgram) else None
    return [
        Stage(alone.get(n, []), _together(sorted(summed.get(n, []), key=lambda one: depth[id(one)]), most))
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
    candidates = np.zeros((comm.size, flat.size), flat.dtype)  # each rank's in a row of its own
    candidates[comm.rank] = flat
    comm.allreduce_sum(candidates)
    candidates.max(axis=0, out=flat)


def split(program: PlacedProgram) -> tuple[Program, Program]:
    """Return what a step does before its one meeting with the other ranks, and what after it.

    The first program's outputs are what is summed, under names that are the second's inputs. All updates are the
    second's.

    Raises:
        ConfigError: there is more than one meeting, or what follows needs the rank's own rows again.
    """
    summed = [one for stage in stages(program) for message in stage.messages for one in message]
    known = {id(one): placeholder(one.shape, one.dtype, f"sum {number}") for number, one in enumerate(summed)}
    rebuilt = dict(known)
    for tensor in program.tensors:
        if id(tensor) not in rebuilt and tensor.op is not None:
            inputs = [rebuilt.get(id(one), one) for one in tensor.inputs]
            changed = any(new is not old for new, old in zip(inputs, tensor.inputs, strict=True))
            rebuilt[id(tensor)] = (
                Tensor(tensor.op, inputs, tensor.attributes, tensor.shape, tensor.dtype) if changed else tensor
            )
    before = Program(program.inputs, program.state, {f"sum {n}": one.inputs[0] for n, one in enumerate(summed)}, {})
    outputs = {name: rebuilt.get(id(one), one) for name, one in program.outputs.items()}
    updates = {variable: rebuilt.get(id(one), one) for variable, one in program.updates.items()}
    after = Program({one.name: one for one in known.values()}, program.state, outputs, updates)
    data = {id(one) for one in program.inputs.values()}
    again = any(id(one) in data for one in after.tensors)
    if (
        again
        or any(one.op is ALL_REDUCE for one in before.tensors)
        or any(one.attributes["over"] == "max" for one in summed)
    ):
        raise ConfigError(
            "a layer or loss of this model needs all samples of a batch at once: several shards a rank are not "
            "supported; leave train.shards_per_batch out, or make it the number of ranks"
        )
    return before, after


def all_reduced(before: Program, sums: dict[str, Array], comm: Communicator) -> dict[str, Array]:
    """Return the sums of `split`'s first program over the ranks, those of one type in one message."""
    found = dict(sums)
    for dtype in dict.fromkeys(one.dtype for one in sums.values()):
        names = [name for name, one in sums.items() if one.dtype == dtype]
        flat = np.concatenate([sums[name].reshape(-1) for name in names])
        all_reduce(flat, "sum", comm)
        pieces = np.split(flat, np.cumsum([sums[name].size for name in names])[:-1])
        found |= {name: piece.reshape(sums[name].shape) for name, piece in zip(names, pieces, strict=True)}
    return found
