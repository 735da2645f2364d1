"""Keeps replicas equal: compares digests of their states and broadcasts rank 0's."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Snapshot
from dptrain.comm.base import Communicator
from dptrain.errors import AgreedError, ExitCode
from dptrain.program.sharding import messages
from dptrain.program.tensor import Variable

# Factor by which one of two distances is clearly greater.
_FARTHER = 10.0


def number_of(*parts: bytes | memoryview) -> int:
    """Return a 64-bit digest of pieces of bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def gathered(comm: Communicator, *numbers: int) -> npt.NDArray[np.uint64]:
    """Return every rank's numbers, (ranks, numbers), in one message. Collective."""
    return messages.gathered(np.array(numbers, np.uint64), comm)


def kind_of(variables: Sequence[Variable]) -> int:
    """Return a digest of the variables' paths, shapes and types."""
    kinds = [[variable._path, tuple(map(int, variable.shape)), variable.dtype.name] for variable in variables]
    return number_of(repr(kinds).encode())


def require_same_kind(comm: Communicator, variables: Sequence[Variable], kinds: npt.NDArray[np.uint64]) -> None:
    """Refuse models that differ, by every rank's `kind_of`. Collective if they do."""
    if (kinds != kinds[0]).any():
        facts: dict[str, Any] = {variable._path: [list(variable.shape), variable.dtype.name] for variable in variables}
        comm.require_same("the ranks have different models", facts | {"variables": len(variables)})


class Shared:
    """Variables that every rank has a copy of, in the same order."""

    def __init__(self, backend: Backend, comm: Communicator, variables: Sequence[Variable]) -> None:
        self.variables, self._comm = list(variables), comm
        self._snapshot: Snapshot = backend.snapshot(self.variables)
        self._kind = kind_of(self.variables)

    def give(self) -> None:
        """Broadcast rank 0's values if any rank's differ, in one message for each type. Collective."""
        digests = gathered(self._comm, self._kind, number_of(self._snapshot.digests()[:, 0].tobytes()))
        require_same_kind(self._comm, self.variables, digests[:, 0])
        if (digests == digests[0]).all():
            return
        self._require_same_adaptation()
        values = [variable.numpy() for variable in self.variables]
        flats = messages.concatenated(values)
        for flat in flats:
            self._comm.broadcast(flat)
        for variable, value in zip(self.variables, messages.separated(flats, values), strict=True):
            variable.assign(value)

    def _require_same_adaptation(self) -> None:
        """Refuse what `adapt` has computed from other data than rank 0's. Collective."""
        values = {
            variable._path: number_of(variable.numpy().tobytes()) for variable in self.variables if variable.of_data
        }
        everyone = self._comm.allgather(values)
        if any(everyone[0].get(path) != digest for adapted in everyone for path, digest in adapted.items()):
            facts = {
                variable._path: [np.round(variable.numpy(), 6).ravel()[:4].tolist()]
                for variable in self.variables
                if any(variable._path in adapted for adapted in everyone)
            }
            advice = dict.fromkeys(facts, "call adapt with the same data on every rank, or on rank 0 alone")
            self._comm.require_same("layers are adapted to different data", facts | {"checksum": values}, advice)


def deviating(facts: Sequence[Mapping[str, str]], away: Sequence[Mapping[str, float]]) -> dict[int, list[str]] | None:
    """Return the wrong values by rank; None if unknown.

    A majority is right. Without one, those ranks are wrong that are far farther than others from the result of
    repeating the same steps: a wrong value on one rank reaches the others, but only in its share of their sums.
    """
    wrong: dict[int, list[str]] = {}
    for name in _names(facts):
        values = {rank: digests[name] for rank, digests in enumerate(facts) if name in digests}
        right, count = Counter(values.values()).most_common(1)[0]
        if 2 * count > len(values):
            deviants = [rank for rank, value in values.items() if value != right]
        else:
            least = min((distances.get(name, 0.0) for distances in away), default=0.0)
            deviants = [rank for rank, distances in enumerate(away) if distances.get(name, 0.0) > _FARTHER * least]
            if not 0 < len(deviants) < len(values):
                return None
        for rank in deviants:
            wrong.setdefault(rank, []).append(name)
    return wrong


def refuse_difference(
    comm: Communicator, where: str, facts: Sequence[Mapping[str, str]], away: Sequence[Mapping[str, float]]
) -> None:
    """Raise on all ranks, with exit code 76, naming the deviating ranks and values. Collective."""
    processes, wrong = comm.allgather(comm.process), deviating(facts, away)
    if wrong:
        failures = [(rank, _listed(names)) for rank, names in sorted(wrong.items())]
        difference = "; ".join(f"rank {rank} ({processes[rank]}) from the others in {text}" for rank, text in failures)
    else:
        names = differing(facts)
        having = (rank for rank, digests in enumerate(facts) if not digests.keys().isdisjoint(names))
        ranks = " and ".join(f"{rank} ({processes[rank]})" for rank in having)
        failures = []
        difference = f"ranks {ranks} in {_listed(names)}; which of them are right is unknown"
    raise AgreedError(
        "training",
        ExitCode.DIVERGED,
        f"the replicas differ after {where}: {difference}. Either memory, a GPU or MPI has changed values, or code has "
        "changed the model or its optimizer on some ranks only",
        failures,
    )


def differing(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names whose values differ between the ranks."""
    return [name for name in _names(facts) if len({digests[name] for digests in facts if name in digests}) > 1]


def _names(facts: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for digests in facts for name in digests))


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
