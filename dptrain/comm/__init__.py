"""Communicators: `solo` (one process) or `mpi` between ranks, and `nccl` between their GPUs."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dptrain.comm.base import Communicator, Same
from dptrain.comm.solo import SoloCommunicator
from dptrain.runtime.launch import children
from dptrain.runtime.launch.launcher import detect_launch, refuse_other_launchers, start_mpi
from dptrain.runtime.output import streams
from dptrain.runtime.watch import thread_order, watchdog

__all__ = ["Communicator", "Same", "SoloCommunicator", "current", "independent", "meeting"]

_current: Communicator | None = None
_joining = threading.RLock()  # the first communicator is made once, whatever threads ask for it


def _forget_communicator() -> None:
    """Leave a forked child without a communicator: MPI does not know of it."""
    global _current, _joining
    _current, _joining = None, threading.RLock()
    thread_order.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_communicator)


def _report_parent() -> None:
    rank = children.parent_rank()
    if rank is not None and detect_launch({**os.environ, children.VARIABLE: ""}) is not None:
        streams.write_error(
            f"dptrain: pid {os.getpid()} was started by a rank, pid {rank}: it runs alone, without MPI\n"
        )


def current() -> Communicator:
    """Return this process's communicator, created at the first call: MPI's under a launcher (collective), else solo."""
    if _current is not None:
        return _current
    with _joining:
        return _join() if _current is None else _current


def _join() -> Communicator:
    global _current
    launch = detect_launch()
    if launch is None:
        refuse_other_launchers()
        _report_parent()
        _current = SoloCommunicator()
    else:
        thread_order.check("a collective")
        with watchdog.joining():
            start_mpi()
            from dptrain.comm.mpi import join

            _current = join(launch)
    return _current


@contextmanager
def meeting(call: str) -> Iterator[None]:
    """Let this thread alone meet the other ranks during the block, in which it calls a method such as `fit`.

    Threads of one process that trains alone may do so at the same time. On several ranks the job ends if they do.
    """
    launch = detect_launch() if _current is None else None
    if (1 if launch is None else launch.size) == 1 and (_current is None or _current.size == 1):
        yield
        return
    with thread_order.meeting(call):
        yield


@contextmanager
def independent() -> Iterator[None]:
    """Make `current` a solo communicator within the block, for trainings of one rank. Collective under a launcher."""
    global _current
    ranks = current()
    _current = SoloCommunicator()
    try:
        yield
    finally:
        _current = ranks
