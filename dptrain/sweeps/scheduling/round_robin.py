"""Round-robin schedule of concurrent trainings: one a core on a CPU, in packs on a GPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dptrain.backend.base import Backend
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.runtime.launch.children import ending_forks
from dptrain.runtime.python_lock import acquired, released


class Advances(Protocol):
    """A training that can be advanced; `place` is its number among the concurrent ones."""

    place: int  # its number among those that are trained at once

    def advance(self) -> Any:
        """Queue the next steps; return the training's ending, None while it goes on."""

    def launch_waiting(self) -> None:
        """Launch what waits to be executed together with other trainings' steps."""


T = TypeVar("T", bound=Advances)


@dataclass(frozen=True)
class AdvanceResult(Generic[T]):
    """Result of one `advance` of a training: its ending, its error, or neither while it goes on."""

    training: T  # whose it was
    ended: Any = None  # what its `advance` returned; None where the training goes on, or failed
    error: Exception | None = None  # that it raised


def threads_for(backend: Backend, most: int) -> int:
    """Return the number of training threads: one for each core where CPU steps are compiled, else 1."""
    return min(backend.threads, most) if isinstance(backend, CpuBackend) and backend.compiles else 1


class RoundRobin(Generic[T]):
    """Advances trainings one after the other, or several at once.

    With several threads, as many compiled steps run at once, each on one thread; Python holds one lock. With one thread
    a GPU launches when all have advanced: waiting steps of one program form a pack. With several packs it launches
    after each pack, and computes while the host handles the others.
    """

    def __init__(self, threads: int = 1, packs: int = 1) -> None:
        self._packs = packs
        self._pool = ThreadPoolExecutor(threads, "training") if threads > 1 else None
        self._running: dict[Future[AdvanceResult[T]], T] = {}
        self._stack = ExitStack()
        if self._pool is not None:
            self._stack.enter_context(acquired())

    def advance(self, trainings: Sequence[T]) -> list[AdvanceResult[T]]:
        """Advance the trainings that are not running already; return at least one outcome."""
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
            completed, _ = wait(self._running, return_when=FIRST_COMPLETED)
        ended = [future for future in self._running if future in completed]
        for future in ended:
            del self._running[future]
        return [future.result() for future in ended]

    def close(self) -> None:
        """Wait for the running trainings."""
        if self._pool is not None:
            with released():
                self._pool.shutdown(cancel_futures=True)
        self._running.clear()
        self._stack.close()


def _advance(training: T, run: Callable[[Callable[[], bool]], bool] = lambda action: action()) -> AdvanceResult[T]:
    try:
        return AdvanceResult(training, run(training.advance))
    except Exception as error:
        return AdvanceResult(training, error=error)


def _advance_in_thread(training: T) -> AdvanceResult[T]:
    with acquired():
        return _advance(training, ending_forks)
