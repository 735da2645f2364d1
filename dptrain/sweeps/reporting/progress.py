"""Progress of a sweep on rank 0: a live table on a terminal, lines elsewhere."""

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dptrain.errors import printable
from dptrain.runtime.output import terminal
from dptrain.sweeps.records import Ending, Run, Segment, Status, Trial
from dptrain.sweeps.reporting import formatting
from dptrain.sweeps.space import label

# The most rows of the live table, and lines of a terminal for heads, totals and the prompt.
MAX_ROWS = 20
_OTHER_LINES = 8
# Seconds between drawings; they take at most one part in fifty of the time of the thread that drives the GPUs.
_REFRESH = 0.25
_PARTS = 50


class Progress:
    """Receives the events of a sweep and shows nothing; subclasses do.

    Call `close` in a `finally`: a live table hides the cursor and holds standard output until then. A trial comes
    before its runs. Calls cost microseconds, except for an occasional drawing.
    """

    def trial(self, trial: Trial) -> None:
        """A trial was added."""

    def started(self, segment: Segment, rank: int) -> None:
        """A rank starts a segment."""

    def epoch(self, run: Run, epoch: int, logs: Mapping[str, float]) -> None:
        """A run ended an epoch, counted from 1."""

    def ended(self, ending: Ending) -> None:
        """A segment ended, or a paused run was given up; each with the metrics of the run's last epoch."""

    def recalled(self, ending: Ending) -> None:
        """An ending of an earlier start: counted, not shown."""

    def note(self, line: str) -> None:
        """Show a line."""

    def close(self) -> None:
        """Release the terminal; idempotent."""


def make_progress(
    metric: str,
    mode: str,
    total: int | None,
    seeds: int,
    *,
    quiet: bool = False,
    live: bool = False,
    file: TextIO | None = None,
) -> Progress:
    """Return the display: none if quiet, a live table on a terminal, else lines; `total` runs, None if unknown."""
    if quiet:
        return Progress()
    if live and not terminal.ends_in_file(file):
        return LiveProgress(metric, mode, total, seeds, terminal.console(file, live=True))
    return PlainProgress(metric, mode, total, seeds, file)


class PlainProgress(Progress):
    """Prints a line for each run that finishes or fails, each finished trial and each promotion."""

    def __init__(self, metric: str, mode: str, total: int | None, seeds: int, file: TextIO | None = None) -> None:
        self._tally = _Tally(metric, mode, total, seeds)
        self._file = file
        self._promoted: set[tuple[int, int]] = set()

    def trial(self, trial: Trial) -> None:
        """Register the trial."""
        self._tally.trial(trial)

    def started(self, segment: Segment, rank: int) -> None:
        """Print the trial's first promotion from a rung."""
        promotion = segment.run.trial, segment.begin
        if segment.begin and promotion not in self._promoted:
            self._promoted.add(promotion)
            if line := self._tally.rung_line(*promotion):
                self.note(line)

    def ended(self, ending: Ending) -> None:
        """Print the run's line, and its trial's after the last run."""
        is_new = self._tally.ended(ending)
        if ending.status not in (Status.PAUSED, Status.PRUNED):
            self.note(self._tally.run_line(ending))
        if is_new and self._tally.trials[ending.run.trial].has_ended:
            self.note(self._tally.trial_line(ending.run.trial))

    def recalled(self, ending: Ending) -> None:
        """Count the ending."""
        self._tally.recalled(ending)

    def note(self, line: str) -> None:
        """Print the line."""
        # A log in ASCII is no reason to end a sweep.
        encoding = getattr(self._file or sys.stdout, "encoding", None) or "utf-8"
        terminal.say(line.encode(encoding, "backslashreplace").decode(encoding), file=self._file)


class LiveProgress(Progress):
    """A table of running and best trials, below the errors; drawn by the calls, without a thread of its own."""

    def __init__(self, metric: str, mode: str, total: int | None, seeds: int, console: Console) -> None:
        self._tally = _Tally(metric, mode, total, seeds)
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._is_closed = False
        self._next = -math.inf  # earliest time of the next drawing

    def trial(self, trial: Trial) -> None:
        """Count the trial."""
        self._tally.trial(trial)
        self._changed()

    def started(self, segment: Segment, rank: int) -> None:
        """Show its trial as running."""
        self._tally.started(segment, rank)
        self._changed()

    def epoch(self, run: Run, epoch: int, logs: Mapping[str, float]) -> None:
        """Show the epoch."""
        self._tally.epoch(run, epoch, logs)
        self._changed()

    def ended(self, ending: Ending) -> None:
        """Count the ending; print a line for a failure."""
        self._tally.ended(ending)
        if not ending.status.is_success:
            self.note(self._tally.run_line(ending))
        self._changed()

    def recalled(self, ending: Ending) -> None:
        """Count the ending."""
        self._tally.recalled(ending)
        self._changed()

    def note(self, line: str) -> None:
        """Print the line above the table."""
        shown = terminal.wrapped(printable(line, terminal.NO_BREAK), self._console.width)
        self._console.print(Text(shown), soft_wrap=True)

    def close(self) -> None:
        """Draw the final table and stop."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._live.is_started:
                self._live.update(self._picture())
        finally:
            self._live.stop()

    def _changed(self) -> None:
        now = time.monotonic()
        if now < self._next or self._is_closed:
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(self._picture(), refresh=True)
        end = time.monotonic()
        self._next = end + max(_REFRESH, _PARTS * (end - now))

    def _picture(self) -> Group:
        tally = self._tally
        shown = tally.most_interesting(min(MAX_ROWS, max(1, self._console.height - _OTHER_LINES)))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("trial", justify="right", no_wrap=True)
        fields = next((tuple(standing.trial.setting) for standing in tally.trials.values()), ())
        for name in formatting.ends(fields):
            table.add_column(_cut_cell(name))
        table.add_column("runs", justify="right", no_wrap=True)
        table.add_column(_cut_cell(f"mean {tally.metric}"), no_wrap=True)
        table.add_column("state")
        for standing in shown:
            table.add_row(
                str(standing.trial.number),
                *(_cut_cell(standing.cells.get(name, "")) for name in fields),
                f"{standing.ended}/{tally.seeds}",
                _mean_and_std(standing.values),
                _cut_cell(standing.state()),
            )
        rest = len(tally.trials) - len(shown)
        trials = f"trial{'' if rest == 1 else 's'}"
        more = [Text(f"and {rest} more {trials}" if shown else f"{rest} {trials} to come")] if rest else []
        return Group(table, *more, Text(tally.totals()))


@dataclass
class _Standing:
    """State of a trial; values are computed when shown, so that an ending costs the same with many seeds."""

    trial: Trial
    metric: str  # log key
    seeds: int  # number of its runs
    label: str = ""  # setting as text
    cells: dict[str, str] = field(default_factory=dict)  # setting as text by name
    latest: dict[int, Ending] = field(default_factory=dict)  # by run
    running: dict[int, tuple[int, float | None]] = field(default_factory=dict)  # run -> epochs done, last value
    ended: int = 0  # runs that have ended for good
    _values: list[float] | None = None

    def __post_init__(self) -> None:
        self.label = label(self.trial.setting)
        self.cells = {name: label({name: value})[len(name) + 1 :] for name, value in self.trial.setting.items()}

    @property
    def has_ended(self) -> bool:
        return self.ended >= self.seeds

    @property
    def furthest(self) -> int:
        return max((ending.epochs for ending in self.latest.values() if ending.status.is_success), default=0)

    @property
    def values(self) -> list[float]:
        """Metric of the runs that are done, or before the first of those with most epochs."""
        if self._values is None:
            furthest = self.furthest
            counted = [each for each in self.latest.values() if each.status is Status.DONE] or [
                each for each in self.latest.values() if each.status.is_success and each.epochs == furthest
            ]
            metrics = (each.metrics.get(self.metric, math.nan) for each in counted)
            self._values = [value for value in metrics if math.isfinite(value)]
        return self._values

    def count(self, *statuses: Status) -> int:
        return sum(ending.status in statuses for ending in self.latest.values())

    def update(self, ending: Ending) -> None:
        self.running.pop(ending.run.number, None)
        before = self.latest.get(ending.run.number)
        self.ended += ending.status.is_final - (before is not None and before.status.is_final)
        self.latest[ending.run.number] = ending
        self._values = None

    def state(self) -> str:
        if self.running:
            epochs = max(epoch for epoch, _ in self.running.values())
            values = [value for _, value in self.running.values() if value is not None and math.isfinite(value)]
            running = f"{len(self.running)} running"
            value = f": {_short(_mean(values))}" if values else ""
            # What a narrow terminal cuts off comes last.
            return f"epoch {epochs}{value}, {running}" if epochs else running
        failed = self.count(Status.DIVERGED, Status.FAILED)
        if self.has_ended and failed == self.ended:
            return "failed"
        state = "waiting"
        if self.has_ended:
            state = f"stopped at epoch {self.furthest}" if self.count(Status.PRUNED) else "done"
        elif self.count(Status.PAUSED):
            state = f"paused at epoch {self.furthest}"
        return state + (f", {failed} failed" if failed else "")


class _Tally:
    def __init__(self, metric: str, mode: str, total: int | None, seeds: int) -> None:
        self.metric, self.total, self.seeds = metric, total, seeds
        self.trials: dict[int, _Standing] = {}
        self._sign = -1.0 if mode == "max" else 1.0
        self._ended = self._recalled = self._failed = 0
        self._ranks: dict[int, int] = {}  # of the runs that are running
        self._judged: dict[int, dict[int, float]] = {}  # by epochs: the means of trials that were judged there
        self._began = time.monotonic()

    def trial(self, trial: Trial) -> None:
        self.trials[trial.number] = _Standing(trial, self.metric, self.seeds)

    def started(self, segment: Segment, rank: int) -> None:
        self._ranks[segment.run.number] = rank
        self.trials[segment.run.trial].running[segment.run.number] = (segment.begin, None)

    def epoch(self, run: Run, epoch: int, logs: Mapping[str, float]) -> None:
        self.trials[run.trial].running[run.number] = (epoch, logs.get(self.metric))

    def ended(self, ending: Ending) -> bool:
        standing = self.trials[ending.run.trial]
        before = standing.latest.get(ending.run.number)
        standing.update(ending)
        self._ranks.pop(ending.run.number, None)
        is_new = ending.status.is_final and (before is None or not before.status.is_final)
        are_there = all(other.epochs >= ending.epochs or other.status.is_final for other in standing.latest.values())
        is_judged = ending.status is Status.PAUSED and len(standing.latest) >= self.seeds and are_there
        if is_judged and standing.values:
            self._judged.setdefault(ending.epochs, {})[ending.run.trial] = _mean(standing.values)
        self._ended += is_new
        self._failed += is_new and not ending.status.is_success
        return is_new

    def recalled(self, ending: Ending) -> None:
        self._recalled += self.ended(ending)

    def run_line(self, ending: Ending) -> str:
        """Return "run 12/128: trial 3 (learning_rate=0.001) seed 4: val_accuracy 0.9761, 5 epochs, 12.3 s"."""
        which = f"run {_of(self._ended, self.total)}: {self._name(ending.run.trial)} {ending.run.label}"
        epochs = f"{ending.epochs} epoch{'' if ending.epochs == 1 else 's'}"
        if not ending.status.is_success:
            reason = " ".join(ending.reason.split())
            return f"{which}: {ending.status} after {epochs}, {ending.seconds:.1f} s" + (reason and f": {reason}")
        value = ending.metrics.get(self.metric)
        result = f"no {self.metric}" if value is None else f"{self.metric} {_short(value)}"
        return f"{which}: {result}, {epochs}, {ending.seconds:.1f} s"

    def trial_line(self, number: int) -> str:
        """Return "trial 3 (learning_rate=0.001) done: val_accuracy mean 0.9761, std 0.0012, n = 4"."""
        standing = self.trials[number]
        values = standing.values
        if not values:
            return f"{self._name(number)} {standing.state()}: no {self.metric}"
        std = f", std {_short(_std(values))}" if len(values) > 1 else ""
        result = f"{self.metric} mean {_short(_mean(values))}{std}, n = {len(values)}"
        return f"{self._name(number)} {standing.state()}: {result}"

    def rung_line(self, number: int, epochs: int) -> str:
        """Return "rung at 3 epochs: 9 trials compared, best val_accuracy 0.97 (trial 2); trial 2 continues", or ""."""
        judged = self._judged.get(epochs, {})
        if number not in judged or len(judged) < 2:
            return ""
        best = min(judged, key=lambda trial: (self._sign * judged[trial], trial))
        at = f"rung at {epochs} epoch{'' if epochs == 1 else 's'}: {len(judged)} trials compared"
        return f"{at}, best {self.metric} {_short(judged[best])} (trial {best}); {self._name(number)} continues"

    def totals(self) -> str:
        """Return "12/128 runs done, 4 running on 2 ranks, 23.1 runs/min, 1 min 12 s elapsed, about 5 min 01 s left"."""
        seconds = time.monotonic() - self._began
        parts = [f"{_of(self._ended, self.total)} runs done" + (f" ({self._failed} failed)" if self._failed else "")]
        if self._ranks:
            ranks = len(set(self._ranks.values()))
            parts.append(f"{len(self._ranks)} running on {ranks} rank{'' if ranks == 1 else 's'}")
        here = self._ended - self._recalled
        if here and seconds > 0:
            rate = 60 * here / seconds
            parts.append(f"{rate:{'.3g' if rate < 100 else ',.0f'}} runs/min")
        parts.append(f"{_duration(seconds)} elapsed")
        if self.total is not None and self._ended < self.total:
            left = f"about {_duration((self.total - self._ended) * seconds / here)}" if here else "unknown time"
            parts.append(f"{left} left")
        return ", ".join(parts)

    def most_interesting(self, rows: int) -> list[_Standing]:
        """Return the best finished trials, in at least a quarter of the rows, then the running ones."""
        running = [standing for standing in self.trials.values() if standing.running]
        others = sorted(
            (standing for standing in self.trials.values() if standing.latest and not standing.running),
            key=self._rank,
        )
        best = others[: max(rows - len(running), rows // 4)]
        return best + running[: rows - len(best)]

    def _rank(self, standing: _Standing) -> tuple[bool, bool, float, int]:
        """Sort key: finished before unfinished before failed, better before worse."""
        value = self._sign * _mean(standing.values) if standing.values else 0.0
        return not standing.values, not standing.count(Status.DONE), value, standing.trial.number

    def _name(self, number: int) -> str:
        text = self.trials[number].label
        return f"trial {number} ({text})" if text else f"trial {number}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _std(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _mean_and_std(values: list[float]) -> str:
    """Return "0.9761 ± 0.0012"; "" without values, without a deviation for a single one."""
    if not values:
        return ""
    mean = _mean(values)
    return _short(mean) + (f" ± {_std(values):{_form(mean)}}" if len(values) > 1 else "")


def _short(value: float) -> str:
    return f"{value:{_form(value)}}"


def _form(value: float) -> str:
    """Return the format: four decimals, or scientific where four decimals show too few digits."""
    return ".4f" if value == 0 or 1e-3 <= abs(value) < 1e5 else ".3e"


def _of(count: int, total: int | None) -> str:
    return str(count) if total is None else f"{count}/{total}"


def _cut_cell(text: str) -> Text:
    """Return a table cell that is cut, not wrapped, and without markup."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _duration(seconds: float) -> str:
    """Return "45 s", "3 min 20 s" or "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
