"""Independent-run mode: a rank trains several runs at once; no collective joins runs or ranks.

On a GPU one host thread queues steps of every run: runs of one program execute as a pack, others on their own streams.
On a CPU each run has a core, where steps are compiled.
"""

from collections.abc import Sequence
from typing import Any

from dptrain.callbacks import Logs
from dptrain.comm import Communicator
from dptrain.runtime.failure import describe, exit_code_of
from dptrain.sweeps.records import Ending, Run, Segment, Setting, Status
from dptrain.sweeps.scheduling.messages import Tag, ending_fact, run_fact, segment_fact
from dptrain.sweeps.scheduling.round_robin import RoundRobin
from dptrain.sweeps.scheduling.training import Recipe, Slot, Training, is_of_the_device, is_out_of_memory


class Worker:
    """The runs of one rank; reports their results to rank 0."""

    def __init__(
        self,
        ranks: Communicator,
        recipe: Recipe,
        threads: int = 1,
        *,
        packs: int = 1,
        metrics: Sequence[str] = (),
    ) -> None:
        self._ranks, self._recipe, self._packing, self._metrics = ranks, recipe, packs > 0, metrics
        self._threads_of_a_run = 1 if threads > 1 else None
        self._schedule: RoundRobin[Training] = RoundRobin(threads, max(packs, 1))
        self._trainings: list[Training] = []
        self._free: list[Slot] = []

    def start(self, segment: Segment, setting: Setting, state: bytes) -> None:
        """Start a segment."""
        # Without a free slot all slots train, so their number is the new one's.
        slot = (
            self._free.pop()
            if self._free
            else Slot(len(self._trainings), self._threads_of_a_run, packing=self._packing)
        )
        try:
            training = Training(self._recipe, segment, setting, slot, state, self._report, self._metrics)
            self._trainings.append(training)
        except Exception as error:
            self._free.append(slot)
            self._require_usable(error)
            if self._give_back(segment, error, len(self._trainings)):
                return
            reason, code = describe(error), exit_code_of(error)
            self._tell(Ending(segment.run, Status.FAILED, segment.begin, 0.0, {}, reason, code))

    def advance(self) -> bool:
        """Advance the runs; return whether there are any."""
        if not self._trainings:
            return False
        for outcome in self._schedule.advance(self._trainings):
            training = outcome.training
            if outcome.error is not None:
                self._require_usable(outcome.error)
                self._leave(training)
                others = 0 if training.has_reported else len(self._trainings)
                if not self._give_back(training.segment, outcome.error, others):
                    self._tell(training.failed(outcome.error))
            elif outcome.ended is not None:
                self._leave(training)
                self._tell(*outcome.ended)
        return bool(self._trainings)

    def close(self) -> None:
        """Release the device; unfinished segments are lost."""
        self._schedule.close()
        for training in list(self._trainings):
            self._leave(training)
        for slot in self._free:
            slot.close()

    def _leave(self, training: Training) -> None:
        self._trainings.remove(training)
        training.close()
        self._free.append(training.slot)

    def _give_back(self, segment: Segment, error: Exception, others: int) -> bool:
        """Return a segment to rank 0 if other runs took the memory it needs; return whether that was so."""
        if not others or not is_out_of_memory(error):
            return False
        self._ranks.send(0, {"kind": Tag.RETURNED, "segment": segment_fact(segment), "places": others})
        return True

    def _require_usable(self, error: Exception) -> None:
        if is_of_the_device(error):
            raise error

    def _report(self, run: Run, epoch: int, logs: Logs) -> None:
        self._ranks.send(0, {"kind": Tag.EPOCH, "run": run_fact(run), "epoch": epoch, "logs": logs})

    def _tell(self, ending: Ending, state: bytes = b"") -> None:
        fact: dict[str, Any] = {"kind": Tag.ENDING, "ending": ending_fact(ending)}
        self._ranks.send(0, fact, state)
