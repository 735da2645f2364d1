"""What each rank of a job on this node is doing: one small file of records in /dev/shm that its peers read.

A rank writes its record with plain stores, some hundred nanoseconds a step. The file is named after the launcher's
process, an ancestor of all ranks of the node: so it is found without MPI, and ranks that end before MPI starts are
judged too. The name also holds a secret that only this user can read from that process. Once MPI has started, ranks
without a common file, whatever the reason, move to one whose name is drawn at random.
"""

import contextlib
import errno
import glob
import hashlib
import mmap
import os
import re
import secrets
import signal
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from dptrain.errors import OutputError
from dptrain.runtime.failure import NAME_BYTES, describe, exit_code_of
from dptrain.runtime.storage.ownership import is_own, open_own
from dptrain.runtime.watch import thread_order

FOLDER = "/dev/shm"
_BYTES = 512
# Numbers of a record, int64 each, and then text, padded with zero bytes.
(
    _PID,
    _STARTED,
    _STATE,
    _POSITION,
    _KIND,
    _COUNT,
    _DTYPE,
    _PARTS,
    _GROUP,
    _EPOCH,
    _STEP,
    _ROUNDS,
    _SIGNAL,
    _ABANDONED,
) = range(14)
_NAME = slice(128, 128 + NAME_BYTES)
_PLACE = slice(192, 320)
_SEGMENTS = slice(320, _BYTES)

# Collective, count, dtype, checksum of the ranks' parts, group.
_CALL = struct.Struct("qqqqq")

# The most ranks of a job's file on a node: a larger file is not ours.
_MOST_RANKS = 1 << 14

# Files of MPICH, Open MPI, UCX, PSM and Intel MPI. Nothing else in the folder is removed, whatever a record names.
_OF_MPI = re.compile(r"(mpich_|sm_segment\.|vader_segment\.|osc_|smcuda_|ucx_shm_|psm\d?_shm|Intel_MPI_)[\w.\-]+")

# Shared memory that MPI takes for each rank of a node: its start dies of a bus error if that is missing.
MPI_BYTES = 3 << 19


class State(IntEnum):
    """Stage in a rank's life."""

    ABSENT = 0  # dptrain has not been imported
    STARTED = 1
    JOINING = 2  # in MPI_Init, or making the communicator
    JOINED = 3
    LEFT = 4  # it no longer meets the others


class Collective(IntEnum):
    """Kind of collective."""

    START = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    NODE_BARRIER = 4
    SHARED_ARRAY = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    SPLIT = 8
    HAND_OVER = 9
    END = 10
    DEVICES = 11


_WORDS = (
    "the start of MPI",
    "an all-reduce",
    "a broadcast",
    "an all-gather",
    "a barrier of nodes",
    "a shared array",
    "an all-to-all",
    "a reduce-scatter",
    "a split of the communicator",
    "a send or receive between stages",
    "the end of the job",
    "messages between GPUs",
)


def numbers_of(
    kind: Collective, count: int, dtype: str, parts: Sequence[int] = (), group: int = 0
) -> tuple[int, int, int, int, int]:
    """Return a record's five numbers for a collective, see `Record.collective`."""
    return kind, count, ord(dtype), zlib.crc32(repr(list(parts)).encode()) if parts else 0, group


class Record:
    """A rank's record, which others read; see `collective`. `failed`: the last collective left by an error."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self.failed: Failed | None = None
        self._bytes = memoryview(bytearray(_BYTES)) if memory is None else memory
        self._numbers = self._bytes.cast("q")
        self._next = (0, 0, 0, 0, 0)

    @property
    def pid(self) -> int:
        """PID; 0 while unclaimed."""
        return self._numbers[_PID]

    @property
    def started(self) -> int:
        """Start time of the process, as in /proc."""
        return self._numbers[_STARTED]

    @property
    def state(self) -> State:
        """Stage in the rank's life."""
        return State(self._numbers[_STATE])

    @state.setter
    def state(self, state: State) -> None:
        self._numbers[_STATE] = state

    @property
    def position(self) -> int:
        """2n - 1 in the n-th collective, 2n after it."""
        return self._numbers[_POSITION]

    def move_to(self, position: int) -> None:
        """Jump to a later position that the others know, where ranks do not make the same calls."""
        self._numbers[_POSITION] = position

    @property
    def rounds(self) -> int:
        """Iterations, from 1, of work in which ranks do not meet; 0 outside."""
        return self._numbers[_ROUNDS]

    @rounds.setter
    def rounds(self, rounds: int) -> None:
        self._numbers[_ROUNDS] = rounds

    @property
    def signal(self) -> int:
        """Number of the signal for which this rank abandons its step; 0 for none."""
        return self._numbers[_SIGNAL]

    @signal.setter
    def signal(self, number: int) -> None:
        self._numbers[_SIGNAL] = number

    @property
    def abandoned(self) -> int:
        """The position after the last collective of a step that this rank has abandoned, from 1; 0 for none."""
        return self._numbers[_ABANDONED]

    def abandon(self) -> None:
        """Announce that this rank has abandoned its step."""
        self._numbers[_ABANDONED] = self.position + 1

    def move_into(self, memory: memoryview) -> None:
        """Move to other memory; who holds this object follows."""
        memory[:] = self._bytes
        self._bytes, self._numbers = memory, memory.cast("q")

    def claim(self, pid: int, started: int) -> None:
        """Claim the record for this process."""
        self._bytes[:] = bytes(_BYTES)
        self._numbers[_PID], self._numbers[_STARTED], self._numbers[_STATE] = pid, started, State.STARTED

    def collective(
        self, kind: Collective, count: int = 0, dtype: str = "\0", parts: Sequence[int] = (), group: int = 0
    ) -> "Record":
        """Announce the next collective: `with record.collective(...)`.

        `count`, `dtype` (NumPy's character) and `parts` (elements by rank) must agree where they are given; `group`
        separates ranks that meet from others that meet meanwhile, 0 for all.
        """
        thread_order.check(_WORDS[kind])
        self._next = numbers_of(kind, count, dtype, parts, group)
        return self

    @property
    def progress(self) -> memoryview:
        """The position and the `numbers_of` the collective, for compiled code to read and write."""
        return self._numbers[_POSITION : _GROUP + 1]

    def __enter__(self) -> None:
        _CALL.pack_into(self._bytes, 8 * _KIND, *self._next)
        self._numbers[_POSITION] += 1  # last, so that readers who see it see the rest, too

    def meets_otherwise(self, other: "Record") -> bool:
        """Whether another rank is in a collective of arrays that differs in kind, count, type or parts."""
        mine, others = self._numbers, other._numbers
        if others[_POSITION] != mine[_POSITION] or not others[_DTYPE]:
            return False
        differs = others[_KIND : _GROUP + 1] != mine[_KIND : _GROUP + 1]
        return differs and others[_POSITION] == mine[_POSITION]  # it has not moved on meanwhile

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        if error is not None:
            self.failed = Failed(self.position, self.call, describe(error), exit_code_of(error), time.monotonic())
        self._numbers[_POSITION] += 1

    def step_back(self) -> None:
        """Return to the last collective: the rank waits for what it began there."""
        self._numbers[_POSITION] -= 1

    @property
    def kind(self) -> int:
        """Current or last `Collective`."""
        return self._numbers[_KIND]

    @property
    def group(self) -> int:
        """Ranks that meet there, see `collective`."""
        return self._numbers[_GROUP]

    @property
    def call(self) -> str:
        """Current or last collective, in words."""
        kind, count, dtype, parts = self._numbers[_KIND:_GROUP]
        if not dtype:
            return _WORDS[kind]
        from dptrain.runtime.types import named  # only on demand, as it needs NumPy

        cut = f" in parts with the checksum {parts:08x}" if parts else ""
        return f"{_WORDS[kind]} of {count} {named(chr(dtype))}{cut}"

    @property
    def phase_memory(self) -> tuple[memoryview, memoryview]:
        """Memory of a `Phase`: its name, and its epoch and step."""
        return self._bytes[_NAME], self._numbers[_EPOCH : _STEP + 1]

    @property
    def phase(self) -> tuple[str, int, int]:
        """Name, epoch and step of the current work; 0 for none."""
        return self._text(_NAME), self._numbers[_EPOCH], self._numbers[_STEP]

    @property
    def place(self) -> str:
        """Where its Python code is, if known."""
        return self._text(_PLACE)

    @place.setter
    def place(self, place: str) -> None:
        self._write(_PLACE, place)

    @property
    def segments(self) -> list[str]:
        """Other files in the folder that the rank has mapped: MPI's, which a killed job leaves."""
        return self._text(_SEGMENTS).split()

    @segments.setter
    def segments(self, names: list[str]) -> None:
        self._write(_SEGMENTS, " ".join(names))

    def _text(self, where: slice) -> str:
        return bytes(self._bytes[where]).rstrip(b"\0").decode(errors="replace")

    def _write(self, where: slice, text: str) -> None:
        size = where.stop - where.start
        self._bytes[where] = text.encode()[:size].ljust(size, b"\0")


class RecordTable:
    """The records of all ranks of a job, in a file (or OSError); those of other nodes stay empty here.

    `flags`: how to open it, as for `os.open`; by default it is created if it does not exist. `identity` tells files of
    a node apart; it is empty for a table in this process's own memory, whose `path` is empty.
    """

    def __init__(self, path: str, size: int, flags: int = os.O_CREAT) -> None:
        self.path, self.identity = path, ""
        if not path:
            self._memory = memoryview(bytearray(size * _BYTES))
        else:
            file = os.open(path, os.O_RDWR | flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                status = os.fstat(file)
                if not is_own(status) or status.st_mode & 0o077:
                    raise PermissionError(errno.EPERM, "belongs to another user, or others may open it")
                os.posix_fallocate(file, 0, size * _BYTES)  # fails now if the folder is full: later it is a bus error
                self._memory = memoryview(mmap.mmap(file, size * _BYTES))
                self.identity = f"{status.st_dev}-{status.st_ino}"
            finally:
                os.close(file)
        self.records = [Record(self._memory[at : at + _BYTES]) for at in range(0, size * _BYTES, _BYTES)]

    def adopt(self, rank: int, record: Record) -> None:
        """Move a rank's record here from another table."""
        record.move_into(self._memory[rank * _BYTES : (rank + 1) * _BYTES])
        self.records[rank] = record

    def remove(self) -> None:
        """Remove the file; ranks that have it open keep their memory."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def new_table(launcher: tuple[int, int], size: int) -> RecordTable:
    """Return a table in a new file with a name drawn at random, or OSError."""
    return RecordTable(_path(launcher, secrets.token_hex(16)), size, os.O_CREAT | os.O_EXCL)


# Processes, and the job's file


@dataclass(frozen=True)
class Failed:
    """A collective that a rank left by an error, in which others may wait for it."""

    position: int
    call: str
    text: str
    code: int  # the error's exit code
    at: float  # monotonic clock


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it."""

    parent: int
    started: int  # clock ticks since boot
    state: str  # "R", "S", "D", "T" (stopped), "Z" (zombie), ...
    ticks: int  # CPU time used
    status: int = 0  # as wait() returns it, once ended


def look_up(pid: int) -> Process | None:
    """Return a process's state, or None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *numbers = text.rpartition(")")[2].split()  # the name before it may hold anything
    return Process(int(numbers[0]), int(numbers[18]), state, int(numbers[10]) + int(numbers[11]), int(numbers[-1]))


def end_of(process: Process | None) -> str:
    """Return how a process ended, in words, or "" if unknown."""
    if process is None or process.state not in "ZX":
        return ""
    code = os.waitstatus_to_exitcode(process.status)
    if code >= 0:
        return f"it exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"it was killed by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"


def launcher_of_job(variable: str) -> tuple[int, int] | None:
    """Return PID and start time of the process that started this node's ranks, or None if it cannot be determined.

    It is the nearest ancestor without the rank's environment `variable`, whatever scripts lie between.
    """
    if not sys.platform.startswith("linux") or not os.path.isdir(FOLDER):
        return None
    pid, process = os.getpid(), look_up(os.getpid())
    while process is not None and process.parent > 0:
        pid, process = process.parent, look_up(process.parent)
        if process is not None and not _has_variable(pid, variable):
            return pid, process.started
    return None


def path_of_job(launcher: tuple[int, int]) -> str:
    """Return the path of the file of a launcher's job on this node."""
    return _path(launcher, _secret_of(launcher[0]))


def _path(launcher: tuple[int, int], secret: str) -> str:
    return os.path.join(FOLDER, f"{_prefix()}-{launcher[0]}-{launcher[1]}-{secret}")


def _secret_of(pid: int) -> str:
    """Return what distinguishes a process and only its user can know: a digest of its random addresses.

    It is "0" for a process of another user, such as Slurm's daemon.
    """
    try:
        return hashlib.sha256(Path(f"/proc/{pid}/auxv").read_bytes()).hexdigest()[:32]
    except OSError:
        return "0"


def _launcher_in(path: str) -> tuple[int, int]:
    """Return PID and start time of the launcher in the name of a job's file; 0 where there is no such number."""
    words = [*os.path.basename(path).removeprefix(f"{_prefix()}-").split("-"), "", ""]
    pid, started = (int(word) if re.fullmatch(r"[0-9]{1,19}", word) else 0 for word in words[:2])
    return pid, started


def ranks_of(launcher: int, variable: str) -> dict[int, int]:
    """Return the PIDs of a launcher's running ranks on this node, by rank, as far as they can be determined."""
    pids = {}
    for children in glob.iglob(f"/proc/{launcher}/task/*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, Path(children).read_text(encoding="ascii").split()):
                rank = _variable_of(pid, variable)
                if rank.isdecimal():
                    pids[int(rank)] = pid
    return pids


def _has_variable(pid: int, variable: str) -> bool:
    return bool(_variable_of(pid, variable))


def _variable_of(pid: int, variable: str) -> str:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # not ours: Slurm's daemon, for one
        return ""
    start = f"{variable}=".encode()
    return next((entry[len(start) :].decode() for entry in environment.split(b"\0") if entry.startswith(start)), "")


def _prefix() -> str:
    """Return the prefix of our files: user and PID namespace, as containers may share the folder."""
    return f"dptrain-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}"


# Remains of jobs


# Files with our names that are not ours to read, and why: for --debug.
left_alone: list[str] = []


def sweep() -> None:
    """Remove what killed jobs left on this node: their record files and the MPI segments named there.

    Anybody may write to the folder, so only files that nobody else can have written are trusted; `left_alone` lists
    others.
    """
    dead: list[str] = []
    for path in glob.glob(os.path.join(FOLDER, f"{_prefix()}-*-*")):
        pid, started = _launcher_in(path)
        if is_alive(look_up(pid), started):
            continue
        try:
            content = _content(path)
        except OSError as error:
            left_alone.append(f"{path}: left alone ({error.strerror or error})")
            continue
        whole = range(0, len(content) - len(content) % _BYTES, _BYTES)
        records = [Record(memoryview(content)[at : at + _BYTES]) for at in whole]
        if not any(
            is_alive(look_up(record.pid), record.started) for record in records if record.pid
        ):  # without its launcher
            dead += [
                os.path.join(FOLDER, name) for record in records for name in record.segments if _OF_MPI.fullmatch(name)
            ]
            dead.append(path)
    if not dead:
        return
    used = _mapped()
    for path in dict.fromkeys(dead):
        with contextlib.suppress(OSError):  # another rank was faster
            if path not in used and is_own(os.lstat(path)):
                os.unlink(path)


def _content(path: str) -> bytearray:
    file = open_own(path)
    try:
        size = os.fstat(file).st_size
        if size > _MOST_RANKS * _BYTES:
            raise OSError(errno.EFBIG, f"{size} bytes, too large for records")
        content = bytearray(size)
        return content[: os.readv(file, [content])]
    finally:
        os.close(file)


def is_alive(process: Process | None, started: int) -> bool:
    """Whether `process` is the one that started then, and has not ended."""
    return process is not None and process.started == started and process.state not in "ZX"


def _mapped() -> set[str]:
    """Return the folder's files that any process has mapped; nobody else can map what is this user's alone."""
    paths: set[str] = set()
    for path in glob.iglob("/proc/[0-9]*/maps"):
        try:
            paths |= _shared(Path(path).read_text(encoding="utf-8", errors="replace"))
        except OSError:  # gone, or somebody else's
            continue
    return paths


def _shared(maps: str) -> set[str]:
    return {line.split(None, 5)[-1] for line in maps.splitlines() if f" {FOLDER}/" in line}


def changed() -> int:
    """Return when a file was last created or removed in the folder, in ns."""
    try:
        return os.stat(FOLDER).st_mtime_ns
    except OSError:
        return 0


def segments() -> list[str]:
    """Return the folder's files that this process has mapped, except ours."""
    try:
        paths = _shared(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []
    names = [os.path.relpath(path, FOLDER) for path in paths if not path.endswith("(deleted)")]
    return sorted(name for name in names if "/" not in name and " " not in name and not name.startswith("dptrain-"))


def new_segments(before: frozenset[str]) -> frozenset[str]:
    """Return this user's MPI files in the folder that are not in `before`; some may be another job's."""
    names = set()
    with contextlib.suppress(OSError):
        for name in set(os.listdir(FOLDER)) - before:
            if _OF_MPI.fullmatch(name) and is_own(os.lstat(os.path.join(FOLDER, name))):
                names.add(name)
    return frozenset(names)


def require_room(ranks: int) -> None:
    """Refuse to start MPI on a node whose shared memory is full: it would die of a bus error."""
    try:
        status = os.statvfs(FOLDER)
    except OSError:
        return
    free, needed = status.f_bavail * status.f_frsize, ranks * MPI_BYTES
    if free < needed:
        raise OutputError(
            f"{FOLDER} has {free / 1e6:.1f} MB free, and MPI needs about {needed / 1e6:.1f}: remove the files of "
            "killed jobs, or give the container more (docker run --shm-size)"
        )
