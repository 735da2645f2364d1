"""The abstract communicator of a group of ranks.

Buffers, not pickles: arrays travel as they are in memory, small facts as bytes. Every method is a collective unless it
says otherwise: all ranks call the same ones in the same order.
"""

import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain.comm.node import NodeMessages, reduced, rounds
from dptrain.errors import AgreedError, DptrainError, ExitCode
from dptrain.registry.serialization import plain
from dptrain.runtime.failure import exit_code_of, phase

T = TypeVar("T")
Array = npt.NDArray[Any]

# How many differing facts a message shows.
_SHOWN = 3
# Elements of all ranks' parts that a reduce-scatter takes at a time; it needs twice as much memory besides.
_SCATTERED = 1 << 20


class Mail(NamedTuple):
    """A message received from a rank."""

    source: int  # the sender
    fact: Any  # any JSON value
    content: bytes  # bytes beside it


class PointToPoint(ABC):
    """Point-to-point transfers of arrays between ranks of a group, in an order known to all of them.

    That order is a clock: its ticks say when a rank waits for what, so that hang detection can tell the late rank from
    those that wait for it. Not collective, except that every rank of the group creates and finishes one.
    """

    on_device = False  # whether arrays are a device's, where what is queued after `send` and `receive` runs after them

    @abstractmethod
    def send(self, rank: int, array: Any, tag: int) -> None:
        """Send a contiguous array without waiting; host memory must not change until `finish`.

        `tag`, below 32768, distinguishes it from other arrays under way to this rank.
        """

    @abstractmethod
    def receive(self, rank: int, out: Any, tag: int, tick: int) -> None:
        """Receive a rank's array with this tag, due by `tick`: after the tick at which it was sent."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all arrays that this rank sent have been received."""


@dataclass(frozen=True)
class Same(Generic[T]):
    """Facts of an action's result that must agree on all ranks; fields as in `require_same`."""

    what: str  # begins the message
    facts: Callable[[T], Mapping[str, Any]]  # returns the facts of a result
    advice: Mapping[str, str]  # what to do where a fact differs, by its name


class Communicator(ABC):
    """A fixed group of ranks."""

    rank: int  # this process, 0 to size - 1
    size: int  # number of ranks (world size)
    local_rank: int  # this process among those of its node
    local_size: int  # ranks of this node
    node: int  # lowest rank of this node

    @property
    def host(self) -> str:
        """Name of this node."""
        return socket.gethostname()

    @property
    def process(self) -> str:
        """Where this rank runs, for messages: "host a, pid 123"."""
        return f"host {self.host}, pid {os.getpid()}"

    @property
    @abstractmethod
    def description(self) -> str:
        """The library that connects the ranks, for messages."""

    @abstractmethod
    def allreduce_sum(self, buffer: Any) -> None:
        """Replace a contiguous buffer by its elementwise sum over all ranks, in place.

        Half precision is summed in float32 and rounded once, to the same bits on all ranks. The buffer is an array, or
        device memory with `__cuda_array_interface__` if `why_not_cuda_aware` is empty.
        """

    def node_messages(self, like: Sequence[tuple[int, np.dtype[Any]]]) -> NodeMessages | None:
        """Return shared memory for sums of such arrays without messages; None if ranks share none.

        Sums follow `TreeSum`. Arrays of other messages may share the memory. Collective at the first call for these
        sizes.
        """
        return None

    def sums_in_a_tree(self, nbytes: int) -> bool:
        """Whether `allreduce_sum` of `nbytes` gives the bits of a `TreeSum` over the ranks."""
        return self.size <= 2  # a + b = b + a

    @abstractmethod
    def broadcast(self, buffer: Array) -> None:
        """Replace a contiguous buffer by rank 0's, in place."""

    @abstractmethod
    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        """Gather every rank's flat part into flat `out`, in rank order; `counts` are the parts' elements."""

    @abstractmethod
    def all_to_all(self, parts: Array, counts: Sequence[int], out: Array, out_counts: Sequence[int]) -> None:
        """Send each rank its part of flat `parts`, and gather those for this rank into flat `out`, in rank order."""

    def reduce_scatter(self, parts: Array, out: Array, counts: Sequence[int], over: str = "sum") -> None:
        """Reduce ("sum" or "max") the ranks' parts for this rank into `out`; `counts` are the parts' elements.

        Sums follow `TreeSum`: the bits of an all-reduce that `sums_in_a_tree`.
        """
        starts, step = np.cumsum([0, *counts]).tolist(), max(_SCATTERED // self.size, 1)
        for begin, ends in rounds(counts, step):
            lengths = np.diff(ends).tolist()
            sent = [parts[start + begin :][:length] for start, length in zip(starts, lengths, strict=False)]
            mine = lengths[self.rank]
            received = np.empty((self.size, mine), parts.dtype)
            self.all_to_all(np.concatenate(sent), lengths, received.reshape(-1), [mine] * self.size)
            with np.errstate(all="ignore"):  # infinities and NaNs are results
                reduced(list(received), out[begin : begin + mine], over)

    @abstractmethod
    def point_to_point(self, ticks: int) -> PointToPoint:
        """Return point-to-point transfers; every rank of the job opens as many `ticks` at the same time."""

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> "Communicator":
        """Return the communicator of this rank's group (rising); every rank is in one group."""

    def along(self, axis: str) -> "Communicator":
        """Return the ranks that differ from this one only along an axis of the mesh; all without a mesh."""
        return self

    @property
    def replica(self) -> int:
        """Index of this rank's replica of the model, which decides its part of every batch."""
        return self.rank

    @property
    def replicas(self) -> int:
        """Number of replicas: into how many parts batches are cut."""
        return self.size

    @property
    def peers(self) -> list[int]:
        """One rank of each replica, this one included, in the order of their parts of a batch."""
        return list(range(self.size))

    @abstractmethod
    def allgather_bytes(self, message: bytes) -> list[bytes]:
        """Return every rank's message, in rank order."""

    @abstractmethod
    def send(self, rank: int, fact: Any, content: bytes = b"") -> None:
        """Send a JSON value and bytes to a rank, which may be this one, without waiting. Not a collective."""

    @abstractmethod
    def received(self) -> list[Mail]:
        """Return messages received since the last call, in order per sender. Not a collective."""

    @abstractmethod
    def why_not_cuda_aware(self) -> str:
        """Return why MPI cannot take device memory, or an empty string if it can. Not a collective."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called it."""

    @abstractmethod
    def node_barrier(self) -> None:
        """Wait until every rank of this node has called it."""

    @abstractmethod
    def shared_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[Array, bool]:
        """Return an array that all ranks of this node see, and whether this rank is to fill it.

        Ranks that are to fill it do, then all call `node_barrier`. The memory lives as long as the process.
        """

    def allgather(self, fact: Any, *, call: str = "allgather") -> list[Any]:
        """Return every rank's `fact` (a JSON value), in rank order; refuse ranks in different calls."""
        if self.size == 1:
            return [json.loads(_encoded(fact))]
        # The call is sent along: a rank in another method would take these facts for its own.
        replies = [json.loads(message) for message in self.allgather_bytes(_encoded([call, phase.for_others, fact]))]
        if len({reply[0] for reply in replies}) > 1:
            # The phases are the user's words ("fit", "saving"); if they are equal, only the calls differ.
            shown = (
                [reply[1] for reply in replies]
                if len({reply[1] for reply in replies}) > 1
                else [reply[0] for reply in replies]
            )
            raise _agreed_error("collective", ExitCode.CONFIG, _calls_by_rank(shown))
        return [reply[2] for reply in replies]

    def broadcast_fact(self, fact: Any) -> Any:
        """Return rank 0's `fact` (a JSON value) on every rank."""
        return self.allgather(fact if self.rank == 0 else None, call="broadcast_fact")[0]

    def require_same(self, what: str, facts: Mapping[str, Any], advice: Mapping[str, str] | None = None) -> None:
        """Fail on every rank, with exit code 2, where `facts` (JSON values) differ; name the first, with advice."""
        _refuse_differences(what, self.allgather(facts, call=f"require_same({what!r})"), advice or {})

    def agree(self, where: str, action: Callable[[], T], same: "Same[T] | None" = None) -> T:
        """Run `action` on every rank and return its result, or raise an AgreedError on every rank alike.

        Otherwise a rank on which `action` raises would leave the others waiting in their next collective. `action` must
        not call collectives itself. `where` names the work in messages ("data", "output"); `same` lists facts of the
        results that must agree. The error has the lowest failed rank's exit code.
        """
        failure: BaseException | None = None
        report: list[Any] | None = None
        facts: Mapping[str, Any] | None = None
        try:
            result = action()
            if same is not None:
                facts = same.facts(result)
        except Exception as error:
            failure = error
            text = str(error) if isinstance(error, DptrainError) else f"{type(error).__name__}: {error}"
            report = [exit_code_of(error), text]
        reports = self.allgather([self.process, report, facts], call=f"agree({where!r})")
        failed = [(rank, process, *report) for rank, (process, report, _) in enumerate(reports) if report is not None]
        if failed:
            raise _agreed_error(
                where,
                ExitCode(failed[0][2]),
                _merge([(rank, process, text) for rank, process, _, text in failed], self.size),
                [(rank, text) for rank, _, _, text in failed],
            ) from failure
        if same is not None:
            _refuse_differences(same.what, [rank_facts for _, _, rank_facts in reports], same.advice)
        return result


def pack(fact: Any, content: bytes) -> bytes:
    """Return a message as bytes: the length of the JSON fact, the fact, the content."""
    text = _encoded(fact)
    return len(text).to_bytes(8, "little") + text + content


def unpack(source: int, message: bytes) -> Mail:
    """Return the message that `pack` encoded."""
    end = 8 + int.from_bytes(message[:8], "little")
    return Mail(source, json.loads(message[8:end]), bytes(message[end:]))


def _encoded(fact: Any) -> bytes:
    try:
        return json.dumps(fact).encode()
    except (TypeError, ValueError):  # of objects, NumPy's numbers and cycles
        return json.dumps(plain(fact)).encode()


def _agreed_error(where: str, exit_code: ExitCode, text: str, failures: Sequence[tuple[int, str]] = ()) -> AgreedError:
    """Return an error that all ranks raise, and fail the current phase."""
    phase.fail()
    return AgreedError(where, exit_code, text, failures)


def _refuse_differences(what: str, facts: Sequence[Mapping[str, Any]], advice: Mapping[str, str]) -> None:
    keys = dict.fromkeys(key for of_rank in facts for key in of_rank)
    differences = [
        f"{key}: {', '.join(f'rank {rank} has {of_rank.get(key)!r}' for rank, of_rank in enumerate(facts))}"
        + (f"; {advice[key]}" if key in advice else "")
        for key in keys
        if any(of_rank.get(key) != facts[0].get(key) for of_rank in facts)
    ]
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise _agreed_error(what, ExitCode.CONFIG, f"{what}: {'; '.join(differences[:_SHOWN])}{more}")


def _calls_by_rank(calls: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(str(rank))
    groups = [f"rank{'s' * (len(these) > 1)} {', '.join(these)} in {call}" for call, these in ranks.items()]
    return f"the ranks call different methods: {'; '.join(groups)}; all ranks must call the same ones in the same order"


def _merge(failures: Sequence[tuple[int, str, str]], size: int) -> str:
    """Describe a failure of some ranks: the first message, and which ranks failed or did not."""
    rank, process, text = failures[0]
    if len(failures) == size and all(other == text for _, _, other in failures):
        return text
    failed = {rank for rank, _, _ in failures}
    line = f"{text} (rank {rank}, {process}"
    if len(failures) > 1:
        line += f"; also failed: {_ranks([number for number, _, _ in failures[1:]])}"
    others = [number for number in range(size) if number not in failed]
    return f"{line}; no error on {_ranks(others)})" if others else f"{line})"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
