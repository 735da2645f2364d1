"""Which sums over the ranks travel together: all that can be sent before any other has to be waited for."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.program.placement import ALL_REDUCE, PlacedProgram
from dptrain.program.program import Program
from dptrain.program.tensor import Array, Tensor


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
    need each other has one message, however many gradients it sums.
    """
    stage: dict[int, int] = {}
    alone: dict[int, list[Tensor]] = {}
    summed: dict[int, list[Tensor]] = {}
    for tensor in program.tensors:
        own = max((stage[id(one)] for one in tensor.inputs), default=0)
        if tensor.op is ALL_REDUCE:
            summed.setdefault(own, []).append(tensor)
            own += 1
        else:
            alone.setdefault(own, []).append(tensor)
        stage[id(tensor)] = own
    last = max(stage.values(), default=0)
    return [Stage(alone.get(n, []), _together(summed.get(n, []))) for n in range(last + 1)]


def _together(reductions: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return all-reduces by the messages that they fit into: of one type, and of one kind."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    for one in reductions:
        found.setdefault((one.attributes["over"], one.dtype.name), []).append(one)
    return list(found.values())


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
