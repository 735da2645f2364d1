"""Ranks watch each other: a rank that is stopped, loops, has left or died ends the job instead of hanging it.

A rank writes what it does to its record (`records`); a thread in each rank reads those of its node several times a
second and judges them. Between nodes the lowest ranks exchange what they see. Importing dptrain under a launcher
creates the record; the thread begins with MPI. A process alone has neither.
"""

import atexit
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any, NoReturn, Protocol

from dptrain.errors import AgreedError, ConfigError, ExitCode, MismatchError, OutputError, printable
from dptrain.runtime import exit_codes, failure
from dptrain.runtime.exit_codes import as_status
from dptrain.runtime.failure import abort, exit_at_once, phase, words
from dptrain.runtime.garbage import uncollected
from dptrain.runtime.launch import children, launcher_guard
from dptrain.runtime.launch.launcher import (
    LaunchInfo,
    detect_launch,
    end_mpi,
    has_mpi,
    is_ours,
    rank_variable,
    usable_cores,
)
from dptrain.runtime.output import streams
from dptrain.runtime.text import ranges
from dptrain.runtime.watch import records
from dptrain.runtime.watch.exit_notification import ExitNotifier
from dptrain.runtime.watch.exit_timer import exit_after
from dptrain.runtime.watch.hang_detection import (
    LONGER,
    QUIET,
    Finding,
    Limits,
    Observation,
    ProcessState,
    judge,
    mismatch,
)
from dptrain.runtime.watch.records import Collective, Record, RecordTable, State

# Seconds between two looks at the others; longer where many ranks look at one another.
_LOOK = 0.2
# Seconds between two messages to other nodes, and until a node without one counts as silent.
_POST, _SILENT = 0.5, 2.0
# Seconds until another rank reports instead of the responsible one.
_IN_RESERVE = 1.5
# Delay of a rank with the same message as rank 0.
_TURN = 1.0
# Between two looks for shared memory that MPI makes as it starts, and how many follow a change.
_SEGMENT, _SEGMENT_LOOKS = 0.005, 10
# The most seconds that a rank gives others to end after all have left.
_ENDING = 5.0
# Between two looks for ranks that have not imported dptrain.
_LOOK_FOR = 1.0
# The most seconds between two looks that count as waiting: a longer gap means stopped or swapped out.
_AWAKE = 1.0

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_STANDARD = os.path.dirname(os.path.abspath(os.__file__))


class Post(ABC):
    """Messages between watchdogs, separate from a training's."""

    @abstractmethod
    def send(self, rank: int, message: bytes) -> None:
        """Send without waiting."""

    @abstractmethod
    def received(self) -> list[tuple[int, bytes]]:
        """Return pairs (sender, message) received since the last call."""

    @abstractmethod
    def arrive(self) -> Callable[[], bool]:
        """Begin a barrier; return a function that says whether all have arrived."""


# Returns what each rank of this node gives, in their order. Collective.
Exchange = Callable[[Any], list[Any]]


class Attended(Protocol):
    """A link between ranks beside MPI."""

    def trouble(self) -> str:
        """Return what has failed, or an empty string."""

    def abort(self) -> None:
        """Release the other ranks."""


class Watchdog:
    """This rank's record, and its view of the others.

    `variable` is the environment variable of a process's rank, `launcher` the PID and start time of what started it.
    """

    def __init__(
        self, launch: LaunchInfo, table: RecordTable, variable: str = "", launcher: tuple[int, int] = (0, 0)
    ) -> None:
        # All ranks' records; those of other nodes are empty.
        self.launch, self.record, self.records = launch, table.records[launch.rank], table.records
        self.limits = Limits()
        self._table, self._pid, self._host = table, os.getpid(), socket.gethostname()
        self._variable, self._launcher = variable, launcher
        self._exit_notifier = ExitNotifier(launch)
        self._launcher_guard = launcher_guard.start(launch)
        self._folder_changed, self._before = 0, frozenset[str]()
        self._processes: dict[int, int] = {}  # of this node's ranks that have not imported dptrain: their PIDs
        self._running: set[int] = set()  # those of them that exist
        self._searched_at = -_LOOK_FOR
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._left, self._refusal = False, ""
        self._others: list[int] = []  # PIDs of this node's other ranks, once this one has left
        self._here: Sequence[int] = range(launch.size)  # ranks that this node may have
        self._leaders: Sequence[int] = ()
        self._post: Post | None = None
        self._reports: dict[int, tuple[float, list[Observation]]] = {}  # by leader: when, and what it sees
        self._posted = -_POST
        self._awake = 0.0
        # By rank: what it did, the state of its process, its CPU time, and since when that has been so.
        self._observed: dict[int, tuple[object, ProcessState, int, float]] = {}
        self._warned: set[object] = set()
        self._finding: tuple[object, float] | None = None

    # This rank

    def join(self) -> None:
        """Announce that this rank begins to meet the others, and start watching them."""
        self._before = records.new_segments(frozenset())
        self.record.state = State.JOINING
        self.record.collective(Collective.START).__enter__()
        self._exit_notifier.begin()
        self._end.clear()
        self._thread = threading.Thread(target=self._watch, name="dptrain watchdog", daemon=True)
        self._thread.start()

    @property
    def has_left(self) -> bool:
        """Whether this rank no longer meets the others."""
        return self._left

    def step_back(self) -> None:
        """Take `join` back."""
        self._end.set()
        self.record.__exit__()
        self.record.state = State.STARTED
        self._exit_notifier.end()

    def share_table(self, exchange: "Exchange") -> str:
        """Give all ranks of this node one table, in a new file unless they have one; return why not, or "".

        Collective among these ranks.
        """
        identities = exchange(self._table.identity)
        if len(set(identities)) == 1 and identities[0]:
            return ""
        size = self.launch.size
        leads = min(exchange(self.launch.rank)) == self.launch.rank
        table, why = _opened(lambda: records.new_table(self._launcher, size)) if leads else (None, "")
        path = next(filter(None, exchange("" if table is None else table.path)), "")
        if path and not leads:
            table, why = _opened(lambda: RecordTable(path, size, 0))
        if reasons := list(filter(None, exchange(why))):
            if table is not None:
                table.remove()
            return f"{path or records.FOLDER}: {reasons[0]}" if leads else ""
        assert table is not None
        table.adopt(self.launch.rank, self.record)
        exchange("")  # all are there before any is looked at
        self._table.remove()
        self._table, self.records = table, table.records
        phase.show(*self.record.phase_memory)
        return ""

    def joined(self, here: Sequence[int], leaders: Mapping[int, tuple[str, int]], post: Post) -> None:
        """Announce that all ranks have met; `leaders` maps the lowest rank of each node to its host and PID."""
        position = self.record.position + 1  # all leave this collective
        for rank, (host, pid) in leaders.items():
            if rank not in here:  # it may never report
                there = Observation(rank, host, pid, State.JOINED, position=position, phase=self.record.phase)
                self._reports[rank] = self._awake, [there]
        self._here, self._leaders, self._post = here, sorted(leaders), post
        self.record.segments = records.segments()
        self.record.state = State.JOINED
        self.record.__exit__()

    def leave(self, how: str) -> None:
        """Announce that this rank leaves the others, and, unlike MPI_Finalize, watch while waiting for them."""
        if self._left or os.getpid() != self._pid:  # a fork
            return
        self._left = True
        met = self.record.state == State.JOINED
        self.record.place = how
        self.record.state = State.LEFT
        if met and self._post is not None:
            arrived = self._post.arrive()
            while not arrived():
                time.sleep(0.005)
        self._exit_notifier.end()
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2)  # no call of MPI may be under way when it ends
        here = [self.records[rank].state for rank in self._here]
        if met or here.count(State.LEFT) >= self.launch.local_size:
            self._table.remove()
        # Nobody would see an exception in a destructor or an exit handler, and MPI ends the process without a name.
        mine = replace(self._observe(self._pid, self.launch.rank), place="")
        self._refusal = (
            f"{self._name(mine)}: a collective (fit, evaluate, predict, save, ...) after the end of the script, in a "
            "destructor or an exit handler that was registered before dptrain was imported: the other ranks have left; "
            "call it before the script ends"
        )
        self._others = [self.records[rank].pid for rank in self._here if rank != self.launch.rank]
        self.record.collective = self.refuse  # type: ignore[method-assign]

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """End this process, which calls a collective when no rank can take part any more; Python may be ending."""
        self._print(self._refusal)
        streams.flush()
        # MPICH's launcher kills those that have not ended yet, and then exits with the signal's number.
        end = time.monotonic() + _ENDING
        while time.monotonic() < end and any(map(_exists, self._others)):
            time.sleep(0.02)
        exit_at_once(ExitCode.CONFIG)

    def linger(self) -> None:
        """End the process, with a line, if it does not end by itself after this rank has left."""
        # Exit handlers registered before dptrain's import, and destructors, run then; nobody watches any more.
        seconds = self.limits.of(self.limits.timeout, "")
        if seconds == math.inf:
            return
        limit = f"the limit is --stall-timeout or DPTRAIN_STALL_TIMEOUT, {self.limits.timeout:g}"

        def has_finished(place: str, where: str = "") -> str:
            mine = replace(self._observe(self._pid, self.launch.rank), place=place)
            text = f"has finished, but its process has not ended for {seconds:.0f} s{where}; {limit}"
            return f"{self._name(mine)}: {text}"

        def wait() -> None:
            time.sleep(seconds)
            self._print(has_finished(_place()))
            exit_at_once(ExitCode.STUCK)

        threading.Thread(target=wait, name="dptrain end", daemon=True).start()
        line = has_finished("", ": a destructor (__del__) blocks, or an exit handler of C").removeprefix("dptrain: ")
        exit_after(seconds + _IN_RESERVE, line, ExitCode.STUCK)

    def _exit(self, code: int) -> None:
        """Replace `os._exit`: MPICH's launcher would end the other ranks, and call it a success."""
        if os.getpid() == self._pid and not self._left:
            if code == 0:
                self.leave("os._exit(0)")
            else:
                mine = replace(self._observe(self._pid, self.launch.rank), place="")
                self._print(f"{self._name(mine)}: ended with os._exit({code})")
                self._exit_notifier.end()
        exit_at_once(as_status(code))

    def forget(self) -> None:
        """Release, in a fork, what belongs to the rank: MPI calls there would be in the rank's name."""
        self._exit_notifier.close()
        if self._launcher_guard is not None:
            os.close(self._launcher_guard)
        self.record.collective = _refuse  # type: ignore[method-assign]

    def ring(self, ranks: Sequence[int]) -> "Ring":
        """Return the `Ring` of these ranks of this node."""
        return Ring(self, ranks)

    def who_is_where(self, ranks: Sequence[int]) -> str:
        """Describe which of these local ranks is in which collective, "" if all are in the same."""
        observations = [self._observe(self.records[rank].pid, rank) for rank in ranks]
        return mismatch(observations) if len({observation.call for observation in observations}) > 1 else ""

    # The other ranks

    def _watch(self) -> None:
        pause = seconds_between_looks(self.launch.local_size, usable_cores())
        before = time.monotonic()
        while not self._sleep(pause):
            now = time.monotonic()
            self._awake += min(now - before, _AWAKE)
            before = now
            if self.record.state != State.LEFT:
                self.record.place = _place()
                self._check_links()
            self._check_own_failure()
            self._check_signals()
            self._look()

    def _check_own_failure(self) -> None:
        """End the job if this rank's code caught an error of a collective in which others still wait."""
        # The others would blame a rank that waits.
        failed = self.record.failed
        if failed is None or failure.ending or time.monotonic() - failed.at < QUIET:
            return
        positions = self.positions()
        waiting = sorted(rank for rank, position in positions.items() if position == failed.position)
        if not waiting:
            if all(position > failed.position for position in positions.values()):
                self.record.failed = None  # all of them have left it as well, or have gone on
            return
        several = len(waiting) > 1
        mine = replace(self._observe(self._pid, self.launch.rank), place="")
        self._print(
            f"{self._name(mine)}: raised an error in {failed.call}, which its code caught, while "
            f"rank{'s' * several} {ranges(waiting)} wait{'s' * (not several)} there: {failed.text}"
        )
        abort(failed.code or ExitCode.STUCK)

    def _check_signals(self) -> None:
        """Let this rank abandon its step as another does, which may be the only one that a signal has reached."""
        number = next(filter(None, (self.records[rank].signal for rank in self._here)), 0)
        if number and not self.record.signal:
            self.record.signal = number
            for follow in at_signal:
                follow(number)

    def abandon_step(self, seconds: float) -> bool:
        """Wait until all ranks have abandoned the step, and go on from one position; return whether they have."""
        self.record.abandon()
        if self.launch.local_size != self.launch.size or not self._table.identity:
            return False
        end = time.monotonic() + seconds
        while not all(record.abandoned for record in self.records):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        self.record.move_to((max(record.abandoned for record in self.records) // 2 + 1) * 2)
        return True

    def positions(self) -> dict[int, int]:
        """Return the other ranks' positions, as far as this rank knows: those of other nodes may be long past."""
        positions = {
            observation.rank: observation.position
            for _, observations in self._reports.values()
            for observation in observations
        }
        return positions | {rank: self.records[rank].position for rank in self._here if rank != self.launch.rank}

    def _check_links(self) -> None:
        for link in list(_attended):
            if text := link.trouble():
                time.sleep(min(self.launch.rank, 3) * _TURN / 2)  # one line is enough
                mine = replace(self._observe(self._pid, self.launch.rank), place="")
                self._print(f"{self._name(mine)}: {text}")
                abort(ExitCode.STUCK)

    def _sleep(self, seconds: float) -> bool:
        """Wait; return whether this rank has left. While MPI starts, record the shared memory that it creates."""
        end = time.monotonic() + seconds
        pause, looks = _SEGMENT * max(1.0, self.launch.local_size / 8), 0
        while self.record.state == State.JOINING and time.monotonic() < end:
            if self._end.wait(pause):
                return True
            changed = records.changed()
            if changed != self._folder_changed:
                self._folder_changed, looks = changed, _SEGMENT_LOOKS
            if looks:  # new segments are mapped a moment later
                looks -= 1
                self.record.segments = [*records.segments(), *records.new_segments(self._before)]
        return self._end.wait(max(0.0, end - time.monotonic()))

    def _look(self) -> None:
        if not self._table.identity:
            return  # in this process's own memory
        table = self.records
        # Before all have met, ranks of other nodes look like ranks that have not started.
        one_node = self.launch.local_size == self.launch.size
        absent = [rank for rank in self._here if table[rank].state == State.ABSENT]
        if absent:
            self._find_absent(absent)
        here = [rank for rank in self._here if one_node or rank not in absent or rank in self._processes]
        mine = [self._observe(table[rank].pid, rank) for rank in here]
        sees_all = len(mine) == self.launch.size
        leads = len(self._leaders) > 1 and self.launch.rank == min(self._here)
        if leads and self._post is not None:
            self._exchange(self._post, mine)
            away = [
                self._aged(observation, at)
                for at, observations in self._reports.values()
                for observation in observations
            ]
            sees_all = len(mine) + len(away) == self.launch.size
            mine += away
        finding = judge(sorted(mine, key=lambda observation: observation.rank), self.limits, sees_all=sees_all)
        if finding is not None:
            self._report(finding)

    def _observe(self, pid: int, rank: int) -> Observation:
        record = self.records[rank]
        state = record.state
        if state == State.ABSENT:
            return self._absent(rank)
        observation = Observation(
            rank,
            self._host,
            pid,
            state,
            position=record.position,
            call=record.call,
            kind=record.kind,
            group=record.group,
            phase=record.phase,
            rounds=record.rounds,
            place=record.place,
        )
        # A rank that moves is alive: asking the system about many ranks would take time.
        last = self._observed.get(rank)
        if last is not None and last[0] != _doing(observation):
            return self._timed(observation, last[2])
        process = records.look_up(pid)
        if not records.is_alive(process, record.started):
            same = process is not None and process.started == record.started
            observation = replace(observation, process=ProcessState.GONE, more=records.end_of(process) if same else "")
        elif process is not None and process.state == "T":
            observation = replace(observation, process=ProcessState.STOPPED)
        return self._timed(observation, 0 if process is None else process.ticks)

    def _find_absent(self, ranks: Sequence[int]) -> None:
        """Search, now and then, for processes of ranks that have not imported dptrain."""
        if self._awake - self._searched_at < _LOOK_FOR * max(1.0, self.launch.local_size / 16):
            return
        self._searched_at = self._awake
        pids = records.ranks_of(self._launcher[0], self._variable)
        self._running = set(pids) if self.launch.rank in pids else set(ranks)  # where the system tells nothing
        self._processes |= {rank: pid for rank, pid in pids.items() if rank in ranks}

    def _absent(self, rank: int) -> Observation:
        pid, process, more = self._processes.get(rank, 0), ProcessState.RUNNING, "it has not imported dptrain"
        if rank not in self._running:
            process = ProcessState.GONE
        elif pid and (stat := records.look_up(pid)) is not None and stat.state == "T":
            process = ProcessState.STOPPED
        phase = ("start-up", 0, 0)
        return self._timed(Observation(rank, self._host, pid, State.ABSENT, process, phase=phase, more=more), 0)

    def _timed(self, observation: Observation, ticks: int) -> Observation:
        """Return an observation with the time for which it has not changed."""
        last = self._observed.get(observation.rank)
        if last is None or last[:2] != (_doing(observation), observation.process):
            last = self._observed[observation.rank] = _doing(observation), observation.process, ticks, self._awake
        since = self._awake - last[3]
        more = observation.more
        if observation.process == ProcessState.RUNNING and observation.pid and not observation.waits:
            used = (ticks - last[2]) / os.sysconf("SC_CLK_TCK")
            more = f"its process is running and has used {used:.1f} s of CPU time in {since:.0f} s"
        return replace(observation, since=since, more=more)

    # Other nodes

    def _exchange(self, post: Post, mine: Sequence[Observation]) -> None:
        """Send this node's observations to other nodes, and receive theirs."""
        if self._awake - self._posted >= _POST:
            self._posted = self._awake
            # Small enough that MPI need not wait for the receiver.
            message = zlib.compress(json.dumps([asdict(observation) for observation in mine]).encode())
            for leader in self._leaders:
                if leader != self.launch.rank:
                    post.send(leader, message)
        for sender, message in post.received():
            self._reports[sender] = (
                self._awake,
                [_observation_of(fact) for fact in json.loads(zlib.decompress(message))],
            )

    def _aged(self, observation: Observation, at: float) -> Observation:
        """Return another node's observation of a rank, adjusted for its age."""
        since = self._awake - at
        if since >= _SILENT and observation.state != State.LEFT:
            more = f"nothing has been heard from {observation.host} for {since:.0f} s"
            observation = replace(observation, process=ProcessState.SILENT, more=more)
        return replace(observation, since=observation.since + since)

    # Reporting

    def _report(self, finding: Finding) -> None:
        """Print a finding if it is this rank's turn, and end the job if it is fatal."""
        key = (finding.culprit.rank, finding.culprit.position, finding.fatal)
        if self._finding is None or self._finding[0] != key:
            self._finding = key, self._awake
        if finding.speaker != self.launch.rank and (not finding.fatal or self._awake - self._finding[1] < _IN_RESERVE):
            return
        if not finding.fatal:
            if key not in self._warned:
                self._warned.add(key)
                self._print(f"{self._name(finding.culprit)}: {finding.text} (a warning)")
            return
        self._print(f"{self._name(finding.culprit)}: {finding.text}")
        # Another thread may wait for a reader of standard output while it holds the stream's lock.
        flushing = threading.Thread(target=streams.flush, daemon=True)
        flushing.start()
        flushing.join(0.5)
        if finding.culprit.process == ProcessState.STOPPED and finding.culprit.host == self._host:
            # Open MPI's mpirun (5.0.11) hangs at times over a stopped rank when a job ends that has not started MPI.
            with suppress(OSError):
                os.kill(finding.culprit.pid, signal.SIGCONT)
        abort(ExitCode.STUCK)

    def _name(self, peer: Observation) -> str:
        place = f", {'at' if peer.state == State.LEFT else 'last seen at'} {peer.place}" if peer.place else ""
        pid = f" pid {peer.pid}" if peer.pid else ""  # a process that has ended before anybody looked
        return f"dptrain: rank {peer.rank}/{self.launch.size} host {peer.host}{pid} {words(*peer.phase)}{place}"

    def _print(self, line: str) -> None:
        streams.write_error(f"{line}\n")  # the main thread may hold Python's buffers


class Ring:
    """Ranks of a node that compare their collectives of arrays.

    Where not all are in the same, two neighbours differ, and the later one notices. `beside`: the records of at most
    two neighbours.
    """

    def __init__(self, dog: Watchdog, ranks: Sequence[int]) -> None:
        self._dog, self._ranks = dog, list(ranks)
        self._place = self._ranks.index(dog.launch.rank)
        beside = {self._ranks[self._place - 1], self._ranks[(self._place + 1) % len(self._ranks)]} - {dog.launch.rank}
        self.beside = [dog.records[rank] for rank in sorted(beside)]

    def check(self) -> None:
        """Compare with the neighbours the collective that this rank is about to enter; MismatchError if they differ."""
        record = self._dog.record
        for peer in self.beside:
            if record.meets_otherwise(peer):
                break
        else:
            return
        end = time.monotonic() + QUIET  # by then the others have arrived, or are stuck for another reason
        records = [self._dog.records[rank] for rank in self._ranks]
        while time.monotonic() < end and any(other.position < record.position for other in records):
            time.sleep(0.01)
        # One line is enough: another neighbour may have found the same, and an abort takes less than a turn.
        time.sleep(min(self._place, 3) * _TURN / 2)
        raise MismatchError(self.who_is_where())

    def who_is_where(self) -> str:
        """See `Watchdog.who_is_where`."""
        return self._dog.who_is_where(self._ranks)


def seconds_between_looks(ranks: int, cores: int) -> float:
    """Return the pause between looks (5 ms each for 100 waiting ranks), for a small part of the cores."""
    return _LOOK * max(1.0, ranks / 64, ranks / (8 * cores))


def _opened(action: Callable[[], RecordTable]) -> tuple[RecordTable | None, str]:
    """Return a table, or None and the reason."""
    try:
        return action(), ""
    except OSError as error:
        return None, error.strerror or str(error)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("this process was forked by a rank: it cannot communicate with the other ranks")


def _doing(observation: Observation) -> object:
    return observation.state, observation.position, observation.phase, observation.rounds, observation.pid


def _observation_of(fact: dict[str, Any]) -> Observation:
    name, epoch, step = fact.pop("phase")
    states = {"state": State(fact["state"]), "process": ProcessState(fact["process"])}
    return Observation(**fact | states | {"phase": (name, epoch, step)})


def _place() -> str:
    """Return where the main thread is: the innermost line outside dptrain and the standard library."""
    thread, of_thread = threading.main_thread(), ""
    if not thread.is_alive():  # the script has ended, and Python waits for the threads that are no daemons
        waits_for = next(
            (candidate for candidate in threading.enumerate() if not candidate.daemon and candidate is not thread), None
        )
        if waits_for is not None:
            thread, of_thread = waits_for, f" of thread {waits_for.name!r}, which is not a daemon"
    with uncollected():  # before Python 3.11.9 a collection there may wait for a lock that this thread holds
        frame = sys._current_frames().get(thread.ident or 0)
    innermost = frame
    libraries = [getattr(sys.modules.get(name), "__path__", ["<"])[0] for name in ("numpy", "mpi4py")]
    others = (_PACKAGE, _STANDARD, "<", *libraries)
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}{of_thread}"


# The watchdog of this process


_attended: list[Attended] = []
# Called with a signal for which another rank abandons its step.
at_signal: list[Callable[[int], None]] = []
_watchdog: Watchdog | None = None
_is_fork = False


def enlist() -> None:
    """Create this rank's record under a launcher of several ranks; called when dptrain is imported."""
    global _watchdog
    launch, variable = detect_launch(), rank_variable()
    if launch is not None:
        children.mark()
    if launch is None or launch.size == 1 or variable is None or launch.rank >= launch.size:
        return
    records.sweep()
    launcher = records.launcher_of_job(variable)
    atexit.register(_leave)
    if launcher is None:
        return
    try:
        table = RecordTable(records.path_of_job(launcher), launch.size)
    except OSError:  # until MPI has started, see `share_table`
        table = RecordTable("", launch.size)
    record, process = table.records[launch.rank], records.look_up(os.getpid())
    if process is None or (record.pid and records.is_alive(records.look_up(record.pid), record.started)):
        return  # a process that a rank has started
    record.claim(os.getpid(), process.started)
    phase.show(*record.phase_memory)
    _watchdog = Watchdog(launch, table, variable, launcher)
    os._exit = _watchdog._exit  # type: ignore[assignment]
    failure.joining_at_the_end = _joining_at_the_end
    failure.collective_at_the_end = lambda: record.collective(Collective.END)
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """Detach a fork from the rank: nobody watches it, and it ends nothing."""
    global _watchdog, _is_fork
    if _watchdog is not None:
        _watchdog.forget()
    _watchdog, _is_fork = None, True
    phase.hide()
    failure.joining_at_the_end = failure.collective_at_the_end = nullcontext


@contextmanager
def _joining_at_the_end() -> Iterator[None]:
    """Watch the other ranks while MPI starts in a failed rank, so that it can end the job."""
    if _watchdog is None or _watchdog.record.state != State.STARTED:
        yield
        return
    _watchdog.join()
    yield
    _watchdog.record.__exit__()


def attend(link: Attended) -> None:
    """Watch a link beside MPI until `leave_alone`."""
    _attended.append(link)
    failure.at_abort.append(link.abort)


def leave_alone(link: Attended) -> None:
    """Stop watching a link."""
    _attended.remove(link)
    failure.at_abort.remove(link.abort)


def abandon_step(seconds: float) -> bool:
    """See `Watchdog.abandon_step`; False where nobody watches."""
    return _watchdog is not None and _watchdog.abandon_step(seconds)


def record() -> Record:
    """Return this rank's record; a private one where nobody watches."""
    return Record() if _watchdog is None else _watchdog.record


@contextmanager
def going_round() -> Iterator[Callable[[], None]]:
    """Let the others watch this rank in work without collectives: the block calls the yielded function repeatedly.

    A rank that does not call it for as long as it may keep others waiting ends the job.
    """
    mine = record()

    def go_round() -> None:
        mine.rounds += 1

    go_round()
    try:
        yield go_round
    finally:
        mine.rounds = 0


@contextmanager
def joining(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Watch the other ranks from before MPI starts; the block starts it and calls `joined`."""
    launch = detect_launch()
    if launch is not None and "mpi4py.MPI" not in sys.modules:
        try:
            records.require_room(launch.local_size)
        except OutputError:
            if launch.rank > 0:
                time.sleep(_TURN)  # one line is enough: where rank 0 has the same trouble, it ends the job
            raise
    limit(environ=environ)
    if _watchdog is None:
        yield
        return
    if _watchdog.has_left:
        _watchdog.refuse()
    _watchdog.join()
    try:
        yield
    except BaseException:
        _watchdog.step_back()
        raise


def share_table(exchange: Exchange) -> None:
    """See `Watchdog.share_table`; warns where it fails. Collective among the ranks of this node."""
    if not all(exchange(_watchdog is not None)) or _watchdog is None:
        return
    if why := _watchdog.share_table(exchange):
        text = f"{why}: the ranks cannot watch each other, so one that hangs will hang the job"
        streams.write_error(f"dptrain: warning: {printable(text)}\n")


def joined(here: Sequence[int], leaders: Mapping[int, tuple[str, int]], post: Post) -> None:
    """See `Watchdog.joined`."""
    if _watchdog is not None:
        _watchdog.joined(here, leaders, post)


def ring(ranks: Sequence[int]) -> Ring | None:
    """See `Watchdog.ring`; None where nobody watches."""
    return None if _watchdog is None else _watchdog.ring(ranks)


def limit(warning: float | None = None, timeout: float | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Set how many seconds ranks may wait for another; None for the environment's value, 0 for ever."""
    chosen = Limits(
        _seconds("DPTRAIN_STALL_WARNING", environ, Limits.warning) if warning is None else warning,
        _seconds("DPTRAIN_STALL_TIMEOUT", environ, Limits.timeout) if timeout is None else timeout,
    )
    if _watchdog is not None:
        _watchdog.limits = chosen


def leave(how: str) -> None:
    """Announce that this rank leaves the others; returns when they have left too."""
    if _watchdog is not None:
        _watchdog.leave(how)


def _leave() -> None:
    if _watchdog is not None:
        failure.report_uncaught()
    leave("the end of its script")
    if _is_fork and has_mpi() and not is_ours():
        streams.flush()
        exit_at_once(exit_codes.requested)  # mpi4py would call MPI_Finalize here, in the rank's name
    if _watchdog is not None and has_mpi():
        # MPI_Finalize waits for the other ranks, and Python no longer runs where mpi4py calls it: the system watches.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LONGER * _watchdog.limits.timeout)
    end_mpi()
    if not has_mpi():
        signal.setitimer(signal.ITIMER_REAL, 0)
    if _watchdog is not None:
        _watchdog.linger()


def _seconds(name: str, environ: Mapping[str, str], default: float) -> float:
    text = environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise AgreedError(
            "start-up", ConfigError.exit_code, f"{name} = {text!r}: expected seconds, or 0 for no limit", []
        )
    return value
