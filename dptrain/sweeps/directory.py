"""The directory of a sweep: its plan, what happened, and every epoch; a killed sweep continues from it.

sweep.yaml      the plan: everything that decides results; its file claims the directory
results.jsonl   one object per run and epoch: trial, run, seed, fold (in cross-validation), epoch (from 1), its logs
journal.jsonl   one object per event: a trial or runs come up, a segment of a run ends, a run's model was tested
states/         where runs stand that wait at a rung, or whose models are kept: RUN-EPOCHS.safetensors
lock, holder    the lock, and who holds it

What the journal says is there, is there: a state file, the epochs in results.jsonl and the journal's line (see `lines`)
reach the disk in this order.
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
from dptrain.runtime.files import FILE, FOLDER, Directory, open_directory, output_error, to_become, writing
from dptrain.runtime.locks import HOLDER, LOCK, locked
from dptrain.runtime.text import one_line
from dptrain.runtime.yaml_files import parse_mapping
from dptrain.saving.run_folder import CONFIG, MODELS, PLAN
from dptrain.sweeps import growth, lines
from dptrain.sweeps.messages import run_fact, to_run
from dptrain.sweeps.records import Ending, Run, Status, Trial

RESULTS, TRIALS, REPORT = "results.jsonl", "trials.csv", "report.html"
_JOURNAL, _STATES = "journal.jsonl", "states"
# What a sweep writes.
_FILES = (PLAN, RESULTS, _JOURNAL, TRIALS, REPORT, CONFIG, LOCK, HOLDER)
_STATE = re.compile(r"[0-9]+-[0-9]+\.safetensors")
_MODEL = re.compile(r"trial-[0-9]+-seed--?[0-9]+(-fold-[0-9]+)?\.keras")
# Bytes of a plan: of thousands of settings, and read in seconds.
_MAX_PLAN = 1 << 20
_ELSEWHERE = "choose another --out"
_AGAIN = "once it can be written, start the sweep again with the same --out: it continues"


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
        draws: number of a run -> the sweep's metric of its model on samples drawn of the test set.
        begin_again: how many runs had come to their end and are trained again from the first epoch.

    Raises:
        ConfigError: it holds a sweep with another plan; lists the differences.
        DataError: a line has changed, or one that is not the last cannot be read, or contradicts the others; or a file
            is a link, a named pipe or the like.
        OutputError: it holds something else, another process works in it, or it cannot be written.
    """

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        self.path = path
        self.trials: list[Trial] = []
        self.runs: list[Run] = []
        self.endings: list[Ending] = []
        self.tested: dict[int, dict[str, float]] = {}
        self.draws: dict[int, list[float]] = {}
        self.begin_again = 0
        # Of each run whose state is there.
        self._states: dict[int, _State] = {}
        # Of each run, the epochs in results.jsonl.
        self._epochs: dict[int, int] = {}
        with _errors(path, _ELSEWHERE), contextlib.ExitStack() as stack:
            if path.exists() and not path.is_dir():
                raise OutputError(f"{path} is not a directory; {_ELSEWHERE}")
            if path.exists():  # before anything is written: nothing is left in a directory that is not ours
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
            DataError: it has changed since it was opened.
            OutputError: it cannot be read.
        """
        with _errors(self.path / RESULTS, _AGAIN), self._folder.open(RESULTS) as file:
            for line in file:
                yield lines.decode(line)

    def add_trial(self, trial: Trial) -> None:
        """Write that a trial came up; the numbers rise from 0.

        Raises:
            ConfigError: its setting is not what JSON can carry.
            OutputError: it cannot be written.
        """
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
        """Write that runs came up, of trials that were added.

        Raises:
            OutputError: it cannot be written.
        """
        self._journal.add(lines.encode({"kind": "runs", "runs": [run_fact(run) for run in runs]}))
        self._journal.sync()
        self.runs += runs

    def add_test(self, run: Run, metrics: Mapping[str, float], draws: Sequence[float] = ()) -> None:
        """Write what a run's model, which has come to its end, makes of the test set.

        Args:
            run: the model's.
            metrics: on the test set.
            draws: the sweep's metric on samples that were drawn of it, as `resampling` says; none where nobody drew.

        Raises:
            OutputError: it cannot be written.
        """
        drawn = {"draws": [_number(value) for value in draws]} if draws else {}
        self._journal.add(lines.encode({"kind": "test", "run": run.number, "metrics": _standard(metrics), **drawn}))
        self._journal.sync()
        self.tested[run.number] = dict(metrics)
        self.draws[run.number] = list(draws)

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
        self._results.add(lines.encode(who | _standard(logs) | who))
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
            self._replace(self._state_files, kept.file, state, _AGAIN)
        self._results.sync()
        self._journal.add(lines.encode(event))
        self._journal.sync()
        self.endings.append(ending)
        before = self._states.pop(run.number, None)
        if kept is not None:
            self._states[run.number] = kept
        if before is not None and (kept is None or before.file != kept.file):
            with _errors(self._place(before), _AGAIN):
                self._state_files.remove(before.file)

    def state(self, run: Run) -> bytes:
        """Return the state of a run that is paused, or whose state is kept.

        Raises:
            DataError: it is no longer what was written.
            KeyError: there is none.
            OutputError: it cannot be read.
        """
        state = self._states[run.number]
        with _errors(self._place(state), _AGAIN):
            content = self._state_files.read(state.file, state.size)
        if hashlib.sha256(content).hexdigest() != state.sha256:
            raise DataError(
                f"{self._place(state)}: not what was written there; start the sweep again with the same --out: "
                "it trains this run again"
            )
        return content

    def has_state(self, run: Run) -> bool:
        """Return whether the state of a run is there."""
        return run.number in self._states

    def has_model(self, run: Run) -> bool:
        """Return whether the model of a run is there, and not older than its state, if that is there."""
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
        """Write the model of a run as a `.keras` file.

        Raises:
            OutputError: it cannot be written.
        """
        with _errors(self.path / MODELS, _AGAIN), self._folder.folder(MODELS, make=True) as models:
            self._replace(models, _model(run), content, _AGAIN)

    def keep_models(self, runs: Sequence[Run]) -> list[str]:
        """Delete the models of all other runs, and what kills have left of models.

        Returns:
            Those of these runs that there are, relative to the directory.

        Raises:
            OutputError: they cannot be deleted.
        """
        with _errors(self.path / MODELS, _AGAIN):
            if self._folder.expect(MODELS, FOLDER) is None:
                return []
            kept = [_model(run) for run in runs]
            with self._folder.folder(MODELS) as models:
                models.remove_temporaries(locked=True)
                for name in models.names():
                    if _MODEL.fullmatch(name) and name not in kept and models.kind(name) == FILE:
                        models.remove(name)
                return [f"{MODELS}/{name}" for name in kept if models.kind(name) is not None]

    def release(self, run: Run) -> None:
        """Delete the state of a run that has come to its end, if it is there.

        Raises:
            OutputError: it cannot be deleted.
        """
        state = self._states.pop(run.number, None)
        if state is not None:
            with _errors(self._place(state), _AGAIN):
                self._state_files.remove(state.file)

    def _place(self, state: "_State") -> Path:
        return self.path / _STATES / state.file

    def _continue(self, ended_after: int | None) -> None:
        """Read what is there, and write anew what a kill or a lost state has left inconsistent.

        Args:
            ended_after: epochs after which runs are to go on that had come to their end there; None for none.
        """
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
        kept = [
            (line, event)
            for line, event in events
            if event.of_run not in lost and not (event.test is not None and event.of_run in waiting)
        ]
        self.endings = [event.ending for _, event in kept if event.ending is not None]
        self.tested = {event.test[0]: event.test[1] for _, event in kept if event.test is not None}
        self.draws = {event.test[0]: event.test[2] for _, event in kept if event.test is not None}
        # The journal first: whatever happens after that, what it says is there.
        self._rewrite(_JOURNAL, [line for line, _ in kept])
        self._keep_epochs({ending.run.number: ending.epochs for ending in self.endings})
        needed = {state.file for state in self._states.values()}
        for name in self._state_files.names():
            if _STATE.fullmatch(name) and name not in needed and self._state_files.kind(name) == FILE:
                self._state_files.remove(name)

    def _rewrite(self, name: str, whole: Sequence[bytes]) -> None:
        """Let a file consist of these lines."""
        if self._folder.kind(name) is None or not self._folder.holds(name, whole):
            self._replace(self._folder, name, b"".join(whole), _ELSEWHERE)

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
        path = self.path / RESULTS
        kept = []
        found = lines.read(self._folder, RESULTS, _run_and_epoch, _ELSEWHERE)
        for number, (line, (run, epoch)) in enumerate(found, 1):
            if epoch > wanted.get(run, 0):
                continue
            before = self._epochs.get(run, 0)
            if epoch != before + 1:
                raise DataError(f"{path}, line {number}: epoch {epoch} of run {run} comes after {before} epochs")
            self._epochs[run] = epoch
            kept.append(line)
        for run, epochs in wanted.items():
            there = self._epochs.get(run, 0)
            if there != epochs:
                raise DataError(
                    f"{path}: {there} epochs of run {run}, {epochs} in {_JOURNAL}; "
                    f"put the file back as it was, or {_ELSEWHERE}"
                )
        self._rewrite(RESULTS, kept)


@dataclass(frozen=True)
class _State:
    """The file of a run's state: its name says of which epoch, so that none is ever overwritten by a later."""

    file: str
    size: int
    sha256: str

    def is_in(self, folder: Directory) -> bool:
        """Whether a folder holds what was written."""
        if folder.kind(self.file) != FILE:
            return False
        with folder.open(self.file) as file:
            if os.fstat(file.fileno()).st_size != self.size:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256


@dataclass(frozen=True)
class _Event:
    """One line of the journal: a trial, runs, the test of a run by its number, or an ending, with the state if kept."""

    trial: Trial | None = None
    ending: Ending | None = None
    state: _State | None = None
    runs: tuple[Run, ...] = ()
    test: tuple[int, dict[str, float], list[float]] | None = None

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
    """Return the line and the event of an ending as that of a run that waits, if it had come so far and was done."""
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
    """Return the plan of this sweep as it is in a folder, None where that holds nothing.

    Raises:
        ConfigError: it holds a sweep with another plan.
        DataError: its plan cannot be read, or what a sweep writes is there, but is no regular file.
        OutputError: it holds something else.
    """
    for name in _FILES:
        folder.expect(name, FILE)
    for name in (_STATES, MODELS):
        folder.expect(name, FOLDER)
    if folder.kind(PLAN) is None:
        # Of a sweep that was killed before it wrote its plan.
        others = [name for name in folder.names() if name not in (LOCK, HOLDER) and to_become(name) != PLAN]
        if others:
            raise OutputError(f"{folder.path} is not empty and holds no sweep ({others[0]}); {_ELSEWHERE}")
        return None
    content = folder.read(PLAN, max(_MAX_PLAN, len(_plan_text(plan))))
    there = _plain(plan) if content == _plan_text(plan) else _parsed(folder.path / PLAN, content)
    different = growth.differences(there, _plain(plan))
    if different:
        raise ConfigError(f"{folder.path} holds another sweep: {'; '.join(different)}; {_ELSEWHERE}")
    return there


def _parsed(file: Path, content: bytes) -> dict[str, Any]:
    """Return the plan that a file holds.

    Raises:
        DataError: it holds none.
    """
    try:
        found = _plain(parse_mapping(content.decode(), str(file)))
    except ConfigError as error:
        raise DataError(f"{file}: not YAML{str(error).removeprefix(str(file))}; {_ELSEWHERE}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{file}: no plan of a sweep ({one_line(error)[:100]}); {_ELSEWHERE}") from None
    if not found:
        raise DataError(f"{file}: no plan of a sweep; {_ELSEWHERE}")
    return dict(found)


def _plan_text(plan: Mapping[str, Any]) -> bytes:
    text: str = yaml.safe_dump(_plain(plan), sort_keys=False)
    return text.encode()


def _plain(plan: Any) -> Any:
    """Return a plan as it comes back from a file: lists for tuples, text for what is like text."""
    return json.loads(json.dumps(plan, default=str))


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
