"""Rank 0's part of a sweep: assigns segments to ranks and records their results."""

from collections.abc import Sequence

from dptrain.comm import Communicator
from dptrain.comm.base import Mail
from dptrain.runtime.text import counted
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.keeping import Retention
from dptrain.sweeps.records import Ending, Segment
from dptrain.sweeps.reporting.progress import Progress
from dptrain.sweeps.scheduling.messages import Tag, segment_fact, to_ending, to_run, to_segment
from dptrain.sweeps.scheduling.scheduler import Scheduler


class Coordinator:
    """Assigns segments to ranks with free places, whose load is known here, so that idle ones get the next."""

    def __init__(
        self,
        ranks: Communicator,
        scheduler: Scheduler,
        directory: SweepDirectory,
        progress: Progress,
        places: Sequence[int],
        retention: Retention,
    ) -> None:
        self._ranks, self._scheduler = ranks, scheduler
        self._directory, self._progress = directory, progress
        self._places, self._retention = list(places), retention
        # Of each rank, the runs that it is training.
        self._out: list[set[int]] = [set() for _ in places]

    def take(self, mail: Mail) -> None:
        """Handle a message of a rank."""
        kind, fact = Tag(mail.fact["kind"]), mail.fact
        if kind is Tag.EPOCH:
            run = to_run(fact["run"])
            self._directory.add_epoch(run, fact["epoch"], fact["logs"])
            self._progress.epoch(run, fact["epoch"], fact["logs"])
        elif kind is Tag.ENDING:
            ending = to_ending(fact["ending"])
            self._out[mail.source].remove(ending.run.number)
            self._write(ending, mail.content or None)
            self._scheduler.ended(ending)
        elif kind is Tag.RETURNED:
            segment = to_segment(fact["segment"])
            self._out[mail.source].remove(segment.run.number)
            self._places[mail.source] = fact["places"]
            self._progress.note(
                f"rank {mail.source}: no memory for more than {counted(fact['places'], 'run')} at a time; "
                f"run {segment.run.number} is trained later"
            )
            self._scheduler.returned(segment)

    def hand_out(self) -> bool:
        """Assign segments to ranks with free places; return whether the sweep goes on."""
        while (rank := self._freest()) is not None and (segment := self._scheduler.next()) is not None:
            self._send(segment, rank)
        if not self._scheduler.finished:
            return True
        for ending in self._scheduler.leftover():
            self._write(ending, None)
        return False

    def close(self) -> None:
        """Release the terminal."""
        self._progress.close()

    def _freest(self) -> int | None:
        """Return the rank with the smallest share of its places in use; None if all are full."""
        load = [
            (len(out) / places, rank) for rank, (out, places) in enumerate(zip(self._out, self._places, strict=True))
        ]
        part, rank = min(load)
        return rank if part < 1 else None

    def _send(self, segment: Segment, rank: int) -> None:
        for trial in self._scheduler.new_trials():
            self._directory.add_trial(trial)
            self._progress.trial(trial)
        if runs := self._scheduler.new_runs():
            self._directory.add_runs(runs)
        run = segment.run
        state = self._directory.state(run) if segment.begin else b""
        setting = dict(self._scheduler.trials[run.trial].setting)
        fact = {"kind": Tag.TRAIN, "segment": segment_fact(segment), "setting": setting}
        self._ranks.send(rank, fact, state)
        self._out[rank].add(run.number)
        self._progress.started(segment, rank)

    def _write(self, ending: Ending, state: bytes | None) -> None:
        self._directory.add_ending(ending, state)
        self._retention.ended(ending)
        self._progress.ended(ending)
