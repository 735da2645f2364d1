"""Turns of threads at variables: writers wait for readers, and readers for writers.

A turn names what it reads and writes, and holds all of it from beginning to end; turns that share nothing, or only
read, run concurrently. They begin in the order of their requests. A thread that has a turn does not queue again: those
it would wait for could be waiting for it.
"""

import os
import threading
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dptrain.runtime.python_lock import released
from dptrain.runtime.undisturbed import undisturbed


class SharedLock:
    """A reentrant lock of all threads; a forked process begins with it free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def after_fork(self) -> None:
        """Free the lock, whose thread a forked process does not have."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_NOTHING: frozenset[Any] = frozenset()


class OfThread(threading.local):
    """Thread-local attributes; a copy has none."""

    def __reduce__(self) -> Any:
        return OfThread, ()


class Turn:
    """A thread's use of shared objects while this context lasts.

    Args:
        reads: what it reads, mostly variables.
        writes: what it changes.
        queues: it begins after earlier requests; else after running turns.
        is_eager: it belongs to ops executed one by one, whose reads are added as they go on.

    `begun` is a lock that is held until a waiting turn begins.
    """

    __slots__ = ("_turns", "begun", "is_eager", "queues", "reads", "thread", "writes")

    def __init__(
        self, turns: "Turns", reads: Set[Any], writes: Set[Any], *, queues: bool = True, is_eager: bool = False
    ) -> None:
        self._turns, self.reads, self.writes, self.queues, self.is_eager = turns, reads, writes, queues, is_eager
        self.thread = threading.get_ident()
        self.begun: threading.Lock | None = None

    def __enter__(self) -> None:
        self._turns.begin(self)

    def __exit__(self, *error: object) -> None:
        self._turns.end(self)

    def excludes(self, other: "Turn") -> bool:
        """Whether two turns cannot run concurrently."""
        if self.thread == other.thread or (self.is_eager and other.is_eager):
            return False
        mine, theirs = self.writes, other.writes
        if mine and not (mine.isdisjoint(theirs) and mine.isdisjoint(other.reads)):
            return True
        return bool(theirs) and not theirs.isdisjoint(self.reads)


class _EagerTurn(Turn):
    """A turn of ops executed one by one; it begins without reads."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._turns.eager_turn = self
        try:
            super().__enter__()
        except BaseException:  # Ctrl-C
            self._turns.eager_turn = None
            raise

    def __exit__(self, *error: object) -> None:
        self._turns.eager_turn = None
        super().__exit__(*error)


class Turns:
    """All turns of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Turn] = []
        self._waiting: list[Turn] = []
        self._of_thread = OfThread()

    def of(self, reads: Set[Any] = _NOTHING, writes: Set[Any] = _NOTHING) -> Turn:
        """Return the turn of a user of variables, or of other things that threads share."""
        return Turn(self, reads, writes)

    def eager(self) -> AbstractContextManager[None]:
        """Return the turn of ops executed one by one: variables that they read stay unchanged until its end.

        Within another turn of the thread it is part of that.
        """
        return nullcontext() if self.is_eager else _EagerTurn(self, set(), _NOTHING, is_eager=True)

    @property
    def eager_turn(self) -> Turn | None:
        """This thread's eager turn."""
        return getattr(self._of_thread, "eager", None)

    @eager_turn.setter
    def eager_turn(self, turn: Turn | None) -> None:
        self._of_thread.eager = turn

    @property
    def is_eager(self) -> bool:
        """Whether this thread executes ops one by one, in an eager turn."""
        return self.eager_turn is not None

    def reading(self, variable: Any) -> AbstractContextManager[None]:
        """Return the turn of a reader of one variable; within an eager turn it lasts as long as that."""
        eager = self.eager_turn
        turn = Turn(self, {variable}, _NOTHING, queues=False, is_eager=eager is not None)
        if eager is None:
            return turn
        if variable not in eager.reads:
            with turn, self._lock:
                eager.reads.add(variable)  # type: ignore[attr-defined]
        return nullcontext()

    def writing(self, variable: Any) -> Turn:
        """Return the turn of a writer of one variable."""
        return Turn(self, _NOTHING, {variable}, is_eager=self.is_eager)

    def begin(self, turn: Turn) -> None:
        """Wait until a turn can begin."""
        try:
            with self._lock:
                if self._may_begin(turn, self._waiting):
                    self._running.append(turn)
                    return
                turn.begun = threading.Lock()
                turn.begun.acquire(blocking=False)
                self._waiting.insert(len(self._waiting) if turn.queues else 0, turn)
            with released():
                turn.begun.acquire()
        except BaseException:  # Ctrl-C
            self.end(turn)
            raise

    def _may_begin(self, turn: Turn, ahead: Sequence[Turn]) -> bool:
        """Whether no running turn excludes it, nor, if it queues and its thread has none, one ahead."""
        queues = turn.queues
        for other in self._running:
            if turn.excludes(other):
                return False
            queues = queues and turn.thread != other.thread
        return not (queues and any(turn.excludes(waiting_turn) for waiting_turn in ahead))

    def end(self, turn: Turn) -> None:
        """End a turn, or its wait, and start others; nothing if it has not begun to wait."""
        with undisturbed(self._lock):
            turns = next((turns for turns in (self._running, self._waiting) if turn in turns), None)
            if turns is None:
                return
            turns.remove(turn)
            number = 0
            while number < len(self._waiting):
                waiting_turn = self._waiting[number]
                if self._may_begin(waiting_turn, self._waiting[:number]):
                    del self._waiting[number]
                    self._running.append(waiting_turn)
                    assert waiting_turn.begun is not None
                    waiting_turn.begun.release()
                else:
                    number += 1

    def after_fork(self) -> None:
        """Forget the turns of threads that a fork does not have."""
        self._lock = threading.Lock()
        self._running = [turn for turn in self._running if turn.thread == threading.get_ident()]
        self._waiting = []


TURNS = Turns()
# Held to trace Python, build layers, lower or compile programs, so that all threads do it once. Its holder waits for no
# turn.
MAKING = SharedLock()
# Held while a variable's value is replaced or moved.
REPLACING = SharedLock()
# Held while eager ops draw random numbers, and count the draw.
DRAWING = SharedLock()

if hasattr(os, "register_at_fork"):
    for shared in (TURNS, MAKING, REPLACING, DRAWING):
        os.register_at_fork(after_in_child=shared.after_fork)
