"""Who waits for whom where threads use variables."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dptrain.program.tensor import Variable
from dptrain.program.turns import Turns

W, V = Variable(np.zeros(2), "w"), Variable(np.zeros(2), "v")


@dataclass(frozen=True)
class Other:
    """A turn of another thread, which lasts until it is told to end."""

    begun: threading.Event = field(default_factory=threading.Event)
    ends: threading.Event = field(default_factory=threading.Event)
    turns: list[Any] = field(default_factory=list)

    def begins(self) -> bool:
        return self.begun.wait(60)

    def waits(self) -> bool:
        """Whether it has asked for its turn, and has not got it."""
        end = time.monotonic() + 60
        while not (self.begun.is_set() or (self.turns and self.turns[0].begun)) and time.monotonic() < end:
            time.sleep(0.001)
        return not self.begun.wait(0.05)


@pytest.fixture
def begin() -> Iterator[Callable[[Any], Other]]:
    """Return what begins a turn in another thread; all end with the test."""
    others: list[tuple[threading.Thread, Other]] = []

    def start(turn: Callable[[], Any]) -> Other:
        other = Other()

        def work() -> None:
            other.turns.append(turn())
            with other.turns[0]:
                other.begun.set()
                other.ends.wait(60)

        others.append((threading.Thread(target=work), other))
        others[-1][0].start()
        return other

    yield start
    for _, other in others:
        other.ends.set()
    for thread, _ in others:
        thread.join(60)


def test_who_reads_and_who_writes(begin):
    turns = Turns()
    with turns.of({W}):
        assert begin(lambda: turns.of({V}, {("metrics", 1)})).begins()
        reads = begin(lambda: turns.of({W}))
        assert reads.begins()
        writes = begin(lambda: turns.of(set(), {W}))
        assert writes.waits()
    assert writes.waits()
    reads.ends.set()
    assert writes.begins()
    later_reads = begin(lambda: turns.of({W}))
    assert later_reads.waits()
    writes.ends.set()
    assert later_reads.begins()


def test_turns_begin_in_the_order_in_which_they_were_asked_for(begin):
    """A writer is not kept waiting by readers that come after it; but who reads one variable is soon gone."""
    turns = Turns()
    first = begin(lambda: turns.of({W}))
    assert first.begins()
    writer = begin(lambda: turns.of(set(), {W}))
    assert writer.waits()
    later = begin(lambda: turns.of({W}))
    assert later.waits()
    reader = begin(lambda: turns.reading(W))
    assert reader.begins()
    reader.ends.set()
    first.ends.set()
    assert writer.begins()
    assert later.waits()


def test_a_thread_does_not_wait_for_itself(begin):
    turns = Turns()
    with turns.of({W}):
        writer = begin(lambda: turns.of(set(), {W}))
        assert writer.waits()
        with turns.of({W}, {W}), turns.of({V}), turns.reading(W), turns.writing(W):
            assert writer.waits()
    assert writer.begins()


def test_what_eager_ops_have_read_stays(begin):
    turns = Turns()
    with turns.eager():
        with turns.reading(W), turns.eager(), turns.reading(W):
            pass
        assert begin(lambda: turns.of(set(), {V})).begins()
        writer = begin(lambda: turns.of(set(), {W}))
        assert writer.waits()
    assert writer.begins()


def test_a_forked_process_has_the_turns_of_its_one_thread():
    code = """
import os, threading
from dptrain.program.turns import MAKING, TURNS
begun, ends = threading.Event(), threading.Event()
def work():
    with MAKING, TURNS.of(set(), {1}):
        begun.set()
        ends.wait(30)
thread = threading.Thread(target=work)
thread.start()
begun.wait(30)
with TURNS.of({2}):
    child = os.fork()
    if not child:
        with MAKING, TURNS.of({1}), TURNS.of({2}):
            os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ends.set()
thread.join()
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stdout.strip()) == (0, "7"), process.stderr
