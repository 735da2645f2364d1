"""What joins ranks: `solo` (one process) or `mpi`."""

from dptrain.comm.base import Communicator
from dptrain.comm.solo import SoloCommunicator
from dptrain.launcher import detect_launch, start_mpi

__all__ = ["Communicator", "SoloCommunicator", "current"]

_current: Communicator | None = None


def current() -> Communicator:
    """Return this process's communicator, made at the first call: MPI's under a launcher, else the solo one.

    Collective under a launcher, because starting MPI is.

    Raises:
        AgreedError: the launcher's number of processes is not MPI's.
    """
    global _current
    if _current is None:
        launch = detect_launch()
        if launch is None:
            _current = SoloCommunicator()
        else:
            start_mpi()
            from dptrain.comm.mpi import MpiCommunicator

            _current = MpiCommunicator(launch)
    return _current
