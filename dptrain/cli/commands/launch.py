"""`python -m dptrain launch`: runs a command on several ranks under mpirun or srun, and ensures that it ends."""

import os
import shutil
import signal
import time
from argparse import ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from subprocess import SubprocessError

from dptrain.cli.options.parser import Parser
from dptrain.errors import AgreedError, ConfigError, ExitCode
from dptrain.runtime import signals
from dptrain.runtime.launch import supervisor
from dptrain.runtime.launch.job import Job, Start, code_of_stop, own_addresses, say
from dptrain.runtime.launch.launcher import THREAD_VARIABLES, detect_launch, threads_of_a_rank, usable_cores
from dptrain.runtime.launch.mpirun import (
    Hosts,
    Launcher,
    default_host_file,
    find_launcher,
    in_batch_job,
    parse_hosts,
    read_hosts,
    spread,
    start_command,
)
from dptrain.runtime.launch.supervisor import NOT_EXECUTABLE, NOT_FOUND
from dptrain.runtime.output import streams
from dptrain.runtime.programs import run_program
from dptrain.runtime.storage.files import writing

_DESCRIPTION = """\
Run any command on several ranks, under the installed mpirun or srun:

  python -m dptrain launch -n 4 -- python -m dptrain --epochs 10
  python -m dptrain launch -n 4 --log-dir logs --restarts 3 -- python script.py
  python -m dptrain launch --hosts a:4,b:4 -- python script.py

A rank that fails, or exits while others wait for it, stops all of them. SIGTERM, SIGINT and SIGUSR1 are
forwarded to the ranks, so that they can save and stop; a second signal stops them at once. Nothing is left behind, even
after kill -9.

The exit code is that of the first rank that failed, 128 + n for signal n.
"""

# Exit codes without a restart: success, configuration, data, preempted, a command that cannot be run.
_FINAL = (
    int(ExitCode.OK),
    int(ExitCode.CONFIG),
    int(ExitCode.DATA),
    int(ExitCode.PREEMPTED),
    NOT_EXECUTABLE,
    NOT_FOUND,
)
# Seconds: before the first restart, doubled for each further one; the longest; for a host to answer.
_FIRST_WAIT, _LONGEST_WAIT, _PROBE = 1.0, 60.0, 30.0
_LOCAL = ("127.0.0.1",)


def launch(arguments: Sequence[str]) -> int:
    """Run the subcommand and return its exit code."""
    stops = _listen()
    options, command = _parse(arguments)
    around = detect_launch()
    if around is not None and around.size > 1:
        message = f"launch starts the ranks itself: run it once, without {around.launcher}'s launcher"
        raise AgreedError("launch", ExitCode.CONFIG, message, [])
    launcher = find_launcher(options.launcher)
    hosts = _hosts(options)
    ranks = _ranks(options, hosts)
    least = ranks if options.min_ranks is None else options.min_ranks
    if not 1 <= least <= ranks:
        raise ConfigError(f"--min-ranks {least}: expected 1 to {ranks}, the number of ranks")
    if options.restarts and _begins_anew(command):
        raise ConfigError(
            f"--restarts {options.restarts}: without --out a restart would start over at epoch 1; add --out DIR to "
            "the command, so that a restart resumes from the last checkpoint there"
        )
    placed = spread(ranks, hosts) if hosts else {}
    start = Start(
        launcher,
        tuple(command),
        ranks,
        placed,
        _addresses(options.address, placed),
        log_dir=options.log_dir or "",
        log_format=options.log_format,
        prefix=options.prefix,
        grace=options.grace,
        start_timeout=options.start_timeout,
    )
    if start.addresses == _LOCAL and (trouble := _cannot_run(command[0])) is not None:
        code, why = trouble
        say(f"cannot run {command[0]}: {why}")
        return code
    if start.addresses == _LOCAL and start.log_dir:
        _open_logs(Path(start.log_dir), ranks)
    return _with_restarts(start, hosts, least, options, stops)


def _listen() -> list[int]:
    """Return a list that collects stop signals, including those received since process start."""
    early = signals.caught()
    stops = [] if early is None else [early]
    for number in supervisor.STOPPING:
        signal.signal(number, lambda received, _: stops.append(received))
    return stops


def _parse(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    words = list(arguments)
    split = words.index("--") if "--" in words else len(words)
    command = words[split + 1 :]
    if not command and not {"-h", "--help"} & set(words):
        raise ConfigError("launch: no command; write it after --, as in launch -n 4 -- python script.py")
    return build_parser().parse_args(words[:split]), command


def build_parser() -> Parser:
    """Return the parser of what stands before the command."""
    parser = Parser(
        prog="dptrain launch",
        usage="python -m dptrain launch -n RANKS [options] -- COMMAND",
        description=_DESCRIPTION,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--ranks", type=_count, metavar="RANKS", help="number of ranks (default: the slots of all hosts)")
    add("--hosts", metavar="A:4,B:4", help="hosts with their slots; without numbers, ranks are spread evenly")
    add("--hostfile", metavar="FILE", help="file with the same, one host per line: A:4 or A slots=4")
    add(
        "--launcher",
        metavar="PROGRAM",
        help="mpirun or srun, with your own options (default: the one that is installed)",
    )
    add("--threads", type=_count, metavar="N", help="threads per rank (default: its share of the cores)")
    add("--log-dir", metavar="DIR", help="write the output of rank K to DIR/rank-K.log; show rank 0 and errors")
    text = "lines of these logs: text: time in UTC, rank, message; json: an object each; plain (default: text)"
    add("--log-format", choices=supervisor.LOG_FORMATS, default="text", help=text)
    add("--prefix", action="store_true", help='prefix each line with its rank: "[2] "')
    add(
        "--restarts",
        type=_natural,
        default=0,
        metavar="N",
        help="start again up to N times after a failure (default: 0)",
    )
    add("--min-ranks", type=_count, metavar="N", help="restart on the remaining hosts, with at least N ranks")
    text = "wait this long for the other ranks to end after one has (default: 30)"
    add("--grace", type=_seconds, default=30.0, metavar="SECONDS", help=text)
    text = "wait this long for all ranks to start (default: 300)"
    add("--start-timeout", type=_seconds, default=300.0, metavar="SECONDS", help=text)
    add("--address", metavar="HOST", help="address by which other hosts reach this one (default: detected)")
    return parser


def _cannot_run(program: str) -> tuple[int, str] | None:
    """Return the exit code and reason where a program cannot be run on this host, as a shell would."""
    if shutil.which(program) is not None:
        return None
    if os.path.isdir(program):
        return NOT_EXECUTABLE, "it is a folder"
    if os.sep in program and os.path.exists(program):
        return NOT_EXECUTABLE, "it is not executable"
    if os.path.isfile(program) and program.endswith(".py"):
        return NOT_FOUND, f"not found on PATH; write python {program}"
    return NOT_FOUND, "no such file" if os.sep in program else "not found on PATH"


def _open_logs(folder: Path, ranks: int) -> None:
    """Create the ranks' logs before MPI starts; OutputError where that fails."""
    for rank in range(ranks):
        path = folder / f"rank-{rank}.log"
        with writing(path, advice="choose another --log-dir"):
            folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))


def _begins_anew(command: Sequence[str]) -> bool:
    """Whether a command is a dptrain training or sweep without `--out`, which cannot resume."""
    words = list(command)
    starts = [index + 2 for index, pair in enumerate(pairwise(words)) if pair == ("-m", "dptrain")]
    starts += [1] if Path(words[0]).name == "dptrain" else []
    if not starts:
        return False
    arguments = words[starts[0] :]
    is_other = arguments and not arguments[0].startswith("-") and arguments[0] not in ("train", "sweep")
    return not (is_other or any(word.partition("=")[0] in ("--out", "--config", "--help", "-h") for word in arguments))


def _count(text: str) -> int:
    return _natural(text, 1)


def _natural(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r}: expected an integer >= {least}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r}: expected seconds >= 0")
    return value


def _hosts(options: Namespace) -> dict[str, int | None]:
    if options.hosts and options.hostfile:
        raise ConfigError("--hosts and --hostfile: expected only one of them")
    if options.hosts:
        return parse_hosts(options.hosts)
    file = Path(options.hostfile) if options.hostfile else default_host_file()
    return {} if file is None else read_hosts(file)


def _ranks(options: Namespace, hosts: Mapping[str, int | None]) -> int:
    if options.ranks is not None:
        return int(options.ranks)
    if hosts:
        return sum(slots or 1 for slots in hosts.values())
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdigit():
        return int(tasks)
    raise ConfigError("launch: the number of ranks is missing; write it as in launch -n 4 -- python script.py")


def _addresses(addresses: str | None, hosts: Hosts) -> tuple[str, ...]:
    if addresses:
        return (addresses,)
    away = [host for host in hosts if host not in ("localhost", *_LOCAL)]
    return own_addresses(away) if away or in_batch_job() else _LOCAL


def _environment(start: Start, restart: int, threads: int | None) -> dict[str, str]:
    environment = {"DPTRAIN_RESTART": str(restart)}
    local = start.addresses == _LOCAL
    if threads is not None:
        environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    elif local:
        environment |= threads_of_a_rank(start.ranks)
    if local and start.ranks > usable_cores():
        # MPICH's waiting ranks yield the core to others.
        environment["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = os.environ.get("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    return environment


# Restarts


def _with_restarts(
    start: Start, hosts: Mapping[str, int | None], least: int, options: Namespace, stops: list[int]
) -> int:
    """Run the job, restart it while it fails and may, and return the last exit code."""
    ranks = start.ranks
    for restart in range(options.restarts + 1):
        start = replace(start, environment=_environment(start, restart, options.threads))
        outcome = Job(start, stops).run()
        if outcome.text:
            streams.write_error(f"dptrain: {outcome.text}\n")
        if outcome.code in _FINAL or stops or restart == options.restarts:
            break
        wait = min(_FIRST_WAIT * 2**restart, _LONGEST_WAIT)
        say(f"restart {restart + 1} of {options.restarts} in {wait:g} s")
        _sleep(wait, stops)
        if stops:
            return code_of_stop(stops[0])
        if least < ranks:
            start = _on_hosts_left(start, hosts or dict(outcome.hosts), ranks, least)
    return outcome.code


def _sleep(seconds: float, stops: Sequence[int]) -> None:
    end = time.monotonic() + seconds
    while not stops and time.monotonic() < end:
        time.sleep(0.1)


def _on_hosts_left(start: Start, hosts: Mapping[str, int | None], wanted_ranks: int, least: int) -> Start:
    """Return a start with as many ranks as fit on the hosts that answer; if these are too few, all are tried again."""
    if len(hosts) < 2:
        return start
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = pool.map(lambda host: _answers(start.launcher, host), hosts)
        left = {host: slots for (host, slots), there in zip(hosts.items(), answers, strict=True) if there}
    # Evenly, as at first, if no host has a number.
    room = sum(spread(wanted_ranks, hosts)[host] if not any(hosts.values()) else left[host] or 1 for host in left)
    ranks = min(wanted_ranks, room)
    if len(left) < len(hosts):
        lost = ", ".join(host for host in hosts if host not in left)
        say(f"{lost} does not answer; slots left: {room}{'' if ranks >= least else f', --min-ranks is {least}'}")
    if ranks < least:
        left, ranks = dict(hosts), wanted_ranks
    return replace(start, ranks=ranks, hosts=spread(ranks, left))


def _answers(launcher: Launcher, host: str) -> bool:
    command = start_command(launcher, 1, {host: 1}, ["true"])
    try:
        return run_program(command, _PROBE).returncode == 0
    except (OSError, SubprocessError):
        return False
