"""What joins ranks: the abstract communicator.

Buffers, not pickles: arrays travel as they lie in memory, small facts as bytes. Every method that does not say
otherwise is a collective: all ranks call the same ones in the same order.
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

# Of facts that ranks do not share, how many a message shows.
_SHOWN = 3
# Elements of all ranks' parts that a reduce-scatter takes at a time: what it needs beside them is twice as much.
_SCATTERED = 1 << 20


class Mail(NamedTuple):
    """A message that a rank got.

    Attributes:
        source: the rank that sent it.
        fact: what JSON can carry.
        content: bytes beside it.
    """

    source: int
    fact: Any
    content: bytes


class HandOvers(ABC):
    """Arrays that some ranks of a group hand to others, in an order that all of them know.

    That order is a clock: its ticks say when a rank waits for what, so that the last one that has not come can be told
    from those that wait for it. Not collective, but that every rank of the group makes and finishes one.

    Attributes:
        on_device: arrays are a device's, and what is queued there after `give` and `take` comes after them; else they
            are the host's.
    """

    on_device = False

    @abstractmethod
    def give(self, rank: int, array: Any, tag: int) -> None:
        """Send a contiguous array to a rank, and go on; one on the host must not change until `finish` has returned.

        Args:
            rank: who takes it.
            array: as above.
            tag: what tells it from other arrays for this rank that are under way, below 32768.
        """

    @abstractmethod
    def take(self, rank: int, out: Any, tag: int, tick: int) -> None:
        """Receive what a rank gives, in the order in which that rank gives it.

        Args:
            rank: who gives it.
            out: contiguous, of its size and type.
            tag: that it was given with.
            tick: by when it is due: after that at which it is given.
        """

    @abstractmethod
    def finish(self) -> None:
        """Return once all that this rank has given has been taken."""


@dataclass(frozen=True)
class Same(Generic[T]):
    """What must be the same on all ranks of what an action has returned; its fields are as in `require_same`.

    Attributes:
        what: begins the message.
        facts: returns the facts of a result.
        advice: what to do where a fact differs, by its name.
    """

    what: str
    facts: Callable[[T], Mapping[str, Any]]
    advice: Mapping[str, str]


class Communicator(ABC):
    """A fixed group of ranks.

    Attributes:
        rank: this process, 0 to size - 1.
        size: the number of ranks (world size).
        local_rank: this process among those of its node.
        local_size: the ranks of this node.
        node: the lowest rank of this node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int

    @property
    def host(self) -> str:
        """This node's name."""
        return socket.gethostname()

    @property
    def process(self) -> str:
        """Where this rank runs, for messages: "host a, pid 123"."""
        return f"host {self.host}, pid {os.getpid()}"

    @property
    @abstractmethod
    def description(self) -> str:
        """What joins the ranks, in words."""

    @abstractmethod
    def allreduce_sum(self, buffer: Any) -> None:
        """Replace a contiguous buffer by its elementwise sum over all ranks, in place.

        Numbers in half precision are added up in float32 and rounded once, to the same bits on all ranks.

        Args:
            buffer: an array; or device memory with `__cuda_array_interface__`, where `why_not_cuda_aware` is empty.
        """

    def node_messages(self, like: Sequence[tuple[int, np.dtype[Any]]]) -> NodeMessages | None:
        """Return memory in which the ranks can sum arrays without a message, or None where they share none.

        They add up in the tree of `TreeSum`. Arrays of other messages may lie in the same memory. Collective where
        arrays of these sizes are asked for the first time.

        Args:
            like: elements and type of each array.
        """
        return None

    def sums_in_a_tree(self, nbytes: int) -> bool:
        """Whether `allreduce_sum` adds the ranks' buffers of so many bytes as `TreeSum` does, to the same bits."""
        return self.size <= 2  # a + b = b + a

    @abstractmethod
    def broadcast(self, buffer: Array) -> None:
        """Replace a contiguous buffer by rank 0's, in place."""

    @abstractmethod
    def all_gather(self, part: Array, out: Array, counts: Sequence[int]) -> None:
        """Put every rank's part into `out`, in rank order.

        Args:
            part: flat and contiguous, this rank's.
            out: flat and contiguous, of the same type and of all parts' elements.
            counts: elements of each rank's part.
        """

    @abstractmethod
    def all_to_all(self, parts: Array, counts: Sequence[int], out: Array, out_counts: Sequence[int]) -> None:
        """Give each rank its part of `parts`, and put what the ranks have for this one into `out`, in rank order.

        Args:
            parts: flat and contiguous, one part behind the other.
            counts: elements of the part for each rank.
            out: flat and contiguous, of the same type.
            out_counts: elements of what each rank has for this one.
        """

    def reduce_scatter(self, parts: Array, out: Array, counts: Sequence[int], over: str = "sum") -> None:
        """Put the sum over the ranks of their parts for this rank into `out`.

        They are added in the tree of `TreeSum`: to the bits of an all-reduce that `sums_in_a_tree`.

        Args:
            parts: flat and contiguous, one part for each rank behind the other.
            out: flat and contiguous, of the same type.
            counts: elements of each part.
            over: "sum", or "max" for the greatest of each element.
        """
        starts, step = np.cumsum([0, *counts]).tolist(), max(_SCATTERED // self.size, 1)
        for begin, ends in rounds(counts, step):
            lengths = np.diff(ends).tolist()
            given = [parts[start + begin :][:length] for start, length in zip(starts, lengths, strict=False)]
            mine = lengths[self.rank]
            own = np.empty((self.size, mine), parts.dtype)
            self.all_to_all(np.concatenate(given), lengths, own.reshape(-1), [mine] * self.size)
            with np.errstate(all="ignore"):  # infinities and NaNs are results
                reduced(list(own), out[begin : begin + mine], over)

    @abstractmethod
    def hand_overs(self, ticks: int) -> HandOvers:
        """Return what hands arrays from rank to rank of this group.

        Args:
            ticks: of the clock; each rank of the job begins with as many, at the same time.
        """

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> "Communicator":
        """Return the communicator of some of these ranks, for messages between them.

        Args:
            ranks: of the group that this rank is in, rising; every rank is in one.
        """

    def along(self, axis: str) -> "Communicator":
        """Return the ranks that differ from this one along an axis of the mesh alone, and it.

        Ranks that nobody has arranged are a mesh with one axis.
        """
        return self

    @property
    def replica(self) -> int:
        """Which replica of the model this rank belongs to: whose part of every batch it gets."""
        return self.rank

    @property
    def replicas(self) -> int:
        """Into how many parts batches are cut."""
        return self.size

    @property
    def peers(self) -> list[int]:
        """The ranks that have the parts of a batch beside this one's, and it, in the parts' order."""
        return list(range(self.size))

    @abstractmethod
    def allgather_bytes(self, message: bytes) -> list[bytes]:
        """Return every rank's message, in rank order."""

    @abstractmethod
    def send(self, rank: int, fact: Any, content: bytes = b"") -> None:
        """Send a message to a rank, which may be this one, and go on. Not a collective.

        Args:
            rank: who gets it, by `received`.
            fact: anything that JSON can carry.
            content: bytes beside it.
        """

    @abstractmethod
    def received(self) -> list[Mail]:
        """Return the messages that have come since the last call, those of one rank in order. Not a collective."""

    @abstractmethod
    def why_not_cuda_aware(self) -> str:
        """Return why device memory cannot be handed over, or an empty string if it can. Not a collective."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def node_barrier(self) -> None:
        """Return once every rank of this node has called it."""

    @abstractmethod
    def shared_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[Array, bool]:
        """Return an array that all ranks of this node see, and whether this rank is to fill it.

        Every rank that is told to fill the array does, then all call `node_barrier`. The memory lives as long as the
        process.
        """

    def allgather(self, fact: Any, *, call: str = "allgather") -> list[Any]:
        """Return every rank's `fact` (anything that JSON can carry), in rank order.

        Args:
            fact: this rank's.
            call: what all ranks must be calling, for comparison and for the message.

        Raises:
            AgreedError: with exit code 2; the ranks call different collectives.
        """
        if self.size == 1:
            return [json.loads(_encoded(fact))]
        # What each rank calls travels along: a rank in another method would take these facts for its own.
        found = [json.loads(message) for message in self.allgather_bytes(_encoded([call, phase.for_others, fact]))]
        if len({one[0] for one in found}) > 1:
            # The phases are the user's words ("fit", "saving"); where they are equal only the calls tell.
            shown = [one[1] for one in found] if len({one[1] for one in found}) > 1 else [one[0] for one in found]
            raise _ended("collective", ExitCode.CONFIG, _apart(shown))
        return [one[2] for one in found]

    def broadcast_fact(self, fact: Any) -> Any:
        """Return rank 0's `fact` (anything that JSON can carry) on every rank.

        Raises:
            AgreedError: as `allgather`.
        """
        return self.allgather(fact if self.rank == 0 else None, call="broadcast_fact")[0]

    def require_same(self, what: str, facts: Mapping[str, Any], advice: Mapping[str, str] | None = None) -> None:
        """Fail on every rank where `facts` (anything that JSON can carry) are not the same on all.

        Args:
            what: begins the message ("the ranks are set up differently").
            facts: by name.
            advice: what to do where a fact differs, by its name.

        Raises:
            AgreedError: with exit code 2; names the first facts that differ, with each rank's. Or as `allgather`.
        """
        _refuse_differences(what, self.allgather(facts, call=f"require_same({what!r})"), advice or {})

    def agree(self, where: str, action: Callable[[], T], same: "Same[T] | None" = None) -> T:
        """Run `action` on every rank and return its result, or fail on every rank alike.

        A rank on which `action` raises would otherwise leave the others waiting in their next collective. `action`
        must not itself call collectives, which the failed rank would miss.

        Args:
            where: what is being done, for the message ("data", "output").
            action: called once on this rank.
            same: what of the results must be the same on all ranks, which travels along; None for nothing.

        Raises:
            AgreedError: on every rank, where `action` failed on any; it carries the lowest failed rank's exit code. Or
                as `require_same`.
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
        failed = [(rank, process, *found) for rank, (process, found, _) in enumerate(reports) if found is not None]
        if failed:
            raise _ended(
                where,
                ExitCode(failed[0][2]),
                _merge([(rank, process, text) for rank, process, _, text in failed], self.size),
                [(rank, text) for rank, _, _, text in failed],
            ) from failure
        if same is not None:
            _refuse_differences(same.what, [one for _, _, one in reports], same.advice)
        return result


def pack(fact: Any, content: bytes) -> bytes:
    """Return a message in one piece: the length of the fact as JSON, the fact, the content."""
    text = _encoded(fact)
    return len(text).to_bytes(8, "little") + text + content


def unpack(source: int, message: bytes) -> Mail:
    """Return what `pack` packed."""
    end = 8 + int.from_bytes(message[:8], "little")
    return Mail(source, json.loads(message[8:end]), bytes(message[end:]))


def _encoded(fact: Any) -> bytes:
    """Return a fact as JSON; numbers and arrays of NumPy are Python's there."""
    return json.dumps(plain(fact)).encode()


def _ended(where: str, exit_code: ExitCode, text: str, failures: Sequence[tuple[int, str]] = ()) -> AgreedError:
    """Return an error of all ranks, which ends what they do; as `AgreedError`."""
    phase.fail()
    return AgreedError(where, exit_code, text, failures)


def _refuse_differences(what: str, facts: Sequence[Mapping[str, Any]], advice: Mapping[str, str]) -> None:
    """Raise the error of all ranks where their facts differ; as `require_same`."""
    keys = dict.fromkeys(key for of_rank in facts for key in of_rank)
    differences = [
        f"{key}: {', '.join(f'rank {rank} has {of_rank.get(key)!r}' for rank, of_rank in enumerate(facts))}"
        + (f"; {advice[key]}" if key in advice else "")
        for key in keys
        if any(of_rank.get(key) != facts[0].get(key) for of_rank in facts)
    ]
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise _ended(what, ExitCode.CONFIG, f"{what}: {'; '.join(differences[:_SHOWN])}{more}")


def _apart(calls: Sequence[str]) -> str:
    """One line for ranks that are not in the same call, each call with its ranks."""
    ranks: dict[str, list[str]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(str(rank))
    found = [f"rank{'s' * (len(these) > 1)} {', '.join(these)} in {call}" for call, these in ranks.items()]
    return f"the ranks call different methods: {'; '.join(found)}; all ranks must call the same ones in the same order"


def _merge(failures: Sequence[tuple[int, str, str]], size: int) -> str:
    """One line for what failed on some ranks: the first message, and which ranks met it or did not."""
    rank, process, text = failures[0]
    if len(failures) == size and all(other == text for _, _, other in failures):
        return text
    failed = {rank for rank, _, _ in failures}
    others = [str(r) for r in range(size) if r not in failed]
    line = f"{text} (rank {rank}, {process}"
    if len(failures) > 1:
        line += f"; also failed: ranks {', '.join(str(r) for r, _, _ in failures[1:])}"
    return line + (f"; no error on ranks {', '.join(others)})" if others else ")")
