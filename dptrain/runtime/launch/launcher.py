"""What the launcher says about this process, read from environment variables before MPI is touched.

A process started alone never imports MPI; one whose launcher belongs to another MPI than ours, which makes N worlds of
size 1, can be refused.
"""

import ctypes
import importlib.util
import os
import stat
import sys
import threading
import time
import warnings
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import ModuleType

from dptrain.errors import AgreedError, ExitCode
from dptrain.runtime.launch import children

# (launcher, size, rank, ranks on this node, rank on this node); a launcher may leave the last two out.
_VARIABLES = (
    ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    ("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NTASKS_PER_NODE", "SLURM_LOCALID"),
)  # fmt: skip

# As MPICH and Open MPI have it.
_THREAD_MULTIPLE = 3

# Variables of torchrun, accelerate, deepspeed and Kubeflow's PyTorchJob, which start no MPI.
_TORCHRUN = ("WORLD_SIZE", "RANK", "MASTER_ADDR")
_TURN_SECONDS = 1.0

# Prefixes of all variables of launchers that mark a process of a job.
LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "PALS_", "MPI_", "MPIEXEC_", "HYDI_", "HYDRA_", "SLURM_")

# Variables that BLAS libraries read once, when loaded.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class LaunchInfo:
    """How a launcher started this process."""

    launcher: str
    size: int
    rank: int
    local_size: int  # processes on this node; 1 where the launcher does not say


def detect_launch(environ: Mapping[str, str] = os.environ) -> LaunchInfo | None:
    """Return how this process was launched, or None without a launcher or in a rank's child process."""
    for launcher, size, rank, local_size, _ in _VARIABLES:
        if environ.get(size, "").isdigit() and environ.get(rank, "").isdigit():
            if children.parent_rank(environ) is not None:
                return None
            local = environ.get(local_size, "1")
            return LaunchInfo(launcher, int(environ[size]), int(environ[rank]), int(local) if local.isdigit() else 1)
    return None


def rank_variable(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the environment variable that holds this process's rank, or None without a launcher."""
    for _, size, rank, *_ in _VARIABLES:
        if environ.get(size, "").isdigit() and environ.get(rank, "").isdigit():
            return rank
    return None


def refuse_other_launchers(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse torchrun and the like without MPI: each process would train alone and write the same files."""
    values = [environ.get(name, "") for name in _TORCHRUN]
    launch = detect_launch(environ)
    # srun starts one torchrun a node: a step of one task may still be many processes.
    alone = launch is None or launch.size == 1
    if not (alone and all(values) and values[0].isdigit() and values[1].isdigit() and int(values[0]) > 1):
        return
    if int(values[1]) > 0:
        # One line is enough, and torchrun ends all processes when the first exits: let that be RANK 0.
        time.sleep(_TURN_SECONDS)
    raise AgreedError(
        "start-up",
        ExitCode.CONFIG,
        f"WORLD_SIZE = {values[0]}, but no MPI joins the processes (torchrun, accelerate or deepspeed?): each would "
        f"train alone; start with mpirun -n {values[0]} instead, or unset WORLD_SIZE",
        [],
    )


def usable_cores(affinity: frozenset[int] | None = None) -> int:
    """Cores that this process may use: its affinity mask, limited by the container's CPU quota."""
    if affinity is None:
        affinity = core_affinity()
    cores = len(affinity)
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def core_affinity() -> frozenset[int]:
    """Return the cores in this process's affinity mask, or all of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def share_of_cores(local_size: int) -> int:
    """Threads that each of `local_size` processes of a node should start, at least 1: its mask, if bound, or share."""
    cores = usable_cores()
    bound = len(core_affinity()) < (os.cpu_count() or 1)
    return cores if bound and cores <= (os.cpu_count() or 1) // local_size else max(1, cores // local_size)


def prepare_blas_before_numpy(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what BLAS libraries read while NumPy is first imported, unless the user has.

    By default each rank would start as many threads as the node has cores. An idle OpenBLAS thread also spins for tens
    of milliseconds, which takes its core from other threads and ranks; 2^10 cycles bridge the gaps between a step's
    products.
    """
    if "numpy" in sys.modules:
        return
    environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "10")
    launch = detect_launch(environ)
    if launch is not None and launch.local_size > 1:
        environ.update(threads_of_a_rank(launch.local_size, environ))


def threads_of_a_rank(local_size: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return thread variables that give each of `local_size` ranks its share of cores; none if the user set any."""
    if any(environ.get(variable) for variable in THREAD_VARIABLES):
        return {}
    return dict.fromkeys(THREAD_VARIABLES, str(share_of_cores(local_size)))


def start_mpi() -> ModuleType:
    """Import mpi4py, which starts MPI if necessary; we report its warnings as errors."""
    with _starting, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "mpi4py.MPI" not in sys.modules:
            _start_without_lock()
        from mpi4py import MPI
    return MPI


# MPI starts once, whatever threads ask for it.
_starting = threading.RLock()


def _forget_start() -> None:
    global _starting
    _starting = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_start)

# The process that called MPI_Init itself, and so must end MPI.
_started_by: int | None = None


def _start_without_lock() -> None:
    """Call MPI_Init without Python's lock, which mpi4py would hold until all ranks come: threads can watch them."""
    global _started_by
    import mpi4py

    launch, rc = detect_launch(), mpi4py.rc
    usual = rc.initialize and rc.threads and rc.thread_level == "multiple"
    spec = importlib.util.find_spec("mpi4py.MPI")
    # The standard's own ABI has another number for MPI_THREAD_MULTIPLE.
    if launch is None or launch.size == 1 or not usual or spec is None or "mpiabi" in (spec.origin or "mpiabi"):
        return
    try:
        start = ctypes.CDLL(str(spec.origin)).MPI_Init_thread
    except (OSError, AttributeError):
        return
    start(None, None, _THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    _started_by = os.getpid()


def end_mpi() -> None:
    """Call MPI_Finalize where `start_mpi` called MPI_Init; otherwise mpi4py does at exit."""
    if has_mpi() and _started_by == os.getpid():
        sys.modules["mpi4py.MPI"].Finalize()


def is_ours() -> bool:
    """Whether `start_mpi` called MPI_Init, here or before a fork: mpi4py does not end MPI then."""
    return _started_by is not None


def has_mpi() -> bool:
    """Whether MPI is running."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def launcher_can_abort(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `abort_by_launcher` can end the job."""
    launch, file = detect_launch(environ), environ.get("PMI_FD", "")
    if launch is None or launch.launcher != "MPICH" or "HYDI_CONTROL_FD" not in environ or not file.isdigit():
        return False
    try:
        return stat.S_ISSOCK(os.fstat(int(file)).st_mode)
    except OSError:
        return False


def abort_by_launcher(code: int) -> None:
    """Ask MPICH's launcher to end all ranks, whatever MPI is doing; returns before this process is killed."""
    os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
