"""Whether MPI can be given a GPU's memory.

Handing device memory to an MPI that does not know GPUs is no error but a segmentation fault. So MPI is asked what it
knows; and if it claims to know GPUs, another process tries, whose crash harms nobody. Run as a module, this file is
that process.
"""

import ctypes

import numpy as np

from dptrain.comm import trial
from dptrain.runtime.launcher import start_mpi


def why_not() -> str:
    """Return why device memory cannot be handed to MPI, or an empty string if it can."""
    kinds = start_mpi().COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or ""
    if not any(kind.strip().startswith("cuda") for kind in kinds.split(",")) and not _query():
        return "this MPI library does not say that it is CUDA-aware (mpi_memory_alloc_kinds, MPIX_Query_cuda_support)"
    return _try()


def _query() -> bool:
    """Ask `MPIX_Query_cuda_support`, which MPICH and Open MPI have beyond the standard."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = {line.split()[-1] for line in maps if "/libmpi" in line}
    for library in (None, *sorted(loaded)):
        try:
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return False


def _try() -> str:
    """Let MPI move device memory in a process of its own."""
    what = trial.why_not(__name__)
    text = "this MPI library says that it is CUDA-aware, but fails when it is given device memory"
    return f"{text}: {what}" if what else ""


def main() -> None:
    """Send and sum device memory within this one process."""
    with trial.Device() as device:
        mpi = start_mpi()
        expected = np.arange(trial.SIZE, dtype=np.float32)
        first, second, third = (trial.Memory(device, values) for values in (expected, 0 * expected, 0 * expected))
        device.wait()
        mpi.COMM_SELF.Sendrecv(first, dest=0, recvbuf=second, source=0)
        mpi.COMM_SELF.Allreduce(second, third, op=mpi.SUM)
        mpi.COMM_SELF.Allreduce(mpi.IN_PLACE, third, op=mpi.SUM)
        if not np.array_equal(third.read(), expected):
            raise RuntimeError("the values that arrive are not those that were sent")
        for memory in (first, second, third):
            memory.free()
    print(trial.WORKED)


if __name__ == "__main__":
    main()
