"""Whether all ranks have the same state: compared by digests, and rank 0's given to all."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Snapshot
from dptrain.comm.base import Communicator
from dptrain.errors import AgreedError, ExitCode
from dptrain.program import messages
from dptrain.program.tensor import Variable

# Of two distances, the factor by which one is the greater beyond doubt.
_FARTHER = 10.0


def number_of(*parts: bytes | memoryview) -> int:
    """Return 64 bits that tell pieces of bytes apart."""
    digest = hashlib.blake2b(digest_size=8)
    for one in parts:
        digest.update(one)
    return int.from_bytes(digest.digest(), "little")


def gathered(comm: Communicator, *numbers: int) -> npt.NDArray[np.uint64]:
    """Return (ranks, numbers): every rank's. One message. Collective."""
    return messages.gathered(np.array(numbers, np.uint64), comm)


def kind_of(variables: Sequence[Variable]) -> int:
    """Return a number that tells models apart: by paths, shapes and types of their variables."""
    kinds = [[one.path, tuple(map(int, one.shape)), one.dtype.name] for one in variables]
    return number_of(repr(kinds).encode())


def require_same_kind(comm: Communicator, variables: Sequence[Variable], kinds: npt.NDArray[np.uint64]) -> None:
    """Refuse models that differ. Collective where they do.

    Args:
        comm: the ranks.
        variables: of this rank's.
        kinds: `kind_of` every rank's.

    Raises:
        AgreedError: the ranks have different variables.
    """
    if (kinds != kinds[0]).any():
        facts: dict[str, Any] = {one.path: [list(one.shape), one.dtype.name] for one in variables}
        comm.require_same("the ranks have different models", facts | {"variables": len(variables)})


class Shared:
    """Variables of which every rank has a copy.

    Args:
        backend: where they live from now on.
        comm: the ranks.
        variables: the same ones, in the same order, on all ranks.
    """

    def __init__(self, backend: Backend, comm: Communicator, variables: Sequence[Variable]) -> None:
        self.variables, self._comm = list(variables), comm
        self._snapshot: Snapshot = backend.snapshot(self.variables)
        self._kind = kind_of(self.variables)

    def give(self) -> None:
        """Let all ranks have rank 0's values: where any differs, they travel in a message for each type. Collective.

        Raises:
            AgreedError: the ranks have different variables.
        """
        found = gathered(self._comm, self._kind, number_of(self._snapshot.digests()[:, 0].tobytes()))
        require_same_kind(self._comm, self.variables, found[:, 0])
        if (found == found[0]).all():
            return
        values = [one.numpy() for one in self.variables]
        flats = messages.concatenated(values)
        for flat in flats:
            self._comm.broadcast(flat)
        for one, value in zip(self.variables, messages.separated(flats, values), strict=True):
            one.assign(value)


def deviating(facts: Sequence[Mapping[str, str]], away: Sequence[Mapping[str, float]]) -> dict[int, list[str]] | None:
    """Return which ranks have something else than they should have, and what; None where nobody can tell.

    What more than half of the ranks have is right. Where there is no such majority, those ranks are wrong that are far
    farther away than others from what the same steps have made when they were made again: a wrong value on one rank
    reaches the others, but in its share of their sums only.

    Args:
        facts: every rank's digests, by name; ranks that have a part of a sharded variable have it under a name of
            their own.
        away: how far each of them is from what it should be; empty if nobody knows.
    """
    wrong: dict[int, list[str]] = {}
    for name in _names(facts):
        values = {rank: one[name] for rank, one in enumerate(facts) if name in one}
        right, count = Counter(values.values()).most_common(1)[0]
        if 2 * count > len(values):
            found = [rank for rank, value in values.items() if value != right]
        else:
            least = min((one.get(name, 0.0) for one in away), default=0.0)
            found = [rank for rank, one in enumerate(away) if one.get(name, 0.0) > _FARTHER * least]
            if not 0 < len(found) < len(values):
                return None
        for rank in found:
            wrong.setdefault(rank, []).append(name)
    return wrong


def refuse_difference(
    comm: Communicator, where: str, facts: Sequence[Mapping[str, str]], away: Sequence[Mapping[str, float]]
) -> None:
    """End all ranks, naming those that deviate and in what. Collective.

    Args:
        comm: the ranks.
        where: "step 200 of epoch 1".
        facts: as `deviating`.
        away: as `deviating`.

    Raises:
        AgreedError: with exit code 76.
    """
    processes, wrong = comm.allgather(comm.process), deviating(facts, away)
    if wrong:
        failures = [(rank, _listed(names)) for rank, names in sorted(wrong.items())]
        found = "; ".join(f"rank {rank} ({processes[rank]}) from the others in {text}" for rank, text in failures)
    else:
        names = differing(facts)
        having = (rank for rank, own in enumerate(facts) if not own.keys().isdisjoint(names))
        ranks = " and ".join(f"{rank} ({processes[rank]})" for rank in having)
        failures = []
        found = f"ranks {ranks} in {_listed(names)}; which of them are right is not known"
    raise AgreedError(
        "training",
        ExitCode.DIVERGED,
        f"the replicas differ after {where}: {found}. Either memory, a GPU or MPI has changed values, or code has "
        "changed the model or its optimizer on some ranks only",
        failures,
    )


def differing(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of what is not the same on all ranks."""
    return [name for name in _names(facts) if len({one[name] for one in facts if name in one}) > 1]


def _names(facts: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for one in facts for name in one))


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
