"""The directory of a sweep: its plan, journal and every epoch; a killed sweep continues from it.

sweep.yaml      the plan: everything that decides results; its file claims the directory
results.jsonl   one object per run and epoch: trial, run, seed, fold (in cross-validation), epoch (from 1), its logs
journal.jsonl   one object per event: a trial or runs come up, a segment of a run ends, a run's model was tested
states/         states of runs that wait at a rung or whose models are kept: RUN-EPOCHS.safetensors
lock, holder    the lock, and its holder

A state file, the epochs in results.jsonl and the journal's line (see `lines`) reach the disk in this order, so that
everything the journal names exists.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import numbers
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.runtime.storage.files import FILE, FOLDER, Directory, open_directory, output_error, to_become, writing
from dptrain.runtime.storage.locks import HOLDER, LOCK, locked
from dptrain.runtime.storage.yaml_files import parse_mapping
from dptrain.runtime.text import one_line
from dptrain.saving.run_folder import CONFIG, MODELS, PLAN, REPORT
from dptrain.sweeps import growth, lines
from dptrain.sweeps.records import Ending, Run, Status, Trial
from dptrain.sweeps.scheduling.messages import run_fact, to_run

RESULTS, TRIALS = "results.jsonl", "trials.csv"
_JOURNAL, _STATES = "journal.jsonl", "states"
# Files that a sweep writes.
_FILES = (PLAN, RESULTS, _JOURNAL, TRIALS, REPORT, CONFIG, LOCK, HOLDER)
_STATE = re.compile(r"[0-9]+-[0-9]+\.safetensors")
_MODEL = re.compile(r"trial-[0-9]+-seed--?[0-9]+(-fold-[0-9]+)?\.keras")
# Most bytes of a plan: enough for thousands of settings, and read in seconds.
_MAX_PLAN = 1 << 20
_ELSEWHERE = "choose another --out"
_AGAIN = "once it can be written, start the sweep again with the same --out: it continues"


class SweepDirectory:
    """The locked directory of one sweep, new or continued; only rank 0 has one.

    Opening it makes it consistent: torn last lines are dropped, and so are the epochs of unfinished segments and all of
    a paused run whose state is missing or damaged. A grown plan (see `growth`) replaces the stored one; with more
    epochs, finished runs whose state was kept wait there, and the others are trained again.
    """

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        self.path = path
        self.trials: list[Trial] = []
        self.runs: list[Run] = []
        self.endings: list[Ending] = []
        # Of each tested run: its model's metrics on the test set, and bootstrap draws of the sweep's metric there.
        self.tested: dict[int, dict[str, float]] = {}
        self.draws: dict[int, list[float]] = {}
        # Number of runs that had ended and are trained again from the first epoch.
        self.begin_again = 0
        # Saved states by run.
        self._states: dict[int, _State] = {}
        # Number of epochs in results.jsonl, by run.
        self._epochs: dict[int, int] = {}
        with _errors(path, _ELSEWHERE), contextlib.ExitStack() as stack:
            if path.exists() and not path.is_dir():
                raise OutputError(f"{path} is not a directory; {_ELSEWHERE}")
            if path.exists():  # before writing: no traces in a directory that is not ours
                with open_directory(path) as folder:
                    _plan_there(folder, plan)
            self._folder = stack.enter_context(open_directory(path, make=True))
            stack.enter_context(locked(path, "sweep", _ELSEWHERE))
            there = _plan_there(self._folder, plan)
            if there is None:
                self._write_plan(plan)
            self._state_files = stack.enter_context(self._folder.folder(_STATES, make=True))
            for folder in (self._folder, self._state_files):
                folder.remove_temporaries(locked=True)
            self._continue(None if there is None else growth.added_epochs(there, _plain(plan)))
            if there is not None and there != _plain(plan):
                self._write_plan(plan)  # the last: until then the sweep has not grown
            self._results = stack.enter_context(lines.Lines(self._folder, RESULTS, _AGAIN))
            self._journal = stack.enter_context(lines.Lines(self._folder, _JOURNAL, _AGAIN))
            self._folder.sync()
            self._open = stack.pop_all()

    def _write_plan(self, plan: Mapping[str, Any]) -> None:
        self._replace(self._folder, PLAN, _plan_text(plan), _ELSEWHERE)

    @staticmethod
    def _replace(folder: Directory, name: str, content: bytes, advice: str) -> None:
        with writing(folder.path / name, len(content), advice=advice):
            folder.replace(name, [content])

    def close(self) -> None:
        """Release the lock; idempotent."""
        with _errors(self.path, _AGAIN):
            self._open.close()

    def __enter__(self) -> "SweepDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def epochs(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of results.jsonl in order; non-finite values are None."""
        with _errors(self.path / RESULTS, _AGAIN), self._folder.open(RESULTS) as file:
            for line in file:
                yield lines.decode(line)

    def add_trial(self, trial: Trial) -> None:
        """Record a new trial; numbers rise from 0."""
        if trial.number != len(self.trials):
            raise ValueError(f"trial {trial.number} comes after {len(self.trials)} trials")
        try:
            line = lines.encode({"kind": "trial", "trial": trial.number, "setting": dict(trial.setting)})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"trial {trial.number}: JSON cannot carry its setting {trial.setting} ({error})"
            ) from None
        self._journal.add(line)
        self._journal.sync()
        self.trials.append(trial)

    def add_runs(self, runs: Sequence[Run]) -> None:
        """Record new runs of recorded trials."""
        self._journal.add(lines.encode({"kind": "runs", "runs": [run_fact(run) for run in runs]}))
        self._journal.sync()
        self.runs += runs

    def add_test(self, run: Run, metrics: Mapping[str, float], draws: Sequence[float] = ()) -> None:
        """Record test metrics of a finished run's model, and bootstrap draws of the sweep's metric."""
        drawn = {"draws": [_number(value) for value in draws]} if draws else {}
        self._journal.add(lines.encode({"kind": "test", "run": run.number, "metrics": _standard(metrics), **drawn}))
        self._journal.sync()
        self.tested[run.number] = dict(metrics)
        self.draws[run.number] = list(draws)

    def add_epoch(self, run: Run, epoch: int, logs: Mapping[str, Any]) -> None:
        """Record an epoch's logs, counted from 1; synced to disk with the run's next ending."""
        if epoch != self._epochs.get(run.number, 0) + 1:
            raise ValueError(f"run {run.number}: epoch {epoch} comes after {self._epochs.get(run.number, 0)} epochs")
        fold = {"fold": run.fold} if run.folds > 1 else {}
        who = {"trial": run.trial, "run": run.number, "seed": run.seed, **fold, "epoch": epoch}
        # Twice: the first gives the order, the last the values.
        self._results.add(lines.encode(who | _standard(logs) | who))
        self._epochs[run.number] = epoch

    def add_ending(self, ending: Ending, state: bytes | None) -> None:
        """Record how a segment ended, with the state of a paused or kept run; synced to disk."""
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
        new_state = None
        if state is not None:
            new_state = _State(_name(ending), len(state), hashlib.sha256(state).hexdigest())
            event["state"] = {"bytes": new_state.size, "sha256": new_state.sha256}
            self._replace(self._state_files, new_state.file, state, _AGAIN)
        self._results.sync()
        self._journal.add(lines.encode(event))
        self._journal.sync()
        self.endings.append(ending)
        before = self._states.pop(run.number, None)
        if new_state is not None:
            self._states[run.number] = new_state
        if before is not None and (new_state is None or before.file != new_state.file):
            with _errors(self._place(before), _AGAIN):
                self._state_files.remove(before.file)

    def state(self, run: Run) -> bytes:
        """Return the state of a run that is paused or kept, checked against its digest."""
        state = self._states[run.number]
        with _errors(self._place(state), _AGAIN):
            content = self._state_files.read(state.file, state.size)
        if hashlib.sha256(content).hexdigest() != state.sha256:
            raise DataError(
                f"{self._place(state)}: does not match its checksum; start the sweep again with the same --out, and "
                "it trains this run again"
            )
        return content

    def has_state(self, run: Run) -> bool:
        """Return whether the state of a run exists."""
        return run.number in self._states

    def has_model(self, run: Run) -> bool:
        """Return whether a run's model exists and is not older than its state."""
        with _errors(self.path / MODELS, _AGAIN):
            if self._folder.expect(MODELS, FOLDER) is None:
                return False
            with self._folder.folder(MODELS) as models:
                if models.expect(_model(run), FILE) is None:
                    return False
                state, model = self._states.get(run.number), models.stat(_model(run))
            before = None if state is None else self._state_files.stat(state.file)
            return before is None or (model is not None and before.st_mtime_ns <= model.st_mtime_ns)

    def add_model(self, run: Run, content: bytes) -> None:
        """Write the model of a run as a `.keras` file."""
        with _errors(self.path / MODELS, _AGAIN), self._folder.folder(MODELS, make=True) as models:
            self._replace(models, _model(run), content, _AGAIN)

    def keep_models(self, runs: Sequence[Run]) -> list[str]:
        """Delete the models of all other runs; return the files of these, relative to the directory."""
        with _errors(self.path / MODELS, _AGAIN):
            if self._folder.expect(MODELS, FOLDER) is None:
                return []
            names = [_model(run) for run in runs]
            with self._folder.folder(MODELS) as models:
                models.remove_temporaries(locked=True)
                for name in models.names():
                    if _MODEL.fullmatch(name) and name not in names and models.kind(name) == FILE:
                        models.remove(name)
                return [f"{MODELS}/{name}" for name in names if models.kind(name) is not None]

    def release(self, run: Run) -> None:
        """Delete the state of a finished run, if it exists."""
        state = self._states.pop(run.number, None)
        if state is not None:
            with _errors(self._place(state), _AGAIN):
                self._state_files.remove(state.file)

    def _place(self, state: "_State") -> Path:
        return self.path / _STATES / state.file

    def _continue(self, ended_after: int | None) -> None:
        """Read the journal and repair what a kill left; runs that ended after `ended_after` epochs are reopened."""
        events = lines.read(self._folder, _JOURNAL, _Event.read, _ELSEWHERE)
        if ended_after is not None:
            events = [_reopened(line, event, ended_after) for line, event in events]
        last: dict[int, _Event] = {}
        for number, (_, event) in enumerate(events, 1):
            self._take(event, last, f"{self.path / _JOURNAL}, line {number}")
        states = {number: event.state for number, event in last.items() if event.state is not None}
        self._states = {number: state for number, state in states.items() if state.is_in(self._state_files)}
        waiting = {number for number, event in last.items() if event.is_paused}
        lost = waiting - self._states.keys()
        self.begin_again = 0 if ended_after is None else len(lost)
        remaining = [
            (line, event)
            for line, event in events
            if event.of_run not in lost and not (event.test is not None and event.of_run in waiting)
        ]
        self.endings = [event.ending for _, event in remaining if event.ending is not None]
        self.tested = {event.test[0]: event.test[1] for _, event in remaining if event.test is not None}
        self.draws = {event.test[0]: event.test[2] for _, event in remaining if event.test is not None}
        # Rewrite the journal first: whatever happens then, everything that it names exists.
        self._rewrite(_JOURNAL, [line for line, _ in remaining])
        self._keep_epochs({ending.run.number: ending.epochs for ending in self.endings})
        needed = {state.file for state in self._states.values()}
        for name in self._state_files.names():
            if _STATE.fullmatch(name) and name not in needed and self._state_files.kind(name) == FILE:
                self._state_files.remove(name)

    def _rewrite(self, name: str, whole: Sequence[bytes]) -> None:
        """Replace a file's content by these lines, if it differs."""
        if self._folder.kind(name) is None or not self._folder.holds(name, whole):
            self._replace(self._folder, name, b"".join(whole), _ELSEWHERE)

    def _take(self, event: "_Event", last: dict[int, "_Event"], where: str) -> None:
        if event.trial is not None:
            if event.trial.number != len(self.trials):
                raise DataError(f"{where}: trial {event.trial.number} comes after {len(self.trials)} trials")
            self.trials.append(event.trial)
        self.runs += event.runs
        if event.ending is not None:
            run = event.ending.run
            before = last.get(run.number)
            if run.trial >= len(self.trials):
                raise DataError(f"{where}: run of trial {run.trial}, which does not exist yet")
            if before is not None and not before.is_paused:
                raise DataError(f"{where}: run {run.number} had already ended")
            last[run.number] = event

    def _keep_epochs(self, epochs_by_run: Mapping[int, int]) -> None:
        """Drop the epochs of results.jsonl beyond each run's recorded number."""
        path = self.path / RESULTS
        kept_lines = []
        records = lines.read(self._folder, RESULTS, _run_and_epoch, _ELSEWHERE)
        for number, (line, (run, epoch)) in enumerate(records, 1):
            if epoch > epochs_by_run.get(run, 0):
                continue
            before = self._epochs.get(run, 0)
            if epoch != before + 1:
                raise DataError(f"{path}, line {number}: epoch {epoch} of run {run} comes after {before} epochs")
            self._epochs[run] = epoch
            kept_lines.append(line)
        for run, epochs in epochs_by_run.items():
            there = self._epochs.get(run, 0)
            if there != epochs:
                raise DataError(
                    f"{path}: has {there} epochs of run {run}, but {_JOURNAL} has {epochs}; restore the file, or "
                    f"{_ELSEWHERE}"
                )
        self._rewrite(RESULTS, kept_lines)


@dataclass(frozen=True)
class _State:
    """The file of a run's state; its name has the epoch, so that no later state overwrites it."""

    file: str
    size: int
    sha256: str

    def is_in(self, folder: Directory) -> bool:
        if folder.kind(self.file) != FILE:
            return False
        with folder.open(self.file) as file:
            if os.fstat(file.fileno()).st_size != self.size:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256


@dataclass(frozen=True)
class _Event:
    """A line of the journal: a trial, runs, a run's test, or an ending with its state if kept."""

    trial: Trial | None = None
    ending: Ending | None = None
    state: _State | None = None
    runs: tuple[Run, ...] = ()
    test: tuple[int, dict[str, float], list[float]] | None = None

    @property
    def is_paused(self) -> bool:
        return self.ending is not None and self.ending.status is Status.PAUSED

    @property
    def of_run(self) -> int | None:
        if self.ending is not None:
            return self.ending.run.number
        return None if self.test is None else self.test[0]

    @staticmethod
    def read(fields: Any) -> "_Event":
        if fields["kind"] == "trial":
            return _Event(Trial(int(fields["trial"]), dict(fields["setting"])))
        if fields["kind"] == "runs":
            return _Event(runs=tuple(to_run([int(value) for value in fact]) for fact in fields["runs"]))
        if fields["kind"] == "test":
            draws = _metrics({"metrics": dict(enumerate(fields.get("draws", [])))})
            return _Event(test=(int(fields["run"]), _metrics(fields), list(draws.values())))
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
    """Return the line and event of a finished run as those of a paused one, if it had all `epochs`."""
    ending = event.ending
    if ending is None or ending.status is not Status.DONE or ending.epochs < epochs:
        return line, event
    state = event.state or _State(_name(ending), 0, "")
    fields = lines.decode(line) | {"status": Status.PAUSED, "state": {"bytes": state.size, "sha256": state.sha256}}
    return lines.encode(fields), _Event(None, dataclasses.replace(ending, status=Status.PAUSED), state)


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


def _model(run: Run) -> str:
    return f"{run.name}.keras"


def _plan_there(folder: Directory, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the stored plan of this sweep; None if the folder holds nothing."""
    for name in _FILES:
        folder.expect(name, FILE)
    for name in (_STATES, MODELS):
        folder.expect(name, FOLDER)
    if folder.kind(PLAN) is None:
        # Left by a sweep killed before writing its plan.
        others = [name for name in folder.names() if name not in (LOCK, HOLDER) and to_become(name) != PLAN]
        if others:
            raise OutputError(f"{folder.path} is not empty and contains no sweep ({others[0]}); {_ELSEWHERE}")
        return None
    content = folder.read(PLAN, max(_MAX_PLAN, len(_plan_text(plan))))
    there = _plain(plan) if content == _plan_text(plan) else _parsed(folder.path / PLAN, content)
    different = growth.differences(there, _plain(plan))
    if different:
        raise ConfigError(f"{folder.path} holds another sweep: {'; '.join(different)}; {_ELSEWHERE}")
    return there


def _parsed(file: Path, content: bytes) -> dict[str, Any]:
    try:
        mapping = _plain(parse_mapping(content.decode(), str(file)))
    except ConfigError as error:
        raise DataError(f"{file}: not YAML{str(error).removeprefix(str(file))}; {_ELSEWHERE}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{file}: not the plan of a sweep ({one_line(error)[:100]}); {_ELSEWHERE}") from None
    if not mapping:
        raise DataError(f"{file}: not the plan of a sweep; {_ELSEWHERE}")
    return dict(mapping)


def _plan_text(plan: Mapping[str, Any]) -> bytes:
    text: str = yaml.safe_dump(_plain(plan), sort_keys=False)
    return text.encode()


def _plain(plan: Any) -> Any:
    """Return a plan as it is read back from a file: lists for tuples, text for other objects."""
    return json.loads(json.dumps(plan, default=str))


def _standard(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in logs.items()}


def _number(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return value


@contextlib.contextmanager
def _errors(path: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OutputError:
        raise
    except NotImplementedError as error:  # a file system without locks
        raise OutputError(f"{path}: cannot be locked ({error}); {advice}") from None
    except OSError as error:
        raise output_error(Path(str(error.filename or path)), error, advice=advice) from error
