"""The directory of a sweep: its plan, what happened, and every epoch; a killed sweep continues from it.

sweep.yaml      the plan: everything that decides results; its file claims the directory
results.jsonl   one object per run and epoch: trial, run, seed, fold (in cross-validation), epoch (from 1), its logs
journal.jsonl   one object per event: a trial or runs come up, a segment of a run ends, a run's model was tested
states/         where runs stand that wait at a rung, or whose models are kept: RUN-EPOCHS.safetensors
lock, holder    the lock, and who holds it

A line counts from the moment its newline is written, so a torn last line never happened. What the journal says is
there, is there: a state file, the epochs in results.jsonl and the journal's line reach the disk in this order.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.runtime.files import output_error, sync, write_atomically
from dptrain.runtime.locks import HOLDER, LOCK, locked
from dptrain.sweeps import growth
from dptrain.sweeps.messages import run_fact, to_run
from dptrain.sweeps.records import Ending, Run, Status, Trial

_PLAN, _RESULTS, _JOURNAL, _STATES = "sweep.yaml", "results.jsonl", "journal.jsonl", "states"
_ELSEWHERE = "choose another --out"
_AGAIN = "once it can be written, start the sweep again with the same --out: it continues"

_T = TypeVar("_T")


class SweepDirectory:
    """A directory that belongs to one sweep, new or continued. Only rank 0 has one.

    It is locked from here to `close`, see `dptrain.runtime.locks.locked`.

    Opening a directory that holds the same sweep makes it consistent again: torn last lines go, and so do the epochs of
    segments that had not ended, which will be trained again, and all there is of a paused run whose state is missing
    or damaged.

    A plan that has grown (see `growth`) takes the place of the one that is there. Where it has more epochs, runs that
    had come to their end wait there if their state was kept; the others are trained again.

    Args:
        path: the directory; made where it does not exist.
        plan: everything that decides results, of what JSON can carry.

    Attributes:
        trials: in the order of their numbers.
        runs: that have come up, in the order in which they did.
        endings: of segments, in the order in which they came.
        tested: number of a run -> metrics of its model on the test set.
        begin_again: how many runs had come to their end and are trained again from the first epoch.

    Raises:
        ConfigError: it holds a sweep with another plan; lists the differences.
        DataError: a line that is not the last one cannot be read, or contradicts the others.
        OutputError: it holds something else, another process works in it, or it cannot be written.
    """

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        self.path = path
        self.trials: list[Trial] = []
        self.runs: list[Run] = []
        self.endings: list[Ending] = []
        self.tested: dict[int, dict[str, float]] = {}
        self.begin_again = 0
        # Of each run whose state is there.
        self._states: dict[int, _State] = {}
        # Of each run, the epochs in results.jsonl.
        self._epochs: dict[int, int] = {}
        with _errors(path, _ELSEWHERE), contextlib.ExitStack() as stack:
            # Before anything is written: nothing is left in a directory that is not ours.
            _plan_there(path, plan)
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path, "sweep", _ELSEWHERE))
            there = _plan_there(path, plan)
            if there is None:
                self._write_plan(plan)
            for folder in (path, path / _STATES):
                folder.mkdir(exist_ok=True)
                for left in folder.glob(".*.tmp"):
                    left.unlink()
            self._continue(None if there is None else growth.added_epochs(there, _plain(plan)))
            if there is not None and there != _plain(plan):
                self._write_plan(plan)  # the last: until then the sweep has not grown
            self._results = stack.enter_context(_Lines(path / _RESULTS))
            self._journal = stack.enter_context(_Lines(path / _JOURNAL))
            sync(path)
            self._open = stack.pop_all()

    def _write_plan(self, plan: Mapping[str, Any]) -> None:
        write_atomically(self.path / _PLAN, yaml.safe_dump(_plain(plan), sort_keys=False).encode())

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

    def add_runs(self, runs: Sequence[Run]) -> None:
        """Write that runs came up, of trials that were added.

        Raises:
            OutputError: it cannot be written.
        """
        self._journal.add(_line({"kind": "runs", "runs": [run_fact(run) for run in runs]}))
        self._journal.sync()
        self.runs += runs

    def add_test(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Write what a run's model, which has come to its end, makes of the test set.

        Raises:
            OutputError: it cannot be written.
        """
        self._journal.add(_line({"kind": "test", "run": run.number, "metrics": _standard(metrics)}))
        self._journal.sync()
        self.tested[run.number] = dict(metrics)

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
        fold = {"fold": run.fold} if run.folds > 1 else {}
        who = {"trial": run.trial, "run": run.number, "seed": run.seed, **fold, "epoch": epoch}
        # Twice: the first gives the order, the last the values.
        self._results.add(_line(who | _standard(logs) | who))
        self._epochs[run.number] = epoch

    def add_ending(self, ending: Ending, state: bytes | None) -> None:
        """Write how a segment ended; it survives a power cut.

        Args:
            ending: its `epochs` are those that were added; metrics that are not finite come back as NaN.
            state: what a paused run goes on from; of one that is done, if it is to be kept.

        Raises:
            OutputError: it cannot be written.
        """
        run = ending.run
        if ending.epochs != self._epochs.get(run.number, 0):
            raise ValueError(
                f"run {run.number}: ends after {ending.epochs} epochs, {self._epochs.get(run.number, 0)} came"
            )
        needs, takes = ending.status is Status.PAUSED, ending.status in (Status.PAUSED, Status.DONE)
        if run.trial >= len(self.trials) or (needs and state is None) or (state is not None and not takes):
            raise ValueError(f"run {run.number}: {ending.status} with {'no state' if state is None else 'a state'}")
        event = {
            "kind": "ending",
            "run": run.number,
            "trial": run.trial,
            "seed": run.seed,
            **({"fold": run.fold, "folds": run.folds} if run.folds > 1 else {}),
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
        before = self._states.pop(run.number, None)
        if kept is not None:
            self._states[run.number] = kept
        if before is not None and (kept is None or before.file != kept.file):
            with _errors(self._place(before), _AGAIN):
                self._place(before).unlink(missing_ok=True)

    def state(self, run: Run) -> bytes:
        """Return the state of a run that is paused, or whose state is kept.

        Raises:
            DataError: it is no longer what was written.
            KeyError: there is none.
            OutputError: it cannot be read.
        """
        state = self._states[run.number]
        with _errors(self._place(state), _AGAIN):
            content = self._place(state).read_bytes()
        if hashlib.sha256(content).hexdigest() != state.sha256:
            raise DataError(
                f"{self._place(state)}: not what was written there; start the sweep again with the same --out: "
                "it trains this run again"
            )
        return content

    def has_state(self, run: Run) -> bool:
        """Return whether the state of a run is there."""
        return run.number in self._states

    def is_older(self, run: Run, file: Path) -> bool:
        """Return whether the state of a run is older than a file that there is."""
        return self._place(self._states[run.number]).stat().st_mtime_ns <= file.stat().st_mtime_ns

    def release(self, run: Run) -> None:
        """Delete the state of a run that has come to its end, if it is there.

        Raises:
            OutputError: it cannot be deleted.
        """
        state = self._states.pop(run.number, None)
        if state is not None:
            with _errors(self._place(state), _AGAIN):
                self._place(state).unlink(missing_ok=True)

    def _place(self, state: "_State") -> Path:
        return self.path / _STATES / state.file

    def _continue(self, ended_after: int | None) -> None:
        """Read what is there, and write anew what a kill or a lost state has left inconsistent.

        Args:
            ended_after: epochs after which runs are to go on that had come to their end there; None for none.
        """
        journal = self.path / _JOURNAL
        events = _read(journal, _Event.read)
        if ended_after is not None:
            events = [_reopened(line, event, ended_after) for line, event in events]
        last: dict[int, _Event] = {}
        for number, (_, event) in enumerate(events, 1):
            self._take(event, last, f"{journal}, line {number}")
        states = {number: event.state for number, event in last.items() if event.state is not None}
        self._states = {number: state for number, state in states.items() if state.is_at(self._place(state))}
        waiting = {number for number, event in last.items() if event.is_paused}
        lost = waiting - self._states.keys()
        self.begin_again = 0 if ended_after is None else len(lost)
        kept = [
            (line, event)
            for line, event in events
            if event.of_run not in lost and not (event.test is not None and event.of_run in waiting)
        ]
        self.endings = [event.ending for _, event in kept if event.ending is not None]
        self.tested = {event.test[0]: event.test[1] for _, event in kept if event.test is not None}
        # The journal first: whatever happens after that, what it says is there.
        _rewrite(journal, [line for line, _ in kept])
        self._keep_epochs({ending.run.number: ending.epochs for ending in self.endings})
        needed = {state.file for state in self._states.values()}
        for file in (self.path / _STATES).iterdir():
            if file.name not in needed:
                file.unlink()

    def _take(self, event: "_Event", last: dict[int, "_Event"], where: str) -> None:
        """Take in one event of the journal, after those before it."""
        if event.trial is not None:
            if event.trial.number != len(self.trials):
                raise DataError(f"{where}: trial {event.trial.number} comes after {len(self.trials)} trials")
            self.trials.append(event.trial)
        self.runs += event.runs
        if event.ending is not None:
            run = event.ending.run
            before = last.get(run.number)
            if run.trial >= len(self.trials):
                raise DataError(f"{where}: a run of trial {run.trial}, which has not come up")
            if before is not None and not before.is_paused:
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
    """The file of a run's state: its name says of which epoch, so that none is ever overwritten by a later."""

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
    """One line of the journal: a trial, runs, the test of a run by its number, or an ending, with the state if kept."""

    trial: Trial | None = None
    ending: Ending | None = None
    state: _State | None = None
    runs: tuple[Run, ...] = ()
    test: tuple[int, dict[str, float]] | None = None

    @property
    def is_paused(self) -> bool:
        """Whether it is the ending of a run that waits."""
        return self.ending is not None and self.ending.status is Status.PAUSED

    @property
    def of_run(self) -> int | None:
        """The number of the run whose ending or test it is."""
        if self.ending is not None:
            return self.ending.run.number
        return None if self.test is None else self.test[0]

    @staticmethod
    def read(fields: Any) -> "_Event":
        """Return a line's event."""
        if fields["kind"] == "trial":
            return _Event(Trial(int(fields["trial"]), dict(fields["setting"])))
        if fields["kind"] == "runs":
            return _Event(runs=tuple(to_run([int(value) for value in fact]) for fact in fields["runs"]))
        if fields["kind"] == "test":
            return _Event(test=(int(fields["run"]), _metrics(fields)))
        if fields["kind"] != "ending":
            raise ValueError(f"unknown kind {fields['kind']!r}")
        ending = Ending(
            _run(fields),
            Status(fields["status"]),
            int(fields["epochs"]),
            float(fields["seconds"]),
            _metrics(fields),
            str(fields["reason"]),
            int(fields["exit_code"]),
        )
        state = None
        if ending.status is Status.PAUSED or "state" in fields:
            state = _State(_name(ending), int(fields["state"]["bytes"]), str(fields["state"]["sha256"]))
        return _Event(None, ending, state)


def _reopened(line: bytes, event: _Event, epochs: int) -> tuple[bytes, _Event]:
    """Return the line and the event of an ending as that of a run that waits, if it had come so far and was done."""
    ending = event.ending
    if ending is None or ending.status is not Status.DONE or ending.epochs < epochs:
        return line, event
    state = event.state or _State(_name(ending), 0, "")
    fields = json.loads(line) | {"status": Status.PAUSED, "state": {"bytes": state.size, "sha256": state.sha256}}
    return _line(fields), _Event(None, dataclasses.replace(ending, status=Status.PAUSED), state)


def _run(fields: Any) -> Run:
    number, trial, seed = (int(fields[name]) for name in ("run", "trial", "seed"))
    return Run(number, trial, seed, int(fields.get("fold", 0)), int(fields.get("folds", 1)))


def _metrics(fields: Any) -> dict[str, float]:
    return {name: math.nan if value is None else _checked(name, value) for name, value in fields["metrics"].items()}


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
                    f"fix or remove the line, or {_ELSEWHERE}"
                ) from None
    return found


def _rewrite(path: Path, lines: list[bytes]) -> None:
    """Let a file consist of these lines."""
    content = b"".join(lines)
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)


def _plan_there(path: Path, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the plan of this sweep as it is in the directory, None where that holds nothing.

    Raises:
        ConfigError: it holds a sweep with another plan.
        DataError: its plan cannot be read.
        OutputError: it holds something else.
    """
    if not path.exists():
        return None
    if not path.is_dir():
        raise OutputError(f"{path} is not a directory; {_ELSEWHERE}")
    file = path / _PLAN
    if not file.exists():
        names = sorted(place.name for place in path.iterdir())
        # Of a sweep that was killed before it wrote its plan.
        others = [name for name in names if name not in (LOCK, HOLDER) and not name.startswith(f".{_PLAN}.")]
        if others:
            raise OutputError(f"{path} is not empty and holds no sweep ({others[0]}); {_ELSEWHERE}")
        return None
    try:
        there = yaml.safe_load(file.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not YAML ({' '.join(str(error).split())}); {_ELSEWHERE}") from None
    found = _plain(there)
    if not isinstance(found, dict):
        raise DataError(f"{file}: no plan of a sweep; {_ELSEWHERE}")
    different = growth.differences(found, _plain(plan))
    if different:
        raise ConfigError(f"{path} holds another sweep: {'; '.join(different)}; {_ELSEWHERE}")
    return found


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
