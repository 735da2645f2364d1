"""What joins ranks, `solo` (one process) or `mpi`, and what joins their GPUs beside it, `nccl`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from dptrain.comm.base import Communicator, Same
from dptrain.comm.solo import SoloCommunicator
from dptrain.runtime import children, streams, watchdog
from dptrain.runtime.launcher import detect_launch, refuse_other_launchers, start_mpi

__all__ = ["Communicator", "Same", "SoloCommunicator", "current", "independent"]

_current: Communicator | None = None


def _forget() -> None:
    """Let a fork be alone: MPI does not know of it."""
    global _current
    _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _say_whose_child() -> None:
    rank = children.parent_rank()
    if rank is not None and detect_launch({**os.environ, children.VARIABLE: ""}) is not None:
        streams.write_error(
            f"dptrain: pid {os.getpid()} was started by a rank, pid {rank}: it runs alone, without MPI\n"
        )


def current() -> Communicator:
    """Return this process's communicator, made at the first call: MPI's under a launcher, else the solo one.

    Collective under a launcher, because starting MPI is.

    Raises:
        AgreedError: the launcher's number of processes is not MPI's, or no MPI joins the processes.
        OutputError: the node's shared memory is full.
    """
    global _current
    if _current is None:
        launch = detect_launch()
        if launch is None:
            refuse_other_launchers()
            _say_whose_child()
            _current = SoloCommunicator()
        else:
            with watchdog.joining():
                start_mpi()
                from dptrain.comm.mpi import join

                _current = join(launch)
    return _current


@contextmanager
def independent() -> Iterator[None]:
    """Let this process train for itself while the block lasts: `current` is a solo communicator there.

    Who needs the other ranks keeps the communicator of before. Collective under a launcher, as `current`.
    """
    global _current
    ranks = current()
    _current = SoloCommunicator()
    try:
        yield
    finally:
        _current = ranks
