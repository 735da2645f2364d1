"""A sweep from its plan to its report."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dptrain.comm import Communicator
from dptrain.runtime.failure import phase
from dptrain.runtime.terminal import verbosity
from dptrain.sweeps.coordinator import Coordinator
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.messages import Kind, to_segment
from dptrain.sweeps.progress import Progress, make_progress
from dptrain.sweeps.scheduler import Scheduler, SettingSource
from dptrain.sweeps.training import Recipe
from dptrain.sweeps.worker import Worker

# Seconds that a rank with nothing to train waits before it looks for messages again: cores are others'.
_IDLE = 0.002


@dataclass(frozen=True)
class Plan:
    """What a sweep is to do, the same on all ranks.

    Attributes:
        seeds: every trial is trained with each.
        metric: key of the logs that trials are compared by.
        mode: whether a high or a low value is good.
        rungs: numbers of epochs at which trials are judged and the worse ones stopped; none to train all to their end.
        eta: one trial in so many goes on from a rung.
        decides: everything that decides results, as JSON can carry it: a sweep that is continued must have the same.
        fields: names of what is swept.
    """

    seeds: Sequence[int]
    metric: str
    mode: Literal["max", "min"]
    rungs: Sequence[int]
    eta: int
    decides: Mapping[str, Any]
    fields: Sequence[str]


def run_sweep(
    ranks: Communicator,
    recipe: Recipe,
    plan: Plan,
    source: Callable[[], SettingSource],
    out: Path,
    places: int,
    *,
    verbose: str | int = "auto",
) -> SweepDirectory | None:
    """Train everything that is not trained yet. Collective; this process trains for itself meanwhile.

    Args:
        ranks: who trains.
        recipe: what runs train.
        plan: of the sweep.
        source: called on rank 0: where settings come from.
        out: directory, rank 0's.
        places: runs that this rank can train at once.
        verbose: 0 prints nothing, 1 a live table, 2 lines, "auto" the table on a terminal and else lines.

    Returns:
        On rank 0 the directory, still open, with all that happened in it; None on other ranks.

    Raises:
        AgreedError: the directory cannot be used, or the plan does not hold together.
    """
    ranks.received()  # what an interrupted sweep of this process has left
    all_places = ranks.allgather(places)
    with ExitStack() as stack:

        def begin() -> tuple[SweepDirectory, Coordinator] | None:
            if ranks.rank != 0:
                return None
            scheduler = Scheduler(
                source(), plan.seeds, metric=plan.metric, mode=plan.mode, rungs=plan.rungs, eta=plan.eta
            )
            directory = stack.enter_context(SweepDirectory(out, plan.decides))
            scheduler.restore(directory.trials, directory.endings)
            shown = verbosity(verbose)
            progress = make_progress(
                plan.metric, plan.mode, scheduler.total_runs, len(plan.seeds), quiet=shown == 0, live=shown == 1
            )
            stack.callback(progress.close)
            _recall(directory, progress)
            return directory, Coordinator(ranks, scheduler, directory, progress, all_places)

        begun = ranks.agree("output", begin)
        phase.enter("sweep")
        with closing(Worker(ranks, recipe)) as worker:
            _work(ranks, worker, None if begun is None else begun[1])
        ranks.barrier()
        if begun is None:
            return None
        begun[1].close()
        stack.pop_all()  # the directory is the caller's
        return begun[0]


def _recall(directory: SweepDirectory, progress: Progress) -> None:
    """Show what an earlier start of the sweep has left."""
    for trial in directory.trials:
        progress.trial(trial)
    for ending in directory.endings:
        progress.recalled(ending)
    if directory.endings:
        last = {ending.run.number: ending for ending in directory.endings}
        ended = sum(ending.status.is_final for ending in last.values())
        waiting = len(last) - ended
        progress.note(
            f"{directory.path}: going on; {ended} run{'s have' if ended != 1 else ' has'} ended already"
            + (f", {waiting} wait" if waiting else "")
        )


def _work(ranks: Communicator, worker: Worker, coordinator: Coordinator | None) -> None:
    """Train until rank 0 says that everything is done."""
    told = False
    while True:
        for mail in ranks.received():
            if mail.fact["kind"] == Kind.FINISH:
                return
            if mail.fact["kind"] == Kind.TRAIN:
                worker.start(to_segment(mail.fact["segment"]), mail.fact["setting"], mail.content)
            elif coordinator is not None:
                coordinator.take(mail)
        if coordinator is not None and not told and not coordinator.hand_out():
            told = True
            for rank in range(ranks.size):
                ranks.send(rank, {"kind": Kind.FINISH})
        going_on = worker.turn()
        phase.enter("sweep")  # not what the last run did
        if not going_on:
            time.sleep(_IDLE)
