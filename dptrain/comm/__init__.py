"""Communicators: `solo` (one process) or `mpi` between ranks, and `nccl` between their GPUs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from dptrain.comm.base import Communicator, Same
from dptrain.comm.solo import SoloCommunicator
from dptrain.runtime.launch import children
from dptrain.runtime.launch.launcher import detect_launch, refuse_other_launchers, start_mpi
from dptrain.runtime.output import streams
from dptrain.runtime.watch import watchdog

__all__ = ["Communicator", "Same", "SoloCommunicator", "current", "independent"]

_current: Communicator | None = None


def _forget_communicator() -> None:
    """Leave a forked child without a communicator: MPI does not know of it."""
    global _current
    _current = None


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
    global _current
    if _current is None:
        launch = detect_launch()
        if launch is None:
            refuse_other_launchers()
            _report_parent()
            _current = SoloCommunicator()
        else:
            with watchdog.joining():
                start_mpi()
                from dptrain.comm.mpi import join

                _current = join(launch)
    return _current


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
