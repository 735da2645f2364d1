r"""The process that `python -m dptrain launch` starts as each rank: it runs the command, and reports how that ended.

    launch -- mpirun -- supervisor -- command (leads a process group of its own)
       \_____ TCP ______/       \---- guard (kills that group when the supervisor is gone)

The command dies with its supervisor, and the supervisor ends the command when `launch` is gone: whichever of these is
killed with -9, on whatever host, nothing stays behind. The supervisor itself exits only when `launch` says so. Thus
`launch` decides what a rank's exit means for the others, since every mpirun judges differently.

It is run as a script, by `python -I -S`, and imports next to nothing: it starts once for each rank. It speaks lines:

| says | hears |
|---|---|
| `hello TOKEN RANK HOST PID` | `signal NUMBER`: pass it on |
| `mpi`: the command has loaded an MPI library | `kill`: end the command at once |
| `unfinished`: it has ended without leaving the other ranks (`DEPARTURE`) | `leave`: all is decided |
| `exit STATUS`: minus the signal's number if killed by one | |
| `log ERROR`: its log cannot be written, and the command does not run | |
"""

import ctypes
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

TOKEN = "DPTRAIN_LAUNCH_TOKEN"
# The variable with the command's descriptor, and dptrain's notices there when it joins the other ranks, and when it has
# left them.
DEPARTURE, JOINED, LEFT = "DPTRAIN_DEPARTURE_FD", b"j", b"l"
# Signals that ask a job to save and stop.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# Seconds between checks: for an MPI library; of an ending command; of mpirun's process on this host.
_LOOK, _ENDING, _CALM = 0.2, 0.05, 1.0
# Seconds: for a connection to one address; for a killed command's last output; for processes that a stopped command has
# left behind.
_CONNECT, _LAST_OUTPUT, _LEFT_BEHIND = 10.0, 0.5, 30.0
# Options of Linux's prctl.
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36
_LONGEST_LINE = 65536
# How the lines of a log look, see `log_line`; and the begin of a line that has been written so.
LOG_FORMATS = ("text", "json", "plain")
_STAMPED = re.compile(r'(\{"time": ")?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z("| \[\d+\] )')
# Exit codes, as shells have them.
NOT_FOUND, NOT_EXECUTABLE = 127, 126


def main(arguments: Sequence[str]) -> int:
    """Run a command as one rank until `launch` lets go; return 0, or 1 where `launch` cannot know the end.

    Arguments: `launch`'s addresses, comma-separated; its port; the environment variable of the rank; a log folder or
    ""; how its lines look (`LOG_FORMATS`); "prefix" to mark shown lines with the rank, or ""; the command.
    """
    addresses, port, variable, log_dir, log_format, prefix, *command = arguments
    rank = int(os.environ[variable])
    try:
        launch = _connect(addresses.split(","), int(port))
    except OSError as error:
        sys.stderr.write(f"dptrain: rank {rank} host {socket.gethostname()} launch: {error}\n")
        return 1
    try:
        outputs = _Outputs(rank, log_dir, log_format, bool(prefix))
    except OSError as error:
        with suppress(OSError):
            hello = f"hello {os.environ[TOKEN]} {rank} {_host()} {os.getpid()}"
            launch.sendall(f"{hello}\nlog {error.filename}: {error.strerror}\n".encode())
            launch.recv(1)
        return 0
    return _Supervisor(rank, launch, outputs).run(command)


def _connect(addresses: Sequence[str], port: int) -> socket.socket:
    """Connect to `launch` by the first of its addresses that works."""
    reasons = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), _CONNECT)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
        else:
            connection.settimeout(None)
            notice_lost_hosts(connection)
            return connection
    raise OSError(f"cannot reach launch at port {port} of {'; '.join(reasons)}; see --address")


def notice_lost_hosts(connection: socket.socket) -> None:
    """Make a connection fail within half a minute when the other host disappears."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def log_line(line: str, rank: int, stream: str, log_format: str, fields: Mapping[str, object] | None = None) -> str:
    """Return a line of output, without its end, as a line of a log.

    `text` has "2026-11-29T14:55:03.123Z [0] " before it: UTC and the rank; `json` is an object with time, rank, stream
    and message, and these `fields`; `plain` is the line. A line that has been made so already stays.
    """
    if log_format == "plain" or _STAMPED.match(line):
        return line
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now * 1000) % 1000:03d}Z"
    if log_format == "text":
        return f"{stamp} [{rank}] {line}"
    import json

    message = line.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return json.dumps({"time": stamp, "rank": rank, "stream": stream, "message": message, **(fields or {})})


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with(parent: int) -> None:
    """Have this forked process killed when its parent dies, also if it has already."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Outputs:
    """Routes a rank's standard output and error.

    With `log_dir`, `rank-N.log` gets both, as `log_line` writes them, and only rank 0's standard output is also shown.
    `prefix` marks shown lines with "[rank] ".
    """

    def __init__(self, rank: int, log_dir: str, log_format: str, prefix: bool) -> None:
        self._rank, self._log_format = rank, log_format
        self._unended = ""  # the stream whose line in the log has no end yet
        self._prefix = f"[{rank}] ".encode() if prefix else b""
        self._log: BinaryIO | None = None
        self._show_output = not log_dir or prefix or rank == 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        # The ends that the command writes to, and ours.
        self._pipes = [os.pipe(), os.pipe()] if log_dir or prefix else []
        if log_dir:
            os.makedirs(log_dir, exist_ok=True)
            restarted = os.environ.get("DPTRAIN_RESTART", "0") != "0"
            self._log = open(os.path.join(log_dir, f"rank-{rank}.log"), "ab" if restarted else "wb")  # noqa: SIM115

    def redirect(self) -> None:
        """Redirect this process, which will become the command."""
        for descriptor, (_, end) in enumerate(self._pipes, 1):
            os.dup2(end, descriptor)

    def start(self) -> None:
        """Forward the command's output in threads: where nobody reads it, only they block."""
        for descriptor, (end, theirs) in enumerate(self._pipes, 1):
            os.close(theirs)
            shown = descriptor if descriptor == 2 or self._show_output else None
            stream = ("stdout", "stderr")[descriptor - 1]
            thread = threading.Thread(target=self._pass_on, args=(end, shown, stream), daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def busy(self) -> bool:
        """Whether output is still being forwarded."""
        return any(thread.is_alive() for thread in self._threads)

    def finish(self) -> None:
        """Wait briefly for the remaining output."""
        for thread in self._threads:
            thread.join(_LAST_OUTPUT)

    def _pass_on(self, source: int, shown: int | None, stream: str) -> None:
        with open(source, "rb") as lines:
            while line := lines.readline(_LONGEST_LINE):
                if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                    line += b"\n"  # the last one, and others may write after it
                if shown is not None and not _write(shown, self._prefix + line):
                    shown = None
                if self._log is not None:
                    with self._lock:
                        self._keep(line, stream)

    def _keep(self, line: bytes, stream: str) -> None:
        """Write a line to the log, or a part of one that is too long; what the other stream has begun ends before."""
        ends_other = b"\n" if self._unended not in ("", stream) else b""
        if self._log_format == "json" or (self._log_format == "text" and self._unended != stream):
            text = line.decode(errors="surrogateescape")
            end = "\n" if self._log_format == "json" or text.endswith("\n") else ""
            kept = log_line(text.removesuffix("\n"), self._rank, stream, self._log_format)
            line = f"{kept}{end}".encode(errors="surrogateescape")
        try:
            if self._log is not None:
                self._log.write(ends_other + line)
                self._log.flush()
                self._unended = "" if line.endswith(b"\n") else stream
        except OSError as error:
            _write(2, f"dptrain: {self._log.name if self._log else ''}: {error.strerror}; the log ends here\n".encode())
            self._log = None


def _write(descriptor: int, text: bytes) -> bool:
    """Write all of it; return whether anybody reads it."""
    try:
        while text:
            text = text[os.write(descriptor, text) :]
    except OSError:
        return False
    return True


class _Supervisor:
    def __init__(self, rank: int, launch: socket.socket, outputs: _Outputs) -> None:
        self._rank = rank
        self._launch = launch
        self._outputs = outputs
        self._parent = os.getppid()
        self._command = 0  # its PID, and its group's
        self._guard = 0  # its PID
        self._status: int | None = None
        self._ended = 0.0  # when, on the monotonic clock
        self._reported = self._stopping = self._in_mpi = False
        self._departure, self._departing = os.pipe()

    def run(self, command: Sequence[str]) -> int:
        token = os.environ.pop(TOKEN)
        waking, signalled = os.pipe()
        for end in (waking, signalled):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        for number in (*STOPPING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # it wakes the loop below
        _prctl(_CHILD_SUBREAPER, 1)  # adopt what the command leaves behind
        self._command = self._fork(command)
        os.close(self._departing)
        os.set_blocking(self._departure, False)
        self._guard, guard = _guard(self._command)
        self._outputs.start()
        self._say(f"hello {token} {self._rank} {_host()} {self._command}")
        code = self._loop(waking)
        with suppress(OSError):
            os.write(guard, b".")
        return code

    def _fork(self, command: Sequence[str]) -> int:
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until they end the child
        child = os.fork()
        if child:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return child
        try:
            os.setpgid(0, 0)
            die_with(parent)
            signal.set_wakeup_fd(-1)
            # Python ignores the last two, which children would inherit.
            for number in (*STOPPING, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._outputs.redirect()
            os.set_inheritable(self._departing, True)
            os.environ[DEPARTURE] = str(self._departing)
            os.execvp(command[0], list(command))
        except OSError as error:
            _write(2, f"dptrain: cannot run {command[0]}: {error.strerror}\n".encode())
            os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)

    def _loop(self, waking: int) -> int:
        poll = select.poll()
        for descriptor in (waking, self._launch.fileno()):
            poll.register(descriptor, select.POLLIN)
        leave = False
        heard = b""
        while True:
            self._reap()
            if self._reported:
                self._end_orphans()
            if leave and not self._outputs.busy:
                return 0
            if not (self._in_mpi or self._status is not None) and _loaded_mpi(self._command):
                self._in_mpi = True
                self._say("mpi")
            ending = leave or (self._status is not None and not self._reported)
            wait = _ENDING if ending else _CALM if self._in_mpi or self._reported else _LOOK
            if os.getppid() != self._parent:  # mpirun may not notice
                self._kill()
                return 1
            for descriptor, _ in poll.poll(wait * 1000):
                if descriptor == waking:
                    for number in os.read(waking, 64):
                        if number in STOPPING:
                            self._stop(number)
                    continue
                received = self._receive()
                if not received:  # launch is gone
                    self._kill()
                    return 1
                *lines, heard = (heard + received).split(b"\n")
                for word, *rest in map(bytes.split, lines):
                    if word == b"signal":
                        self._stop(int(rest[0]))
                    elif word == b"kill":
                        self._kill()
                        return 0
                    elif word == b"leave":
                        leave = True

    def _receive(self) -> bytes:
        try:
            return self._launch.recv(4096)
        except OSError:
            return b""

    def _say(self, line: str) -> None:
        with suppress(OSError):  # the next read finds launch gone
            self._launch.sendall(f"{line}\n".encode())

    def _stop(self, number: int) -> None:
        """Forward a signal once: the same event may come from `launch`, mpirun and Slurm."""
        if not self._stopping:
            self._stopping = True
            self._signal(number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._outputs.finish()

    def _signal(self, number: int) -> bool:
        """Signal the command's process group; return whether any of it is left."""
        try:
            os.killpg(self._command, number)
        except ProcessLookupError:
            if self._status is not None:
                return False
            try:
                os.kill(self._command, number)  # it has not yet come to its group
            except ProcessLookupError:
                return False
        except PermissionError:
            return False
        return True

    def _reap(self) -> None:
        """Collect ended children, and report the command's end to launch."""
        # What a command leaves behind ends with it; after a stop request it gets time, since a shell dies at once while
        # its Python child saves.
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not child:
                break
            if child == self._command:
                self._status, self._ended = os.waitstatus_to_exitcode(status), time.monotonic()
        if self._status is None or self._reported:
            return
        if self._stopping and self._signal(0) and time.monotonic() - self._ended < _LEFT_BEHIND:
            return
        self._signal(signal.SIGKILL)
        self._reported = True
        if self._unfinished():
            self._say("unfinished")
        self._say(f"exit {self._status}")

    def _end_orphans(self) -> None:
        """Kill what the command left in sessions of its own, and we inherited."""
        pid = os.getpid()
        with suppress(OSError):  # the system does not say
            for child in map(int, _read(f"/proc/{pid}/task/{pid}/children").split()):
                if child != self._guard:
                    os.kill(child, signal.SIGKILL)

    def _unfinished(self) -> bool:
        """Whether the command's last notice is that it meets the other ranks."""
        received = b""
        with suppress(BlockingIOError):  # another process keeps the pipe open
            while more := os.read(self._departure, 4096):
                received = more
        return received.endswith(JOINED)


def _host() -> str:
    """Return this host's name, as Slurm calls it under Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _guard(group: int) -> tuple[int, int]:
    """Fork a guard that kills a process group when this process is killed; return its PID and a descriptor.

    A byte written to the descriptor makes the guard leave the group alone.
    """
    reading, writing = os.pipe()
    if guard := os.fork():
        os.close(reading)
        return guard, writing
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (*STOPPING, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # mpirun waits until its pipes are closed everywhere; the other end of ours is closed here, too.
        os.dup2(reading, 3)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        if not os.read(3, 1):
            os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def _loaded_mpi(pid: int) -> bool:
    """Whether a process or a descendant has loaded an MPI library; False if unknown."""
    try:
        return any("libmpi" in _read(f"/proc/{descendant}/maps") for descendant in _tree(pid))
    except OSError:
        return False


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in _read(f"/proc/{pid}/task/{pid}/children").split():
        yield from _tree(int(child))


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
