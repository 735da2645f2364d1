"""Decides which segment of a sweep is trained next: a state machine, without files, ranks or clocks.

Without rungs every run is trained once, trial by trial. With rungs it is ASHA: trials are judged at growing numbers of
epochs, and the best `1 / eta` of those judged at a rung go on to the next, without waiting for the others (Li et al.,
"A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, algorithm 2). A trial is judged by the mean over
its seeds, never by a single one. So

- it is judged at a rung when all its seeds have reached it, and all of them go on together;
- a run that ends by itself before a rung counts there with its final value;
- a run whose metric is missing or not finite has no value, and its trial has none there: it ranks behind all others and
  is not promoted;
- a trial with a run that diverged or failed has no value anywhere from then on: if it had been promoted, another takes
  its place;
- of trials with the same value the earlier one is better;
- once no trial will come any more and none is on its way to a rung, at least one goes on from there, so that the best
  one is trained to the end.
"""

import json
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dptrain.errors import ConfigError, DataError
from dptrain.sweeps.records import Ending, Run, Segment, Setting, Status, Trial


class SettingSource(ABC):
    """Source of the settings of a sweep."""

    @property
    @abstractmethod
    def total(self) -> int | None:
        """Number of settings; None if unknown."""

    @abstractmethod
    def next(self, number: int) -> Setting | None:
        """Return the setting of trial `number`, which rises by one; None after the last."""

    @abstractmethod
    def tell(self, trial: Trial, value: float | None, *further: float) -> None:
        """Report the means over seeds of a finished trial, once: NaN if it diverged, None if it failed otherwise."""

    @abstractmethod
    def restore(self, trials: Sequence[Trial]) -> None:
        """Register the trials of a journal before the first `next`; finished ones are reported as well."""


class ListSource(SettingSource):
    """Settings that are known beforehand; of a grown sweep, the earlier ones come first."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = deque(settings)
        self._total = len(self._settings)

    @property
    def total(self) -> int:
        """Number of settings."""
        return self._total

    def next(self, number: int) -> Setting | None:
        """Return the next setting."""
        return self._settings.popleft() if self._settings else None

    def tell(self, trial: Trial, value: float | None, *further: float) -> None:
        """Ignored."""

    def restore(self, trials: Sequence[Trial]) -> None:
        """Remove them from the list; raise DataError if one is not in it."""
        left: defaultdict[str, deque[int]] = defaultdict(deque)
        for place, setting in enumerate(self._settings):
            left[_text(setting)].append(place)
        matched = set()
        for trial in trials:
            places = left[_text(trial.setting)]
            if not places:
                raise DataError(
                    f"trial {trial.number} with {dict(trial.setting)} does not belong to this sweep: its journal is "
                    "damaged; "
                    "choose another --out"
                )
            matched.add(places.popleft())
        self._settings = deque(setting for place, setting in enumerate(self._settings) if place not in matched)


def _text(setting: Setting) -> str:
    return json.dumps(dict(setting), sort_keys=True)


def rung_epochs(min_epochs: int, max_epochs: int, eta: int = 3) -> tuple[int, ...]:
    """Return the epochs at which trials are judged: `min_epochs` times powers of eta, below `max_epochs`."""
    if min_epochs < 1:
        raise ConfigError(f"min_epochs = {min_epochs}: expected an integer >= 1")
    _check_eta(eta)
    rungs = []
    while min_epochs < max_epochs:
        rungs.append(min_epochs)
        min_epochs *= eta
    return tuple(rungs)


def _check_eta(eta: int) -> None:
    if eta < 2:
        raise ConfigError(f"eta = {eta}: expected an integer >= 2, as one trial in eta continues from each rung")


_NO_RUNS: Mapping[tuple[int, int, int], Run] = {}


class Scheduler:
    """Decides what is trained next.

    Take a segment from `next` for every free place, record `new_trials` before starting it, and report each with
    `ended`, or with `returned` if it was not trained. Results depend only on the order of these calls.
    """

    def __init__(
        self,
        source: SettingSource,
        seeds: Sequence[int],
        *,
        metric: str,
        mode: Literal["max", "min"],
        rungs: Sequence[int] = (),
        eta: int = 3,
        folds: int = 1,
        keep: bool = False,
        further: Sequence[str] = (),
    ) -> None:
        if not seeds or len(set(seeds)) < len(seeds):
            raise ConfigError(f"seeds = {list(seeds)}: expected one or more, none twice")
        if any(later <= earlier for earlier, later in zip((0, *rungs), rungs, strict=False)):
            raise ConfigError(f"rungs = {list(rungs)}: expected increasing numbers of epochs >= 1")
        _check_eta(eta)
        self.trials: list[Trial] = []
        self._source = source
        self._replicates = [(seed, fold) for seed in seeds for fold in range(folds)]
        self._folds, self._keep = folds, keep
        self._metric, self._further = metric, further
        self._sign = 1.0 if mode == "max" else -1.0
        self._rungs = tuple(rungs)
        self._eta = eta
        self._progress: list[_Progress] = []
        # Of each rung, the trials that were judged there: number -> value, high is good.
        self._judged: list[dict[int, float | None]] = [{} for _ in rungs]
        self._ready: deque[Segment] = deque()
        self._out: dict[int, Segment] = {}
        self._new: list[Trial] = []
        self._new_runs: list[Run] = []
        # Number of the next run.
        self._number = 0
        self._source_is_empty = False

    @property
    def total_runs(self) -> int | None:
        """Number of runs; None if unknown."""
        return None if self._source.total is None else self._source.total * len(self._replicates)

    @property
    def finished(self) -> bool:
        """Whether nothing is being trained or will be."""
        # If nothing is being trained, the next segment waits for nothing: find it now.
        return not self._out and not self._fill()

    def next(self) -> Segment | None:
        """Return a segment to train now; None if there is none until another one ends."""
        if not self._fill():
            return None
        segment = self._ready.popleft()
        self._out[segment.run.number] = segment
        return segment

    def new_trials(self) -> list[Trial]:
        """Return the trials added since the last call."""
        new, self._new = self._new, []
        return new

    def new_runs(self) -> list[Run]:
        """Return the runs added since the last call, of new and old trials."""
        new, self._new_runs = self._new_runs, []
        return new

    def ended(self, ending: Ending) -> None:
        """Report how a segment ended; paused only at a rung."""
        segment = self._out.get(ending.run.number)
        if segment is None:
            raise ValueError(f"run {ending.run.number} is not being trained")
        paused = ending.status is Status.PAUSED
        if ending.status is Status.PRUNED or (paused and ending.epochs != segment.end):
            raise ValueError(f"run {ending.run.number} is {ending.status} after {ending.epochs} epochs of {segment}")
        del self._out[ending.run.number]
        trial = self._progress[ending.run.trial]
        self._record(ending)
        if paused and trial.runs[ending.run.number].stage <= trial.stage:
            # Its trial went on before it: its state was lost, and it was trained again.
            self._ready.append(self._segment(ending.run))
        self._settle(trial)

    def returned(self, segment: Segment) -> None:
        """Take back a segment that was not trained; it is the next one again."""
        if self._out.get(segment.run.number) != segment:
            raise ValueError(f"{segment} is not being trained")
        del self._out[segment.run.number]
        self._ready.appendleft(segment)

    def leftover(self) -> list[Ending]:
        """Return the pruned endings of a finished sweep's runs that wait at a rung."""
        return [
            replace(run.ending, status=Status.PRUNED)
            for trial in self._progress
            for run in trial.runs.values()
            if run.ending is not None and run.ending.status is Status.PAUSED
        ]

    def restore(self, trials: Sequence[Trial], endings: Sequence[Ending], runs: Sequence[Run] = ()) -> None:
        """Resume from a journal, before the first `next`.

        Finished runs are not trained again, paused ones wait at their rung, all others come first. A trial with a run
        beyond a rung was promoted there. New seeds add runs to old trials.
        """
        self._source.restore(trials)
        self._number = 1 + max((run.number for run in runs), default=-1)
        existing = {(run.trial, *run.replicate): run for run in runs}
        for trial in trials:
            self._add(trial, existing)
        for ending in endings:
            if self._progress[ending.run.trial].runs.get(ending.run.number, _NOBODY).run != ending.run:
                raise DataError(
                    f"{ending.run} does not belong to this sweep: its journal is damaged; choose another --out"
                )
            self._record(ending)
        for progress in self._progress:
            progress.stage = max(0, *(run.stage - 1 for run in progress.runs.values()))
            self._settle(progress)
            self._ready.extend(self._missing(progress))

    def _add(self, trial: Trial, existing: Mapping[tuple[int, int, int], Run] = _NO_RUNS) -> "_Progress":
        self.trials.append(trial)
        runs = {}
        for seed, fold in self._replicates:
            run = existing.get((trial.number, seed, fold))
            if run is None:
                run = Run(self._number, trial.number, seed, fold, self._folds)
                self._number += 1
                self._new_runs.append(run)
            runs[run.number] = _RunProgress(run)
        self._progress.append(_Progress(trial, runs))
        return self._progress[-1]

    def _record(self, ending: Ending) -> None:
        run = self._progress[ending.run.trial].runs[ending.run.number]
        run.ending = ending
        if ending.status is Status.PRUNED:
            self._progress[ending.run.trial].is_pruned = True
        elif ending.status is not Status.PAUSED or ending.epochs in self._rungs:  # else it waits between two rungs
            value = ending.metrics.get(self._metric)
            run.values.append(self._sign * value if value is not None and math.isfinite(value) else None)

    def _settle(self, trial: "_Progress") -> None:
        """Judge a trial at every rung it has completed, and report a finished one to the source."""
        for rung, judged in enumerate(self._judged[: trial.stage + 1]):
            if trial.has_completed(rung):
                judged[trial.trial.number] = trial.value(rung)
        if not trial.is_reported and all(run.is_final for run in trial.runs.values()):
            trial.is_reported = True
            value = trial.value(len(self._rungs))
            unknown = None if trial.has(Status.FAILED) else math.nan
            further = [trial.last_mean(metric) for metric in self._further]
            self._source.tell(trial.trial, unknown if value is None else self._sign * value, *further)

    def _fill(self) -> bool:
        """Make a segment ready if there is one; return whether there is."""
        while not self._ready:
            trial = self._promotion(False) or self._new_trial() or self._promotion(True)
            if trial is None:
                return False
            self._ready.extend(self._missing(trial))
        return True

    def _promotion(self, last: bool) -> "_Progress | None":
        """Promote a trial and return it; `last`: no trial will come, so at least one goes on from each rung."""
        rungs = range(len(self._rungs))
        for rung in rungs if last else reversed(rungs):
            # From the lowest rung, as a promotion there is on its way to the next.
            if last and any(self._stage(segment) <= rung for segment in self._out.values()):
                return None
            judged = self._judged[rung]
            quota = max(len(judged) // self._eta, 1 if last else 0)
            for number in sorted(judged, key=lambda number: (-_rank(judged[number]), number))[:quota]:
                trial = self._progress[number]
                if trial.stage == rung and judged[number] is not None and not trial.is_pruned:
                    trial.stage += 1
                    self._settle(trial)
                    return trial
        return None

    def _new_trial(self) -> "_Progress | None":
        if not self._source_is_empty:
            setting = self._source.next(len(self.trials))
            if setting is not None:
                trial = Trial(len(self.trials), setting)
                self._new.append(trial)
                return self._add(trial)
            self._source_is_empty = True
        return None

    def _missing(self, trial: "_Progress") -> list[Segment]:
        return [self._segment(run.run) for run in trial.runs.values() if not run.is_final and run.stage <= trial.stage]

    def _segment(self, run: Run) -> Segment:
        progress = self._progress[run.trial].runs[run.number]
        begin = 0 if progress.ending is None else progress.ending.epochs
        return Segment(run, begin, (*self._rungs, None)[progress.stage], self._keep)

    def _stage(self, segment: Segment) -> int:
        return (*self._rungs, None).index(segment.end)


def _rank(value: float | None) -> float:
    return -math.inf if value is None else value


@dataclass
class _RunProgress:
    run: Run
    ending: Ending | None = None
    # by stage, high is good; a stage ends at a rung or the run's end
    values: list[float | None] = field(default_factory=list)

    @property
    def stage(self) -> int:
        return len(self.values)

    @property
    def is_final(self) -> bool:
        return self.ending is not None and self.ending.status.is_final


_NOBODY = _RunProgress(Run(-1, -1, -1))


@dataclass
class _Progress:
    trial: Trial
    runs: dict[int, _RunProgress]  # by number
    stage: int = 0  # rungs it was promoted from
    is_pruned: bool = False  # a finished sweep has ended its waiting runs
    is_reported: bool = False  # to the source

    def has_completed(self, rung: int) -> bool:
        return all(run.is_final or run.stage > rung for run in self.runs.values())

    def value(self, rung: int) -> float | None:
        """Return the mean over the seeds at a rung, or of runs' ends before it; None if a value is missing."""
        values = [run.values[min(rung, len(run.values) - 1)] for run in self.runs.values()]
        available = [value for value in values if value is not None]
        if self.has(Status.FAILED, Status.DIVERGED) or len(available) < len(values):
            return None
        return math.fsum(available) / len(available)

    def last_mean(self, metric: str) -> float:
        """Return the mean of a metric over the runs' last endings; NaN if one is missing."""
        metrics = [math.nan if run.ending is None else run.ending.metrics.get(metric) for run in self.runs.values()]
        values = [value for value in metrics if value is not None and math.isfinite(value)]
        return math.fsum(values) / len(values) if len(values) == len(metrics) else math.nan

    def has(self, *statuses: Status) -> bool:
        return any(run.ending is not None and run.ending.status in statuses for run in self.runs.values())
