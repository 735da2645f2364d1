"""Runs a command on several ranks, and decides what a rank's end means for the others.

Every rank has a supervisor (`supervisor.py`), connected to the `Job`. Programs that use MPI leave MPI_Finalize
together, so a rank's end has known consequences:

| a rank | the others |
|---|---|
| ends with an error, or by a signal | are ended |
| exits with 0 in the middle, as dptrain says there | are ended: 77 |
| exits with 0 without MPI, while others have it | would wait for it in MPI: are ended |
| exits with 0 after MPI, or preempted, or asked to stop | have a while to end as well |
| is gone together with its supervisor | are ended; mpirun's exit code may say why: so MPI_Abort looks from here |
"""

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dptrain.errors import ExitCode
from dptrain.runtime.launch import children, supervisor
from dptrain.runtime.launch.mpirun import Hosts, Launcher, start_command
from dptrain.runtime.output import streams
from dptrain.runtime.watch import records

# Seconds: between checks; until other ranks are ended after a failure, and if they wait for a missing one; for mpirun
# to explain why a rank was ended; for killed processes to disappear; for mpirun to end after a failure.
_LOOK, _AFTER_FAILURE, _MISSING, _EXPLAIN, _KILLED, _LAUNCHER = 0.1, 0.5, 1.0, 1.0, 3.0, 10.0
_BY_SIGNAL = 128
# Seconds without a child process after which a launcher has lost it.
_CHILDLESS = 10.0
# How many connections besides the ranks' may be unidentified, and for how many seconds.
_STRANGERS, _SILENCE = 64, 30.0


@dataclass(frozen=True)
class Start:
    """Command and options of a job."""

    launcher: Launcher
    command: tuple[str, ...]
    ranks: int
    hosts: Hosts  # empty for this host, or those of the batch job
    addresses: tuple[str, ...]  # by which the ranks reach this host
    log_dir: str = ""  # for each rank's output, or ""
    log_format: str = supervisor.LOG_FORMATS[0]  # of the lines there
    prefix: bool = False  # start lines of output with the rank
    grace: float = 30.0  # seconds for the others once a rank has left normally
    start_timeout: float = 300.0  # seconds until all ranks have started
    environment: Mapping[str, str] = field(default_factory=dict)  # of the ranks, beside this process's


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int  # of the first rank that failed; 128 + n for signal n
    text: str  # one line, or ""
    hosts: dict[str, int]  # ranks by host


@dataclass(frozen=True)
class _Verdict:
    code: int
    text: str = ""


@dataclass(eq=False)
class _Rank:
    number: int
    host: str
    pid: int
    connection: socket.socket
    status: int | None = None  # minus the number of the signal that killed it
    ended: float | None = None  # when it did, or its supervisor was gone
    in_mpi: bool = False
    unfinished: bool = False  # it has met other ranks, and not left them
    missed: float | None = None  # since when others wait for it, or may
    without_log: str = ""  # why its log cannot be written

    @property
    def code(self) -> int:
        """Exit code of an ended rank, as a shell reports it."""
        status = self.status or 0
        if status == 0 and self.unfinished:
            return int(ExitCode.STUCK)
        return status if status >= 0 else _BY_SIGNAL - status


@dataclass(eq=False)
class _Connection:
    """A connection; its first line identifies the rank."""

    socket: socket.socket
    text: bytes = b""
    rank: _Rank | None = field(default=None)
    since: float = field(default_factory=time.monotonic)


class Job:
    """Runs a command on several ranks to its end; its signal handlers append to `signals`."""

    def __init__(self, start: Start, signals: list[int]) -> None:
        self._start = start
        self._signals = signals
        self._obeyed = 0
        self._stop_signal: int | None = None
        self._ranks: dict[int, _Rank] = {}
        self._verdict: _Verdict | None = None
        self._kill_at = self._killed_at = float("inf")
        self._began: float | None = None
        self._mpirun_ended: float | None = None
        self._is_stuck = False  # mpirun will not end by itself
        self._childless: float | None = None  # since when mpirun has had no child process
        self._selector = selectors.DefaultSelector()
        self._token = secrets.token_hex(16)

    def run(self) -> Outcome:
        """Start the ranks, wait for their end, and leave nothing behind."""
        if self._signals:
            verdict = _stopped_before(self._signals[0])
            return Outcome(verdict.code, verdict.text, {})
        local = self._start.addresses == ("127.0.0.1",)
        with self._selector, socket.create_server(("127.0.0.1" if local else "", 0)) as server:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
            process = self._launch(server.getsockname()[1])
            try:
                self._watch(process)
                self._end(process)
            finally:
                self._tell("kill")
                _kill_group(process)
                for key in list(self._selector.get_map().values()):
                    if isinstance(key.data, _Connection):
                        key.data.socket.close()
        verdict = self._verdict or _Verdict(int(ExitCode.INTERNAL))
        return Outcome(verdict.code, verdict.text, dict(Counter(rank.host for rank in self._ranks.values())))

    def _launch(self, port: int) -> "subprocess.Popen[bytes]":
        start = self._start
        log_dir = os.path.abspath(start.log_dir) if start.log_dir else ""
        environ = {**os.environ, **start.environment, supervisor.TOKEN: self._token}
        environ.pop(children.VARIABLE, None)  # where a rank's child starts ranks
        command = start_command(
            start.launcher,
            start.ranks,
            start.hosts,
            [
                *(sys.executable, "-I", "-S", str(Path(supervisor.__file__))),
                *(",".join(start.addresses), str(port), start.launcher.rank_variable),
                *(log_dir, start.log_format, "prefix" if start.prefix else "", *start.command),
            ],
            environ=environ,
        )
        parent = os.getpid()
        if start.launcher.family != "Slurm":
            self._began = time.monotonic()
        return subprocess.Popen(
            command,
            env=environ,
            # The terminal's signals and its input come to this process alone.
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            start_new_session=True,
            preexec_fn=lambda: supervisor.die_with(parent),
        )

    # Events

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        """Listen until all is over except mpirun itself."""
        while True:
            for key, _ in self._selector.select(_LOOK):
                self._hear(key)
            now = time.monotonic()
            self._drop_strangers(now)
            if self._mpirun_ended is None and _status(process) is not None:
                self._mpirun_ended = now
            self._obey(now)
            if self._verdict is None:
                self._verdict = self._judge(now, _status(process)) or self._without_proxy(now, process.pid)
                if self._verdict is not None:
                    self._kill_at = min(self._kill_at, now + self._patience())
            if now >= self._kill_at:
                self._kill_at, self._killed_at = float("inf"), now
                self._tell("kill")
            if self._verdict is not None and not self._running():
                self._tell("leave")
                return
            if now - self._killed_at > _KILLED:
                return

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            with suppress(OSError):
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]  # the server
                connection.setblocking(False)
                supervisor.notice_lost_hosts(connection)
                self._selector.register(connection, selectors.EVENT_READ, _Connection(connection))
            return
        peer: _Connection = key.data
        try:
            received = peer.socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        *lines, peer.text = (peer.text + received).split(b"\n")
        for line in lines:
            if not self._note(peer, line.decode(errors="replace").split()):
                received = b""
        if not received or len(peer.text) > 4096:
            self._selector.unregister(peer.socket)
            peer.socket.close()
            if peer.rank is not None and peer.rank.ended is None:
                peer.rank.ended = time.monotonic()

    def _drop_strangers(self, now: float) -> None:
        """Close connections that have not identified themselves in time, or are too many: anybody can connect."""
        keys = [key for key in self._selector.get_map().values() if isinstance(key.data, _Connection)]
        strangers = sorted((key.data for key in keys if key.data.rank is None), key=lambda connection: connection.since)
        room = _STRANGERS + self._start.ranks
        for number, connection in enumerate(strangers):
            if now - connection.since > _SILENCE or number < len(strangers) - room:
                self._selector.unregister(connection.socket)
                connection.socket.close()

    def _note(self, connection: _Connection, words: list[str]) -> bool:
        """Handle a supervisor's message; return whether it is genuine."""
        rank = connection.rank
        if rank is None:
            if len(words) != 5 or words[0] != "hello":
                return False
            _, token, number, host, pid = words
            if not secrets.compare_digest(token.encode(), self._token.encode()):
                return False
            rank = connection.rank = _Rank(int(number), host, int(pid), connection.socket)
            self._ranks[rank.number] = rank
            self._began = self._began or time.monotonic()
            if self._stop_signal is not None:
                _send(rank, f"signal {self._stop_signal}")
        elif words[0] == "mpi":
            rank.in_mpi = True
        elif words[0] == "unfinished":
            rank.unfinished = True
        elif words[0] == "log":
            rank.without_log = " ".join(words[1:])
        elif words[0] == "exit":
            rank.status, rank.ended = int(words[1]), time.monotonic()
        return True

    def _obey(self, now: float) -> None:
        """Forward the first signal, so that the ranks can save; end at once at the second."""
        for number in self._signals[self._obeyed :]:
            self._obeyed += 1
            name = signal.Signals(number).name
            if self._stop_signal is None and self._ranks:
                self._stop_signal = number
                say(f"{name}: asking the ranks to save and stop; a second signal stops them at once")
                self._tell(f"signal {number}")
            else:
                ended = _Verdict(_BY_SIGNAL + (self._stop_signal or number), f"launch: {name}: stopped at once")
                self._verdict = ended if self._ranks else _stopped_before(number)
                self._kill_at = now

    # Verdicts

    def _judge(self, now: float, mpirun: int | None) -> _Verdict | None:
        ranks = sorted(self._ranks.values(), key=lambda rank: (rank.ended or now, rank.number))
        for rank in ranks:
            if rank.without_log:
                text = f"{rank.without_log}; choose another --log-dir"
                return _Verdict(int(ExitCode.IO), self._describe(rank, text))
            if rank.status is not None and self._failed(rank):
                how = _how(rank.status)
                if rank.unfinished and rank.status == 0:
                    how += " in the middle of the job (C's _exit, or MPI_Abort?)"
                return _Verdict(rank.code, self._describe(rank, how))
        everybody = len(ranks) == self._start.ranks
        unexplained = [rank for rank in ranks if self._unexplained(rank)]
        if everybody and not unexplained and not self._running():
            code = next((rank.code for rank in ranks if rank.status), 0)
            if (
                self._stop_signal == signal.SIGUSR1 and code == _BY_SIGNAL + self._stop_signal
            ):  # a code with no other meaning
                text = "launch: the command does not handle SIGUSR1, or did not yet: nothing was saved"
                return _Verdict(int(ExitCode.PREEMPTED), text)
            return _Verdict(code)
        # Connections may still hold earlier messages.
        if mpirun is not None and self._mpirun_ended is not None and now - self._mpirun_ended > 2 * _LOOK:
            return self._launcher_ended(mpirun, everybody)
        for lost in unexplained:
            # If all ranks have ended, none is kept waiting.
            if now - (lost.ended or now) > (_EXPLAIN if self._running() else _LAUNCHER):
                how = "is gone, and its supervisor too" if lost.status is None else _how(lost.status)
                return _Verdict(lost.code or _BY_SIGNAL + signal.SIGKILL, self._describe(lost, how))
        if self._began is not None and not everybody and now - self._began > self._start.start_timeout:
            missing = sorted(set(range(self._start.ranks)) - set(self._ranks))
            text = f"launch: {_ranks(missing)} did not start within {self._start.start_timeout:g} s"
            return _Verdict(int(ExitCode.STUCK), text)
        return self._left_alone(now, ranks)

    def _without_proxy(self, now: float, mpirun: int) -> _Verdict | None:
        """Judge an mpirun whose proxy process has died: MPICH's waits for it for ever."""
        if len(self._ranks) == self._start.ranks or self._start.launcher.family == "Slurm" or has_children(mpirun):
            self._childless = None
            return None
        self._childless = self._childless or now
        if now - self._childless < _CHILDLESS:
            return None
        name = os.path.basename(self._start.launcher.words[0])
        self._is_stuck = True
        text = f"launch: {name} (pid {mpirun}) is waiting, but its process that starts the ranks is gone"
        return _Verdict(int(ExitCode.STUCK), text)

    def _failed(self, rank: _Rank) -> bool:
        return not self._in_peace(rank) and not self._unexplained(rank)

    def _in_peace(self, rank: _Rank) -> bool:
        """Whether a rank has ended as it should, as far as it knows."""
        stopped = {_BY_SIGNAL + number for number in supervisor.STOPPING} if self._stop_signal is not None else set()
        return rank.code in {0, int(ExitCode.PREEMPTED), *stopped}

    def _unexplained(self, rank: _Rank) -> bool:
        """Whether a rank's end has a cause elsewhere: mpirun ends the others when one calls MPI_Abort."""
        if rank.status is None:
            return rank.ended is not None
        return self._stop_signal is None and rank.status == -signal.SIGTERM

    def _launcher_ended(self, status: int, everybody: bool) -> _Verdict:
        name = os.path.basename(self._start.launcher.words[0])
        if status < 0:
            return _Verdict(_BY_SIGNAL - status, f"launch: {name} {_how(status)}")
        code = status or int(ExitCode.INTERNAL)
        if not everybody:
            text = f"launch: {name} exited with code {status} before all ranks had started"
        else:
            text = f"launch: {name} ended the job with exit code {status}"
        return _Verdict(code, text)

    def _left_alone(self, now: float, ranks: Sequence[_Rank]) -> _Verdict | None:
        """Judge ranks that have left normally while others go on."""
        running = [rank for rank in ranks if rank.status is None and rank.ended is None]
        for rank in ranks:
            if rank.status is None:
                continue
            before_mpi = rank.code == 0 and not rank.in_mpi
            if before_mpi and not any(other.in_mpi for other in running):
                rank.missed = None  # not a program of MPI, or not yet
                continue
            rank.missed = rank.missed or now
            waited = now - rank.missed
            limit = _MISSING if before_mpi else self._start.grace
            if not running or waited <= limit:
                continue
            others = _ranks([other.number for other in running])
            if before_mpi:
                how = f"exited with code 0 without MPI, so that {others} would wait for it forever"
            else:
                how = f"{_how(rank.status)}, and {others} did not within {limit:g} s"
            return _Verdict(rank.code or int(ExitCode.STUCK), self._describe(rank, how))
        return None

    def _describe(self, rank: _Rank, how: str) -> str:
        return f"rank {rank.number}/{self._start.ranks} host {rank.host} pid {rank.pid} launch: {how}"

    def _patience(self) -> float:
        """Seconds that the other ranks have to end by themselves and say why, once one has failed."""
        verdict = self._verdict
        failed = any(rank.status is not None and self._failed(rank) for rank in self._ranks.values())
        return _AFTER_FAILURE if verdict is not None and failed else 0.0

    def _running(self) -> bool:
        return any(rank.status is None and rank.ended is None for rank in self._ranks.values())

    # The end

    def _tell(self, line: str) -> None:
        for rank in self._ranks.values():
            _send(rank, line)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait for mpirun, which may still have output to show; only briefly after a failure or a signal."""
        began = time.monotonic()
        while _status(process) is None and not self._is_stuck:
            failed = self._verdict is None or self._verdict.code != 0 or len(self._signals) > self._obeyed
            if failed and time.monotonic() - began > _LAUNCHER:
                return
            time.sleep(_LOOK / 4)


def _stopped_before(number: int) -> _Verdict:
    text = f"launch: {signal.Signals(number).name}: received before the ranks had started; nothing was trained"
    return _Verdict(code_of_stop(number), text)


def code_of_stop(number: int) -> int:
    """Return the exit code of a job that a signal stopped before it began."""
    return int(ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.PREEMPTED)


def has_children(pid: int) -> bool:
    """Whether a process has living children; True where the system does not say."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return True
    processes = [records.look_up(child) for child in children]
    return any(child is not None and child.state not in "ZX" for child in processes)


def say(text: str) -> None:
    """Print a line of `launch` to standard error, in one write."""
    streams.write_error(f"dptrain: launch: {text}\n")


def _send(rank: _Rank, line: str) -> None:
    with suppress(OSError):  # its supervisor is gone
        rank.connection.sendall(f"{line}\n".encode())


def _status(process: "subprocess.Popen[bytes]") -> int | None:
    """Return how a process ended, or None; it stays a zombie, so that its PID and group are not reused."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    number = -status
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"was killed by {name}{' (out of memory?)' if number == signal.SIGKILL else ''}"


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def own_addresses(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return addresses by which hosts may reach this one: its end of routes to them, and its names."""
    addresses: dict[str, None] = {}
    for host in hosts:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            addresses[probe.getsockname()[0]] = None
    return (*addresses, *dict.fromkeys((socket.gethostname(), socket.getfqdn())))
