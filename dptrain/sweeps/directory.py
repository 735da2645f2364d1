"""The directory of a sweep: its plan, what happened, and every epoch; a killed sweep continues from it.

sweep.yaml      the plan: everything that decides results; its file claims the directory
results.jsonl   one object per run and epoch: trial, run, seed, epoch (from 1), then the epoch's logs
journal.jsonl   one object per event: a trial comes up, a segment of a run ends
paused/         states of runs that wait at a rung: RUN-EPOCHS.safetensors
lock, holder    the lock, and who holds it

A line counts from the moment its newline is written, so a torn last line never happened. What the journal says is
there, is there: a state file, the epochs in results.jsonl and the journal's line reach the disk in this order.
"""

import contextlib
import datetime
import hashlib
import json
import math
import numbers
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from filelock import FileLock, Timeout

from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.runtime.files import output_error, sync, write_atomically
from dptrain.sweeps.records import Ending, Run, Status, Trial

_PLAN, _RESULTS, _JOURNAL, _PAUSED, _LOCK, _HOLDER = (
    "sweep.yaml", "results.jsonl", "journal.jsonl", "paused", "lock", "holder",
)  # fmt: skip
# Seconds that a killed job's processes may take to let go of the lock.
_PATIENCE = 1.0
_ELSEWHERE = "choose another --out"
_AGAIN = "once it can be written, start the sweep again with the same --out: it continues"

_T = TypeVar("_T")


class SweepDirectory:
    """A directory that belongs to one sweep, new or continued. Only rank 0 has one.

    It is locked from here to `close`, by the kernel (flock): a sweep that is killed leaves no lock behind. Some network
    file systems have no flock, or one that other machines do not see. There two sweeps on two machines are not kept
    apart; where flock is missing altogether, filelock warns and falls back on a file that a killed sweep leaves behind.

    Opening a directory that holds the same sweep makes it consistent again: torn last lines go, and so do the epochs of
    segments that had not ended, which will be trained again, and all there is of a paused run whose state is missing
    or damaged.

    Args:
        path: the directory; made where it does not exist.
        plan: everything that decides results, of what JSON can carry.

    Attributes:
        trials: in the order of their numbers.
        endings: of segments, in the order in which they came.

    Raises:
        ConfigError: it holds a sweep with another plan; lists the differences.
        DataError: a line that is not the last one cannot be read, or contradicts the others.
        OutputError: it holds something else, another process works in it, or it cannot be written.
    """

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        self.path = path
        self.trials: list[Trial] = []
        self.endings: list[Ending] = []
        self._paused: dict[int, _State] = {}
        # Of each run, the epochs in results.jsonl.
        self._epochs: dict[int, int] = {}
        with _errors(path, _ELSEWHERE), contextlib.ExitStack() as stack:
            # Before anything is written: nothing is left in a directory that is not ours.
            _is_ours(path, plan)
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(path))
            if not _is_ours(path, plan):
                write_atomically(path / _PLAN, yaml.safe_dump(_plain(plan), sort_keys=False).encode())
            for folder in (path, path / _PAUSED):
                folder.mkdir(exist_ok=True)
                for left in folder.glob(".*.tmp"):
                    left.unlink()
            self._continue()
            self._results = stack.enter_context(_Lines(path / _RESULTS))
            self._journal = stack.enter_context(_Lines(path / _JOURNAL))
            sync(path)
            self._open = stack.pop_all()

    def close(self) -> None:
        """Release the lock; a second time does nothing."""
        with _errors(self.path, _AGAIN):
            self._open.close()

    def __enter__(self) -> "SweepDirectory":
        """Return the directory itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self.close()

    def epochs(self) -> Iterator[dict[str, Any]]:
        """Return the objects of results.jsonl in their order; what was not finite is None.

        Raises:
            OutputError: it cannot be read.
        """
        with _errors(self.path / _RESULTS, _AGAIN), open(self.path / _RESULTS, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)

    def add_trial(self, trial: Trial) -> None:
        """Write that a trial came up; the numbers rise from 0.

        Raises:
            ConfigError: its setting is not what JSON can carry.
            OutputError: it cannot be written.
        """
        if trial.number != len(self.trials):
            raise ValueError(f"trial {trial.number} comes after {len(self.trials)} trials")
        try:
            line = _line({"kind": "trial", "trial": trial.number, "setting": dict(trial.setting)})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"trial {trial.number}: JSON cannot carry its setting {trial.setting} ({error})"
            ) from None
        self._journal.add(line)
        self._journal.sync()
        self.trials.append(trial)

    def add_epoch(self, run: Run, epoch: int, logs: Mapping[str, Any]) -> None:
        """Write an epoch's logs; they survive the end of this process, and once the run has an ending a power cut too.

        JSON has no NaN and no infinity: either becomes null.

        Args:
            run: whose trial was added.
            epoch: from 1, the one after the run's last.
            logs: numbers by name.

        Raises:
            OutputError: it cannot be written.
        """
        if epoch != self._epochs.get(run.number, 0) + 1:
            raise ValueError(f"run {run.number}: epoch {epoch} comes after {self._epochs.get(run.number, 0)} epochs")
        who = {"trial": run.trial, "run": run.number, "seed": run.seed, "epoch": epoch}
        # Twice: the first gives the order, the last the values.
        self._results.add(_line(who | _standard(logs) | who))
        self._epochs[run.number] = epoch

    def add_ending(self, ending: Ending, state: bytes | None) -> None:
        """Write how a segment ended; it survives a power cut.

        Args:
            ending: its `epochs` are those that were added; metrics that are not finite come back as NaN.
            state: what a paused run goes on from, None for any other.

        Raises:
            OutputError: it cannot be written.
        """
        run = ending.run
        if ending.epochs != self._epochs.get(run.number, 0):
            raise ValueError(
                f"run {run.number}: ends after {ending.epochs} epochs, {self._epochs.get(run.number, 0)} came"
            )
        if run.trial >= len(self.trials) or (ending.status is Status.PAUSED) != (state is not None):
            raise ValueError(f"run {run.number}: {ending.status} with {'no state' if state is None else 'a state'}")
        event = {
            "kind": "ending",
            "run": run.number,
            "trial": run.trial,
            "seed": run.seed,
            "status": ending.status,
            "epochs": ending.epochs,
            "seconds": float(ending.seconds),
            "metrics": _standard(ending.metrics),
            "reason": ending.reason,
            "exit_code": int(ending.exit_code),
        }
        kept = None
        if state is not None:
            kept = _State(_name(ending), len(state), hashlib.sha256(state).hexdigest())
            event["state"] = {"bytes": kept.size, "sha256": kept.sha256}
            write_atomically(self._place(kept), state, advice=_AGAIN)
        self._results.sync()
        self._journal.add(_line(event))
        self._journal.sync()
        self.endings.append(ending)
        before = self._paused.pop(run.number, None)
        if kept is not None:
            self._paused[run.number] = kept
        if before is not None and (kept is None or before.file != kept.file):
            with _errors(self._place(before), _AGAIN):
                self._place(before).unlink(missing_ok=True)

    def state(self, run: Run) -> bytes:
        """Return the state of a paused run.

        Raises:
            DataError: it is no longer what was written.
            KeyError: the run is not paused.
            OutputError: it cannot be read.
        """
        state = self._paused[run.number]
        with _errors(self._place(state), _AGAIN):
            content = self._place(state).read_bytes()
        if hashlib.sha256(content).hexdigest() != state.sha256:
            raise DataError(
                f"{self._place(state)}: not what was written there; start the sweep again with the same --out: "
                "it trains this run again"
            )
        return content

    def _place(self, state: "_State") -> Path:
        return self.path / _PAUSED / state.file

    def _continue(self) -> None:
        """Read what is there, and write anew what a kill or a lost state has left inconsistent."""
        journal = self.path / _JOURNAL
        events = _read(journal, _Event.read)
        last: dict[int, _Event] = {}
        for number, (_, event) in enumerate(events, 1):
            self._take(event, last, f"{journal}, line {number}")
        states = {number: event.state for number, event in last.items() if event.state is not None}
        lost = {number for number, state in states.items() if not state.is_at(self._place(state))}
        self._paused = {number: state for number, state in states.items() if number not in lost}
        kept = [(line, event) for line, event in events if event.ending is None or event.ending.run.number not in lost]
        self.endings = [event.ending for _, event in kept if event.ending is not None]
        # The journal first: whatever happens after that, what it says is there.
        _rewrite(journal, [line for line, _ in kept])
        self._keep_epochs({ending.run.number: ending.epochs for ending in self.endings})
        needed = {state.file for state in self._paused.values()}
        for file in (self.path / _PAUSED).iterdir():
            if file.name not in needed:
                file.unlink()

    def _take(self, event: "_Event", last: dict[int, "_Event"], where: str) -> None:
        """Take in one event of the journal, after those before it."""
        if event.trial is not None:
            if event.trial.number != len(self.trials):
                raise DataError(f"{where}: trial {event.trial.number} comes after {len(self.trials)} trials")
            self.trials.append(event.trial)
        if event.ending is not None:
            run = event.ending.run
            before = last.get(run.number)
            if run.trial >= len(self.trials):
                raise DataError(f"{where}: a run of trial {run.trial}, which has not come up")
            if before is not None and before.state is None:
                raise DataError(f"{where}: run {run.number} had ended before")
            last[run.number] = event

    def _keep_epochs(self, wanted: Mapping[int, int]) -> None:
        """Drop the epochs of results.jsonl that come after those wanted, by run."""
        path = self.path / _RESULTS
        kept = []
        for number, (line, (run, epoch)) in enumerate(_read(path, _run_and_epoch), 1):
            if epoch > wanted.get(run, 0):
                continue
            before = self._epochs.get(run, 0)
            if epoch != before + 1:
                raise DataError(f"{path}, line {number}: epoch {epoch} of run {run} comes after {before} epochs")
            self._epochs[run] = epoch
            kept.append(line)
        for run, epochs in wanted.items():
            found = self._epochs.get(run, 0)
            if found != epochs:
                raise DataError(
                    f"{path}: {found} epochs of run {run}, {epochs} in {_JOURNAL}; "
                    f"put the file back as it was, or {_ELSEWHERE}"
                )
        _rewrite(path, kept)


@dataclass(frozen=True)
class _State:
    """The file of a paused run's state: its name says of which epoch, so that none is ever overwritten by a later."""

    file: str
    size: int
    sha256: str

    def is_at(self, path: Path) -> bool:
        """Whether a file holds what was written."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256


@dataclass(frozen=True)
class _Event:
    """One line of the journal: a trial, or an ending with the state that a paused run has."""

    trial: Trial | None = None
    ending: Ending | None = None
    state: _State | None = None

    @staticmethod
    def read(fields: Any) -> "_Event":
        """Return a line's event."""
        if fields["kind"] == "trial":
            return _Event(Trial(int(fields["trial"]), dict(fields["setting"])))
        if fields["kind"] != "ending":
            raise ValueError(f"unknown kind {fields['kind']!r}")
        ending = Ending(
            Run(int(fields["run"]), int(fields["trial"]), int(fields["seed"])),
            Status(fields["status"]),
            int(fields["epochs"]),
            float(fields["seconds"]),
            {name: math.nan if value is None else _checked(name, value) for name, value in fields["metrics"].items()},
            str(fields["reason"]),
            int(fields["exit_code"]),
        )
        state = None
        if ending.status is Status.PAUSED:
            state = _State(_name(ending), int(fields["state"]["bytes"]), str(fields["state"]["sha256"]))
        return _Event(None, ending, state)


def _checked(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is no number")
    return value


def _run_and_epoch(fields: Any) -> tuple[int, int]:
    for name, value in fields.items():
        if value is not None:
            _checked(name, value)
    return int(fields["run"]), int(fields["epoch"])


def _name(ending: Ending) -> str:
    return f"{ending.run.number}-{ending.epochs}.safetensors"


class _Lines:
    """A file that lines are appended to, open as long as it is in use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._end = self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, line: bytes) -> None:
        """Hand a line to the operating system: all of it, or nothing."""
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise output_error(self._path, error, len(line), advice=_AGAIN) from error
        self._end += len(line)

    def sync(self) -> None:
        """Flush all lines to the disk."""
        with _errors(self._path, _AGAIN):
            os.fsync(self._file.fileno())


def _read(path: Path, parse: Callable[[Any], _T]) -> list[tuple[bytes, _T]]:
    """Return the lines of a file, each as it is and parsed; no lines where there is no file.

    What comes after the last newline, and a last line that cannot be parsed, was torn: it is left out.

    Raises:
        DataError: any other line cannot be parsed.
    """
    if not path.exists():
        return []
    lines = [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append((line, parse(json.loads(line))))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number < len(lines):
                raise DataError(
                    f"{path}, line {number}: cannot be read ({type(error).__name__}: {error}); "
                    f"mend or remove the line, or {_ELSEWHERE}"
                ) from None
    return found


def _rewrite(path: Path, lines: list[bytes]) -> None:
    """Let a file consist of these lines."""
    content = b"".join(lines)
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)


def _is_ours(path: Path, plan: Mapping[str, Any]) -> bool:
    """Return True where the directory holds this sweep, False where it holds nothing.

    Raises:
        ConfigError: it holds a sweep with another plan.
        DataError: its plan cannot be read.
        OutputError: it holds something else.
    """
    if not path.exists():
        return False
    if not path.is_dir():
        raise OutputError(f"{path} is not a directory; {_ELSEWHERE}")
    file = path / _PLAN
    if not file.exists():
        names = sorted(place.name for place in path.iterdir())
        # Of a sweep that was killed before it wrote its plan.
        others = [name for name in names if name not in (_LOCK, _HOLDER) and not name.startswith(f".{_PLAN}.")]
        if others:
            raise OutputError(f"{path} is not empty and holds no sweep ({others[0]}); {_ELSEWHERE}")
        return False
    try:
        there = yaml.safe_load(file.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not YAML ({' '.join(str(error).split())}); {_ELSEWHERE}") from None
    different = list(_differences("", _plain(there), _plain(plan)))
    if different:
        raise ConfigError(f"{path} holds another sweep: {'; '.join(different)}; {_ELSEWHERE}")
    return True


def _differences(name: str, there: Any, here: Any) -> Iterator[str]:
    """Return a line for every value of two plans that is not the same."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in there | here:
            yield from _differences(f"{name}.{key}" if name else key, there.get(key, _NOTHING), here.get(key, _NOTHING))
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, (one, other) in enumerate(zip(there, here, strict=True)):
            yield from _differences(f"{name}[{number}]", one, other)
    else:
        texts = ["nothing" if value is _NOTHING else json.dumps(value) for value in (there, here)]
        if texts[0] != texts[1]:
            short = [text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}" for text in texts]
            yield f"{name or 'plan'}: {short[0]} there, {short[1]} here"


_NOTHING = object()


def _plain(plan: Any) -> Any:
    """Return a plan as it comes back from a file: lists for tuples, text for what is like text."""
    return json.loads(json.dumps(plan, default=str))


def _line(fields: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(fields, allow_nan=False)}\n".encode()


def _standard(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers as JSON has them, NumPy's too; None for what is not finite."""
    return {name: _number(value) for name, value in logs.items()}


def _number(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return value


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a directory.

    Raises:
        OutputError: another process holds it; says which.
    """
    # A file beside the lock: older versions of filelock empty the lock's file when they try it.
    holder = path / _HOLDER
    # Closing from another thread than the opening one must release it.
    lock = FileLock(path / _LOCK, timeout=_PATIENCE, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        try:
            who = f" ({holder.read_text(encoding='utf-8')})"
        except (OSError, UnicodeDecodeError):
            who = ""
        raise OutputError(f"{path}: another sweep works there{who}; end it, or {_ELSEWHERE}") from None
    try:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        holder.write_text(f"host {socket.gethostname()}, pid {os.getpid()}, since {now}", encoding="utf-8")
        yield
    finally:
        # The lock's own file stays: without its name, two could hold two files.
        holder.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def _errors(path: Path, advice: str) -> Iterator[None]:
    """Turn an operating system's error into one line."""
    try:
        yield
    except OutputError:
        raise
    except NotImplementedError as error:  # a file system without locks
        raise OutputError(f"{path}: cannot be locked ({error}); {advice}") from None
    except OSError as error:
        raise output_error(Path(str(error.filename or path)), error, advice=advice) from error
