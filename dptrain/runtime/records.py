"""What each rank of a job on this node is doing, in memory that its peers see: one small file of records in /dev/shm.

A rank writes its own record with plain stores, so that a step pays some hundred nanoseconds for it; the others read it
when they like. The file is found without MPI, by the launcher's process that all ranks of the node descend from: what
ends before MPI has started can be judged as well.
"""

import contextlib
import errno
import glob
import mmap
import os
import re
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
from dptrain.runtime.ownership import is_own, open_own

FOLDER = "/dev/shm"
_BYTES = 512
# Numbers of a record, int64 each, and then text, padded with zero bytes.
_PID, _STARTED, _STATE, _POSITION, _KIND, _COUNT, _DTYPE, _PARTS, _GROUP, _EPOCH, _STEP, _ROUNDS = range(12)
_NAME = slice(128, 128 + NAME_BYTES)
_PLACE = slice(192, 320)
_SEGMENTS = slice(320, _BYTES)

# The names of types whose characters NumPy does not know, but ml_dtypes.
_NOT_OF_NUMPY = {"E": "bfloat16"}

# Collective, count, dtype, checksum of the ranks' parts, group.
_CALL = struct.Struct("qqqqq")

# Ranks of a job on a node that a file may have records of: a larger file is none of ours.
_MOST_RANKS = 1 << 14

# Files of MPICH, Open MPI, UCX, PSM and Intel MPI. Nothing else in the folder is removed, whatever a record names.
_OF_MPI = re.compile(r"(mpich_|sm_segment\.|vader_segment\.|osc_|smcuda_|ucx_shm_|psm\d?_shm|Intel_MPI_)[\w.\-]+")

# What MPI takes of a node's shared memory for itself, by rank: its start dies of a bus error where that is not there.
MPI_BYTES = 3 << 19


class State(IntEnum):
    """Where a rank is in its life."""

    ABSENT = 0  # dptrain has not been imported
    STARTED = 1
    JOINING = 2  # in MPI_Init, or making the communicator
    JOINED = 3
    LEFT = 4  # it meets the others no more


class Collective(IntEnum):
    """What a rank meets the others in."""

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
    "a split into groups",
    "a hand-over between stages",
    "the end of the job",
    "messages between GPUs",
)


def numbers_of(
    kind: Collective, count: int, dtype: str, parts: Sequence[int] = (), group: int = 0
) -> tuple[int, int, int, int, int]:
    """Return what a record keeps of a collective, see `Record.collective`."""
    return kind, count, ord(dtype), zlib.crc32(repr(list(parts)).encode()) if parts else 0, group


class Record:
    """A rank's record: what it writes, and what others read. A context manager for a collective, see `collective`.

    Attributes:
        failed: the last collective that the rank has left by an error, of this process's record; None for none.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self.failed: Failed | None = None
        self._bytes = memoryview(bytearray(_BYTES)) if memory is None else memory
        self._numbers = self._bytes.cast("q")
        self._next = (0, 0, 0, 0, 0)

    @property
    def pid(self) -> int:
        """Of the process; 0 where none has made the record its own."""
        return self._numbers[_PID]

    @property
    def started(self) -> int:
        """When the process started, as /proc says it."""
        return self._numbers[_STARTED]

    @property
    def state(self) -> State:
        """Where the rank is in its life."""
        return State(self._numbers[_STATE])

    @state.setter
    def state(self, state: State) -> None:
        self._numbers[_STATE] = state

    @property
    def position(self) -> int:
        """2n - 1 in the n-th collective, 2n after it."""
        return self._numbers[_POSITION]

    def move_to(self, position: int) -> None:
        """Go on to a later position, where ranks do not make the same calls: it must be one that the others know."""
        self._numbers[_POSITION] = position

    @property
    def rounds(self) -> int:
        """How often the rank has gone round in work in which ranks do not meet, from 1; 0 outside such work."""
        return self._numbers[_ROUNDS]

    @rounds.setter
    def rounds(self, rounds: int) -> None:
        self._numbers[_ROUNDS] = rounds

    def own(self, pid: int, started: int) -> None:
        """Make it this process's."""
        self._bytes[:] = bytes(_BYTES)
        self._numbers[_PID], self._numbers[_STARTED], self._numbers[_STATE] = pid, started, State.STARTED

    def collective(
        self, kind: Collective, count: int = 0, dtype: str = "\0", parts: Sequence[int] = (), group: int = 0
    ) -> "Record":
        """Say which collective the rank is about to enter: `with record.collective(...)`.

        Args:
            kind: of the collective.
            count: its elements, where they must be the same on all ranks that meet.
            dtype: their type, as NumPy's character.
            parts: elements of each rank's part, where that must be the same too.
            group: what tells the ranks that meet from others that meet meanwhile; 0 for all ranks.
        """
        self._next = numbers_of(kind, count, dtype, parts, group)
        return self

    @property
    def progress(self) -> memoryview:
        """The position and what `numbers_of` says of the collective, as code that is compiled reads and writes them."""
        return self._numbers[_POSITION : _GROUP + 1]

    def __enter__(self) -> None:
        _CALL.pack_into(self._bytes, 8 * _KIND, *self._next)
        self._numbers[_POSITION] += 1  # the last: who sees it sees what belongs to it

    def meets_otherwise(self, other: "Record") -> bool:
        """Whether another rank is in a collective of arrays as well, but of another kind, count, type, or parts.

        Of a rank that is in one without arrays it says nothing: it stays there.
        """
        mine, others = self._numbers, other._numbers
        if others[_POSITION] != mine[_POSITION] or not others[_DTYPE]:
            return False
        differs = others[_KIND : _GROUP + 1] != mine[_KIND : _GROUP + 1]
        return differs and others[_POSITION] == mine[_POSITION]  # it has not gone on meanwhile

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        if error is not None:
            self.failed = Failed(self.position, self.call, describe(error), exit_code_of(error), time.monotonic())
        self._numbers[_POSITION] += 1

    def step_back(self) -> None:
        """Say that the rank is in the collective that it was in last, again: it waits for what it has begun there."""
        self._numbers[_POSITION] -= 1

    @property
    def kind(self) -> int:
        """What the rank meets the others in, or has last: a `Collective`."""
        return self._numbers[_KIND]

    @property
    def group(self) -> int:
        """Whom it meets there, see `collective`."""
        return self._numbers[_GROUP]

    @property
    def call(self) -> str:
        """What the rank meets the others in, or has last, in words."""
        kind, count, dtype, parts = self._numbers[_KIND:_GROUP]
        if not dtype:
            return _WORDS[kind]
        from numpy import dtype as named  # not before somebody waits

        name = chr(dtype)
        cut = f" in parts with the checksum {parts:08x}" if parts else ""
        return f"{_WORDS[kind]} of {count} {_NOT_OF_NUMPY.get(name) or named(name)}{cut}"

    @property
    def phase_memory(self) -> tuple[memoryview, memoryview]:
        """Where a `Phase` keeps its name, and its epoch and step."""
        return self._bytes[_NAME], self._numbers[_EPOCH : _STEP + 1]

    @property
    def phase(self) -> tuple[str, int, int]:
        """Name, epoch and step of what the rank is doing; 0 for none."""
        return self._text(_NAME), self._numbers[_EPOCH], self._numbers[_STEP]

    @property
    def place(self) -> str:
        """Where its Python code is, as far as it is known."""
        return self._text(_PLACE)

    @place.setter
    def place(self, place: str) -> None:
        self._write(_PLACE, place)

    @property
    def segments(self) -> list[str]:
        """Names of other files in the folder that the rank has mapped: MPI's, which a job that is killed leaves."""
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
    """The records of all ranks of a job, by rank; those of other nodes stay empty here.

    Args:
        path: the file, which is made where it is not there.
        size: ranks of the job.

    Raises:
        OSError: the folder is full, or the file is somebody else's.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(file)
            if not is_own(found):
                raise PermissionError(f"{path} belongs to somebody else")
            os.posix_fallocate(file, 0, size * _BYTES)  # where the folder is full, now: later it is a bus error
            self._memory = memoryview(mmap.mmap(file, size * _BYTES))
        finally:
            os.close(file)
        self.records = [Record(self._memory[at : at + _BYTES]) for at in range(0, size * _BYTES, _BYTES)]

    def remove(self) -> None:
        """Remove the file; ranks that have it open keep their memory."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


# The file's name


@dataclass(frozen=True)
class Failed:
    """A collective that a rank has left by an error, in which others may wait for it.

    Attributes:
        position: the rank's in it.
        call: the collective in words.
        text: the error in words.
        code: that the error ends a process with.
        at: when that was, by the monotonic clock.
    """

    position: int
    call: str
    text: str
    code: int
    at: float


@dataclass(frozen=True)
class Process:
    """What /proc says of a process.

    Attributes:
        parent: PID of its parent.
        started: in clock ticks since the system's start.
        state: "R", "S", "D", "T" (stopped), "Z" (gone, but not yet collected), ...
        ticks: of CPU time that it has used.
        status: as wait() has it, of one that has ended.
    """

    parent: int
    started: int
    state: str
    ticks: int
    status: int = 0


def look_up(pid: int) -> Process | None:
    """Return what is known of a process, or None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *numbers = text.rpartition(")")[2].split()  # the name before it may hold anything
    return Process(int(numbers[0]), int(numbers[18]), state, int(numbers[10]) + int(numbers[11]), int(numbers[-1]))


def end_of(found: Process | None) -> str:
    """Return how a process has ended, in words, or "" where the system does not tell."""
    if found is None or found.state not in "ZX":
        return ""
    code = os.waitstatus_to_exitcode(found.status)
    if code >= 0:
        return f"it exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"it was killed by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"


def path_of_job(variable: str) -> str | None:
    """Return the path of this job's file on this node, or None where the system does not tell.

    Args:
        variable: name of the environment variable by which the launcher tells a process its rank. The nearest
            ancestor without it is the launcher's, whatever scripts lie between.
    """
    if not sys.platform.startswith("linux") or not os.path.isdir(FOLDER):
        return None
    pid, own = os.getpid(), look_up(os.getpid())
    while own is not None and own.parent > 0:
        pid, own = own.parent, look_up(own.parent)
        if own is not None and not _has_variable(pid, variable):
            return os.path.join(FOLDER, f"{_prefix()}-{pid}-{own.started}")
    return None


def ranks_of(path: str, variable: str) -> dict[int, int]:
    """Return the PIDs of a job's ranks on this node, by rank, that are there, as far as the system tells.

    Args:
        path: of the job's file, see `path_of_job`.
        variable: as there.
    """
    found = {}
    for children in glob.iglob(f"/proc/{path.split('-')[-2]}/task/*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, Path(children).read_text(encoding="ascii").split()):
                rank = _variable_of(pid, variable)
                if rank.isdecimal():
                    found[int(rank)] = pid
    return found


def _has_variable(pid: int, variable: str) -> bool:
    return bool(_variable_of(pid, variable))


def _variable_of(pid: int, variable: str) -> str:
    """Return what a variable was when a process began, "" where it is not known."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # not ours: Slurm's daemon, for one
        return ""
    start = f"{variable}=".encode()
    return next((one[len(start) :].decode() for one in environment.split(b"\0") if one.startswith(start)), "")


def _prefix() -> str:
    """How our files' names begin: with the user, and what PIDs in the name mean (containers may share the folder)."""
    return f"dptrain-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}"


# What is left of jobs


# Files with our names that are not ours to read, and why: for --debug.
left_alone: list[str] = []


def sweep() -> None:
    """Remove what killed jobs have left on this node: their file, and the segments of MPI that it names.

    Anybody may write to the folder, so a file is believed only where nobody else can have written it; any other is left
    alone (`left_alone` says why).
    """
    dead: list[str] = []
    for path in glob.glob(os.path.join(FOLDER, f"{_prefix()}-*-*")):
        pid, started = (int(part) if re.fullmatch(r"[0-9]{1,19}", part) else 0 for part in path.split("-")[-2:])
        if is_alive(look_up(pid), started):
            continue
        try:
            content = _content(path)
        except OSError as error:
            left_alone.append(f"{path}: left alone ({error.strerror or error})")
            continue
        whole = range(0, len(content) - len(content) % _BYTES, _BYTES)
        records = [Record(memoryview(content)[at : at + _BYTES]) for at in whole]
        if not any(is_alive(look_up(one.pid), one.started) for one in records if one.pid):  # without its launcher
            dead += [os.path.join(FOLDER, name) for one in records for name in one.segments if _OF_MPI.fullmatch(name)]
            dead.append(path)
    if not dead:
        return
    used = _mapped()
    for path in dict.fromkeys(dead):
        with contextlib.suppress(OSError):  # another rank was faster
            if path not in used and is_own(os.lstat(path)):
                os.unlink(path)


def _content(path: str) -> bytearray:
    """Return the content of a job's file.

    Raises:
        OSError: it is gone, or no file of records that only this user can have written.
    """
    file = open_own(path)
    try:
        size = os.fstat(file).st_size
        if size > _MOST_RANKS * _BYTES:
            raise OSError(errno.EFBIG, f"{size} bytes, too large for records")
        content = bytearray(size)
        return content[: os.readv(file, [content])]
    finally:
        os.close(file)


def is_alive(found: Process | None, started: int) -> bool:
    """Whether what was looked up is the process that started then, and has not ended."""
    return found is not None and found.started == started and found.state not in "ZX"


def _mapped() -> set[str]:
    """Return the files of the folder that any process has mapped; nobody else can map what is this user's alone."""
    found: set[str] = set()
    for path in glob.iglob("/proc/[0-9]*/maps"):
        try:
            found |= _shared(Path(path).read_text(encoding="utf-8", errors="replace"))
        except OSError:  # gone, or somebody else's
            continue
    return found


def _shared(maps: str) -> set[str]:
    return {line.split(None, 5)[-1] for line in maps.splitlines() if f" {FOLDER}/" in line}


def changed() -> int:
    """Return when a file was last made or removed in the folder."""
    try:
        return os.stat(FOLDER).st_mtime_ns
    except OSError:
        return 0


def segments() -> list[str]:
    """Return the names of files in the folder that this process has mapped, but for ours."""
    try:
        found = _shared(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []
    names = [os.path.relpath(path, FOLDER) for path in found if not path.endswith("(deleted)")]
    return sorted(name for name in names if "/" not in name and " " not in name and not name.startswith("dptrain-"))


def new_segments(before: frozenset[str]) -> frozenset[str]:
    """Return the names of this user's files of MPI in the folder, but for those that were there before.

    Nobody may have mapped them yet. They may be another job's: whatever is mapped stays where it is.
    """
    found = set()
    with contextlib.suppress(OSError):
        for name in set(os.listdir(FOLDER)) - before:
            if _OF_MPI.fullmatch(name) and is_own(os.lstat(os.path.join(FOLDER, name))):
                found.add(name)
    return frozenset(found)


def require_room(ranks: int) -> None:
    """Refuse to start MPI where the node's shared memory is full: it would die of a bus error.

    Args:
        ranks: that start on this node.

    Raises:
        OutputError: there is too little.
    """
    try:
        status = os.statvfs(FOLDER)
    except OSError:
        return
    free, needed = status.f_bavail * status.f_frsize, ranks * MPI_BYTES
    if free < needed:
        raise OutputError(
            f"{FOLDER} has {free / 1e6:.1f} MB free, and MPI needs about {needed / 1e6:.1f}: remove what killed jobs "
            "have left there, or give the container more (docker run --shm-size)"
        )
