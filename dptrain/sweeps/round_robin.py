"""A round-robin schedule of concurrent trainings: on a CPU one a core, on a GPU in packs."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dptrain.backend.base import Backend
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.runtime.children import ending_forks
from dptrain.runtime.python_lock import acquired, released


class Advances(Protocol):
    """A training that makes some steps when it is asked to.

    Attributes:
        place: its number among those that are trained at once.
    """

    place: int

    def advance(self) -> Any:
        """Queue the next steps; return how the training has ended, None where it goes on."""

    def launch_waiting(self) -> None:
        """Let the device begin with what waits to be executed together with others' steps."""


T = TypeVar("T", bound=Advances)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What one `advance` of a training came to.

    Attributes:
        training: whose it was.
        ended: what its `advance` returned; None where the training goes on, or failed.
        error: that it raised.
    """

    training: T
    ended: Any = None
    error: Exception | None = None


def threads_for(backend: Backend, most: int) -> int:
    """Return how many threads are to train at once: on a CPU one for each core, where steps are compiled.

    Threads that share a training's steps wait for each other.

    Args:
        backend: this rank's.
        most: trainings at once at most.
    """
    return min(backend.threads, most) if isinstance(backend, CpuBackend) and backend.compiles else 1


class RoundRobin(Generic[T]):
    """Advances trainings one after the other, or several at once.

    Args:
        threads: that compute at once. With several, compiled steps of as many trainings do, each in one thread; Python
            stays one thread's at a time. With one, trainings advance one after the other, and a GPU begins when all
            have: what then waits and is the same program is a pack, and packs go on beside each other.
        packs: into which trainings of one program are divided. With several, a GPU begins when one in so many has
            advanced, and computes while the host looks after the others: at the ends of epochs, say.
    """

    def __init__(self, threads: int = 1, packs: int = 1) -> None:
        self._packs = packs
        self._pool = ThreadPoolExecutor(threads, "training") if threads > 1 else None
        self._running: dict[Future[Outcome[T]], T] = {}
        self._stack = ExitStack()
        if self._pool is not None:
            self._stack.enter_context(acquired())

    def advance(self, trainings: Sequence[T]) -> list[Outcome[T]]:
        """Advance the trainings that are not advancing already; return what has finished, at least one.

        Args:
            trainings: all that there are; those that have gone are not advancing.
        """
        if self._pool is None:
            outcomes = []
            for number in range(self._packs):
                pack = [training for training in trainings if training.place % self._packs == number]
                outcomes += [_advance(training) for training in pack]
                for training in pack:
                    training.launch_waiting()
            return outcomes
        at_work = {id(training) for training in self._running.values()}
        for training in trainings:
            if id(training) not in at_work:
                self._running[self._pool.submit(_advance_in_thread, training)] = training
        with released():
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        ended = [future for future in self._running if future in done]
        for future in ended:
            del self._running[future]
        return [future.result() for future in ended]

    def close(self) -> None:
        """Wait until no training is advancing."""
        if self._pool is not None:
            with released():
                self._pool.shutdown(cancel_futures=True)
        self._running.clear()
        self._stack.close()


def _advance(training: T, run: Callable[[Callable[[], bool]], bool] = lambda action: action()) -> Outcome[T]:
    try:
        return Outcome(training, run(training.advance))
    except Exception as error:
        return Outcome(training, error=error)


def _advance_in_thread(training: T) -> Outcome[T]:
    with acquired():
        return _advance(training, ending_forks)
