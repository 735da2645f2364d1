"""Command lines that start ranks: MPICH's and Open MPI's mpirun, Slurm's srun."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dptrain.errors import ConfigError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.programs import run_program

# Slots by host; empty for this host alone.
Hosts = Mapping[str, int]

# Variables of batch systems and of Kubernetes' MPI operator for the file of a job's hosts.
_HOST_FILES = (
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
)
# Time limit in seconds of a launcher's version.
_PATIENCE = 60.0
_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "FLUX_URI")
# This process's variables for Open MPI to pass to other hosts; MPICH and Slurm pass all of them.
_PASSED_ON = re.compile(
    "PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON.*|(CONDA|CUDA|DPTRAIN|KMP|MKL|NCCL|OMP|OPENBLAS|XDG)_.*"
)


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks."""

    family: str  # "MPICH" for all that use Hydra, "Open MPI" or "Slurm"
    words: tuple[str, ...]  # the program and the user's options
    version: int = 0  # major number where the command line depends on it, else 0

    @property
    def rank_variable(self) -> str:
        """Environment variable that holds a process's rank."""
        return {"MPICH": "PMI_RANK", "Open MPI": "OMPI_COMM_WORLD_RANK", "Slurm": "SLURM_PROCID"}[self.family]


def mpi_family(output: str) -> str:
    """Identify an MPI from its version text."""
    families = {"Open MPI": "Open MPI|OpenRTE|PRRTE|prte", "Intel MPI": r"Intel\(R\) MPI", "MVAPICH": "MVAPICH"}
    for name, words in (families | {"MPICH": "MPICH|HYDRA"}).items():
        if re.search(words, output):
            return name
    return "an unknown MPI"


def find_launcher(command_line: str | None = None, environ: Mapping[str, str] = os.environ) -> Launcher:
    """Return the launcher: the given command line, the mpirun beside this Python, that on PATH, or srun under Slurm."""
    if command_line:
        words = shlex.split(command_line)
        program = shutil.which(words[0])
        if program is None:
            raise ConfigError(f"launcher: {words[0]} does not exist")
        return _identify(program, words[1:])
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None and "SLURM_JOB_ID" in environ:
        program = shutil.which("srun")
    if program is None:
        raise ConfigError(f"no mpirun next to this Python or on PATH: {pip_install('mpich')}, or load your MPI")
    return _identify(program, ())


def _identify(program: str, options: Sequence[str]) -> Launcher:
    try:
        process = run_program([program, "--version"], _PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"launcher: {program} --version: {error}") from error
    output = (process.stdout + process.stderr).decode(errors="replace")
    words = (program, *options)
    if output.startswith("slurm"):
        return Launcher("Slurm", words)
    family = mpi_family(output)
    if family == "Open MPI":
        version = re.search(r"(\d+)\.\d+", output)
        return Launcher(family, words, int(version[1]) if version else 5)
    if family in ("MPICH", "Intel MPI", "MVAPICH"):
        return Launcher("MPICH", words)
    first = (output.splitlines() or ["nothing"])[0]
    raise ConfigError(f"launcher: {program} --version says {first!r}; expected mpirun of MPICH or Open MPI, or srun")


def start_command(
    launcher: Launcher,
    ranks: int,
    hosts: Hosts,
    command: Sequence[str],
    *,
    root: bool = os.geteuid() == 0,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return the command line that starts `command` as `ranks` ranks; without hosts, on the batch job's or this one.

    More ranks than cores are allowed, and ranks are not bound to cores, since they have threads of their own. `root`:
    Open MPI refuses the superuser unless told.
    """
    build = {"MPICH": _mpich, "Open MPI": _open_mpi, "Slurm": _srun}[launcher.family]
    return [*launcher.words, *build(launcher, ranks, hosts, root, environ), *command]


def _mpich(launcher: Launcher, ranks: int, hosts: Hosts, root: bool, environ: Mapping[str, str]) -> list[str]:
    return [*(("-hosts", _with_slots(hosts)) if hosts else ()), "-n", str(ranks)]


def _open_mpi(launcher: Launcher, ranks: int, hosts: Hosts, root: bool, environ: Mapping[str, str]) -> list[str]:
    words = ["--allow-run-as-root"] if root else []
    if "--map-by" not in launcher.words:
        words += ["--map-by", ":OVERSUBSCRIBE"] if launcher.version >= 5 else ["--oversubscribe"]
    if "--bind-to" not in launcher.words:
        words += ["--bind-to", "none"]
    if hosts:
        words += ["--host", _with_slots(hosts)]
    if hosts or in_batch_job(environ):
        words += [word for name in sorted(environ) if _PASSED_ON.fullmatch(name) for word in ("-x", name)]
    return [*words, "-n", str(ranks)]


def _srun(launcher: Launcher, ranks: int, hosts: Hosts, root: bool, environ: Mapping[str, str]) -> list[str]:
    # `launch`, not srun, decides what a rank's end means for the others.
    words = [f"--ntasks={ranks}", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
    if hosts:
        words += [f"--nodes={len(hosts)}", f"--nodelist={','.join(hosts)}"]
        per_host = max(hosts.values())
        if per_host * len(hosts) == ranks:
            words.append(f"--ntasks-per-node={per_host}")
    if environ.get("SLURM_CPUS_PER_TASK"):  # sbatch's, which srun does not read since 22.05
        words.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    tasks = environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and ranks > int(tasks):
        words.append("--overcommit")
    if "SLURM_STEP_ID" in environ:  # inside a step, which has taken all of the job's resources
        words.append("--overlap")
    return words


def _with_slots(hosts: Hosts) -> str:
    return ",".join(f"{name}:{slots}" for name, slots in hosts.items())


# Hosts


def parse_hosts(text: str, source: str = "--hosts") -> dict[str, int | None]:
    """Return the slots (None if not given) of hosts written "a:2,b:2" or "a,b"."""
    return _collect((part.strip() for part in text.split(",")), source)


def read_hosts(path: Path) -> dict[str, int | None]:
    """Return the slots of the hosts in a file of Open MPI's ("a slots=2") or MPICH's kind ("a:2")."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hosts: {path}: {getattr(error, 'strerror', None) or error}") from error
    text = (line.partition("#")[0].strip() for line in lines)
    return _collect((line for line in text if line), str(path))


def _collect(lines: Iterable[str], source: str) -> dict[str, int | None]:
    hosts: dict[str, int | None] = {}
    for line in lines:
        parts = re.fullmatch(r"([\w.-]+)(?:(?::|\s+slots\s*=\s*)([1-9]\d*))?(?:\s+max[-_]slots\s*=\s*\d+)?", line)
        if parts is None:
            raise ConfigError(f"{source}: {line!r}: expected HOST, HOST:SLOTS or, in a file, HOST slots=SLOTS")
        if parts[1] in hosts:
            raise ConfigError(f"{source}: {parts[1]} appears twice; write {parts[1]}:SLOTS once")
        hosts[parts[1]] = int(parts[2]) if parts[2] else None
    if not hosts:
        raise ConfigError(f"{source}: no hosts")
    return hosts


def default_host_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the host file that the environment names, as Kubernetes' MPI operator does."""
    return next((Path(environ[name]) for name in _HOST_FILES if environ.get(name)), None)


def in_batch_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a batch system may start ranks on other hosts."""
    return any(environ.get(name) for name in _BATCH_JOBS)


def spread(ranks: int, hosts: Mapping[str, int | None]) -> dict[str, int]:
    """Return ranks by host: filling slots in order (one by default), or evenly if no host has a number of slots."""
    if not any(hosts.values()):
        share, more = divmod(ranks, len(hosts))
        slots = {host: share + (number < more) for number, host in enumerate(hosts)}
    else:
        slots = {host: count or 1 for host, count in hosts.items()}
        if sum(slots.values()) < ranks:
            raise ConfigError(f"{ranks} ranks, but {sum(slots.values())} slots on {_with_slots(slots)}")
    left, placed = ranks, {}
    for host, room in slots.items():
        if min(room, left) > 0:
            placed[host] = min(room, left)
            left -= placed[host]
    return placed
