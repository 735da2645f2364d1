"""A sweep from its plan to its report."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dptrain.comm import Communicator
from dptrain.errors import ExitCode
from dptrain.runtime import signals
from dptrain.runtime.failure import phase
from dptrain.runtime.output.terminal import verbosity
from dptrain.runtime.text import counted
from dptrain.runtime.watch import watchdog
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.keeping import Keep, Retention
from dptrain.sweeps.reporting.progress import Progress, make_progress
from dptrain.sweeps.scheduling.coordinator import Coordinator
from dptrain.sweeps.scheduling.messages import Tag, to_segment
from dptrain.sweeps.scheduling.scheduler import Scheduler, SettingSource
from dptrain.sweeps.scheduling.training import Recipe
from dptrain.sweeps.scheduling.worker import Worker

# Seconds between an idle rank's looks for messages, which leave its core to others.
_IDLE = 0.002
# Seconds between interim reports; they take at most one part in so many of the time.
_REPORT, _PARTS = 60.0, 50
# Seconds that a failing rank waits for the last report, and rank 0 for the end of the job.
_PATIENCE = 60.0


@dataclass(frozen=True)
class SweepPlan:
    """Plan of a sweep, the same on all ranks."""

    seeds: Sequence[int]  # of every trial
    modes: Mapping[str, Literal["max", "min"]]  # by metric; the first ranks the trials
    rungs: Sequence[int]  # rising numbers of epochs; empty to train every run to its end
    eta: int  # one trial in `eta` continues from a rung
    decides: Mapping[str, Any]  # JSON: everything that decides results; a continued sweep has the same, or a grown one
    fields: Sequence[str]  # names
    folds: int = 1  # 1 without cross-validation
    keep: Keep = "none"
    keeps_states: bool = False  # of finished runs
    validation_samples: int | None = None
    test_samples: int | None = None
    seconds: float | None = None  # time limit; None for no limit

    @property
    def metric(self) -> str:
        """Log key that ranks the trials."""
        return next(iter(self.modes))

    @property
    def mode(self) -> Literal["max", "min"]:
        """Mode of this metric."""
        return self.modes[self.metric]

    @property
    def runs(self) -> int:
        """Runs of a trial."""
        return len(self.seeds) * self.folds


@dataclass(frozen=True)
class Stop:
    """Why a sweep ended early."""

    why: str
    exit_code: int  # 75 to start it again, 130 for Ctrl-C
    signal: str = ""  # such as "SIGINT"; empty without one


def run_sweep(
    ranks: Communicator,
    recipe: Recipe,
    plan: SweepPlan,
    source: Callable[[], SettingSource],
    out: Path,
    places: int,
    threads: int = 1,
    *,
    packs: int = 1,
    verbose: str | int = "auto",
    report: Callable[[SweepDirectory], object] = lambda directory: None,
) -> tuple[SweepDirectory | None, Stop | None]:
    """Train what is missing; return rank 0's open directory, and on all ranks why it stopped early. Collective."""
    ranks.received()  # drop messages of an interrupted sweep of this process
    all_places = ranks.allgather(places)
    with ExitStack() as stack:

        def begin() -> tuple[SweepDirectory, Coordinator] | None:
            if ranks.rank != 0:
                return None
            scheduler = Scheduler(
                source(),
                plan.seeds,
                metric=plan.metric,
                mode=plan.mode,
                rungs=plan.rungs,
                eta=plan.eta,
                folds=plan.folds,
                keep=plan.keeps_states,
                further=[*plan.modes][1:],
            )
            directory = stack.enter_context(SweepDirectory(out, plan.decides))
            scheduler.restore(directory.trials, directory.endings, directory.runs)
            everything = plan.keep == "all" or not plan.keeps_states
            retention = Retention(directory, plan.metric, plan.mode, plan.runs, everything)
            shown = verbosity(verbose)
            progress = make_progress(
                plan.metric, plan.mode, scheduler.total_runs, plan.runs, quiet=shown == 0, live=shown == 1
            )
            stack.callback(progress.close)
            _recall(directory, progress)
            return directory, Coordinator(ranks, scheduler, directory, progress, all_places, retention)

        begun = ranks.agree("output", begin)
        phase.enter("sweep")
        tell = _Reports(None if begun is None else begun[0], report)
        with (
            signals.catching(),
            closing(Worker(ranks, recipe, threads, packs=packs, metrics=[*plan.modes])) as worker,
            watchdog.going_round() as go_round,
        ):
            try:
                stop = _work(ranks, worker, None if begun is None else begun[1], plan.seconds, tell, go_round)
            except BaseException as error:
                _break(ranks, error, tell)
                raise
        ranks.barrier()
        if begun is None:
            return None, stop
        begun[1].close()
        stack.pop_all()  # the directory is the caller's
        return begun[0], stop


def _recall(directory: SweepDirectory, progress: Progress) -> None:
    for trial in directory.trials:
        progress.trial(trial)
    for ending in directory.endings:
        progress.recalled(ending)
    if directory.endings:
        last = {ending.run.number: ending for ending in directory.endings}
        ended = sum(ending.status.is_final for ending in last.values())
        waiting = len(last) - ended
        progress.note(
            f"{directory.path}: resuming; {ended} run{'s have' if ended != 1 else ' has'} ended already"
            + (f", {waiting} to resume" if waiting else "")
        )
    if directory.begin_again:
        runs = counted(directory.begin_again, "run")
        progress.note(f"{runs} had fewer epochs and no saved state to resume from: trained again")


def _work(
    ranks: Communicator,
    worker: Worker,
    coordinator: Coordinator | None,
    seconds: float | None,
    tell: "_Reports",
    go_round: Callable[[], None],
) -> Stop | None:
    """Train until rank 0 ends the sweep; return why it stopped early."""
    begun, finish_sent, signalled = time.monotonic(), False, False
    while True:
        go_round()
        stop: Stop | None = None
        for mail in ranks.received():
            kind = mail.fact["kind"]
            if kind == Tag.FINISH:
                return None if mail.fact["stop"] is None else Stop(**mail.fact["stop"])
            if kind == Tag.TRAIN:
                worker.start(to_segment(mail.fact["segment"]), mail.fact["setting"], mail.content)
            elif kind == Tag.SIGNAL:
                stop = _stop_of(mail.fact["number"])
            elif kind == Tag.BROKEN:
                tell.last()
                ranks.send(mail.source, {"kind": Tag.FINISH, "stop": None})
                time.sleep(_PATIENCE)  # it ends the job
            elif coordinator is not None and not finish_sent:
                coordinator.take(mail)
        if (number := signals.caught()) is not None and not signalled:
            signalled = True
            ranks.send(0, {"kind": Tag.SIGNAL, "number": number})
        if coordinator is not None and not finish_sent:
            if seconds is not None and time.monotonic() - begun >= seconds:
                stop = Stop("the time limit is reached", int(ExitCode.PREEMPTED))
            if stop is not None or not coordinator.hand_out():
                finish_sent = True
                for rank in range(ranks.size):
                    ranks.send(rank, {"kind": Tag.FINISH, "stop": None if stop is None else asdict(stop)})
                continue
            tell.now_and_then()
        going_on = worker.advance()
        phase.enter("sweep")  # not the last run's phase
        if not going_on:
            time.sleep(_IDLE)


def _stop_of(number: int) -> Stop:
    name = signals.name_of(number)
    if name == "SIGINT":
        return Stop("interrupted", int(ExitCode.INTERRUPTED), name)
    return Stop(name, int(ExitCode.PREEMPTED), name)


def _break(ranks: Communicator, error: BaseException, tell: "_Reports") -> None:
    """Let rank 0 report before an error ends the job."""
    if ranks.rank == 0:
        tell.last()
        return
    ranks.send(0, {"kind": Tag.BROKEN})
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if any(mail.fact["kind"] == Tag.FINISH for mail in ranks.received()):
            return
        time.sleep(_IDLE)


class _Reports:
    """Writes interim reports: a killed job can write none."""

    def __init__(self, directory: SweepDirectory | None, report: Callable[[SweepDirectory], object]) -> None:
        self._directory, self._report = directory, report
        self._endings = 0 if directory is None else len(directory.endings)
        self._next = time.monotonic() + _REPORT

    def now_and_then(self) -> None:
        """Report if a run has ended and some time has passed since the last report."""
        begun = time.monotonic()
        if self._directory is None or begun < self._next or len(self._directory.endings) == self._endings:
            return
        self._endings = len(self._directory.endings)
        self._report(self._directory)
        end = time.monotonic()
        self._next = end + max(_REPORT, _PARTS * (end - begun))

    def last(self) -> None:
        """Report, ignoring errors: another error ends the sweep already."""
        if self._directory is not None and self._directory.endings:
            with contextlib.suppress(Exception):
                self._report(self._directory)
