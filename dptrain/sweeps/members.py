"""Members of an ensemble in training, distributed over the ranks."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.callbacks import Callback, Logs
from dptrain.callbacks.progbar_logger import format_logs
from dptrain.comm import Communicator
from dptrain.models import Model
from dptrain.runtime.failure import phase
from dptrain.runtime.output.terminal import say
from dptrain.runtime.watch import watchdog
from dptrain.sweeps.scheduling.round_robin import RoundRobin
from dptrain.sweeps.scheduling.training import Slot, is_of_the_device, is_out_of_memory, numbers_of

# Seconds between an idle rank's looks for messages, which leave its core to others.
_IDLE = 0.002


class Member(Callback):
    """A member in training; as a callback it reports its epochs to rank 0."""

    def __init__(self, number: int, model: Model, arguments: Mapping[str, Any], ranks: Communicator) -> None:
        super().__init__()
        self.number = self.place = number
        self._trained, self._ranks = model, ranks
        self._arguments = {**arguments, "callbacks": [*arguments["callbacks"], self], "verbose": 0}

    def start(self, threads: int | None) -> None:
        """Open the device; `threads` of the CPU for this member, None for all of this rank's."""
        self.has_stepped = False
        self._slot = Slot(self.place, threads)
        self._trained._put_on(self._slot.backend(self._trained._device_options))
        self._steps = self._trained._fit_in_steps(**self._arguments)

    def advance(self) -> bool | None:
        """Queue the next steps; return True after the last."""
        try:
            next(self._steps)
        except StopIteration:
            return True
        self.has_stepped = True
        return None

    def launch_waiting(self) -> None:
        """Launch what waits to be executed together with other members."""
        self._slot.launch_waiting()

    def close(self) -> None:
        """Release the device; the model is an ordinary one again."""
        self._steps.close()
        self._trained._put_on(None)
        self._slot.close()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Report the epoch to rank 0."""
        self.tell("epoch", epoch=epoch, logs=numbers_of(logs))

    def tell(self, kind: str, **fact: Any) -> None:
        """Send rank 0 a message about this member."""
        self._ranks.send(0, {"kind": kind, "member": self.number, **fact})

    def named(self, error: Exception) -> Exception:
        """Return an error with the member's number in its message."""
        who = f"member {self.number} (seed {self._trained.seed})"
        if len(error.args) == 1 and str(error) == error.args[0]:
            error.args = (f"{who}: {error}",)
        else:
            error.add_note(who)
        return error


class Members:
    """The members of a rank: all at once, or as many as the device's memory holds."""

    def __init__(self, members: Sequence[Member], threads: int) -> None:
        self._schedule: RoundRobin[Member] = RoundRobin(threads)
        self._threads = 1 if threads > 1 else None
        self._waiting, self._going = list(members), list[Member]()
        self._room = len(members)

    def advance(self) -> bool:
        """Advance all members; return whether any are left. An error names its member."""
        while self._waiting and len(self._going) < self._room:
            self._going.append(self._waiting.pop(0))
            self._try(self._going[-1])
        for outcome in self._schedule.advance(self._going) if self._going else ():
            member = outcome.training
            if outcome.error is not None:
                self._failed(member, outcome.error)
            elif outcome.ended:
                self._leave(member)
                member.tell("ended")
        return bool(self._going or self._waiting)

    def close(self) -> None:
        """Release the device of all members."""
        self._schedule.close()
        for member in list(self._going):
            self._leave(member)

    def _try(self, member: Member) -> None:
        try:
            member.start(self._threads)
        except Exception as error:
            self._failed(member, error)

    def _failed(self, member: Member, error: Exception) -> None:
        if len(self._going) > 1 and is_out_of_memory(error) and not member.has_stepped:
            self._leave(member)
            self._waiting.append(member)
            self._room = len(self._going)
            return
        if is_of_the_device(error):
            self._going.clear()  # unsaved values on the device are lost
        raise member.named(error)

    def _leave(self, member: Member) -> None:
        self._going.remove(member)
        member.close()


class EpochProgress:
    """Prints a line for each epoch that all members still in training have finished."""

    def __init__(self, members: int, epochs: int, *, shown: bool) -> None:
        self.going = set(range(members))
        self._epochs, self._shown = epochs, shown
        self._logs: dict[int, dict[int, Logs]] = {}
        self._begun = time.perf_counter()

    def epoch(self, member: int, epoch: int, logs: Logs) -> None:
        """Record the logs of an epoch, counted from 0."""
        self._logs.setdefault(epoch, {})[member] = logs
        self._show()

    def ended(self, member: int) -> None:
        """Remove a member from those still in training."""
        self.going.discard(member)
        self._show()

    def _show(self) -> None:
        while self._logs and self.going <= self._logs[min(self._logs)].keys():
            epoch = min(self._logs)
            logs = list(self._logs.pop(epoch).values())
            now = time.perf_counter()
            if self._shown:
                keys = dict.fromkeys(key for member_logs in logs for key in member_logs)
                means = {
                    key: float(np.mean([member_logs[key] for member_logs in logs if key in member_logs]))
                    for key in keys
                }
                head = f"Epoch {epoch + 1}/{self._epochs} - {len(logs)} member{'s' if len(logs) > 1 else ''}"
                say(f"{head} - {now - self._begun:.1f} s - {format_logs(means)}")
            self._begun = now


def train(ranks: Communicator, mine: Members, progress: EpochProgress) -> Exception | None:
    """Train until all members of all ranks have ended or one has failed; return this rank's error. Collective."""
    problem: Exception | None = None
    finished = finish_sent = False
    with watchdog.going_round() as go_round:
        while True:
            go_round()
            failed = False
            for mail in ranks.received():
                kind, fact = mail.fact["kind"], mail.fact
                if kind == "finish":
                    return problem
                if kind == "epoch":
                    progress.epoch(fact["member"], fact["epoch"], fact["logs"])
                elif kind == "ended":
                    progress.ended(fact["member"])
                failed = failed or kind == "failed"
            if ranks.rank == 0 and not finish_sent and (failed or not progress.going):
                finish_sent = True
                for rank in range(ranks.size):
                    ranks.send(rank, {"kind": "finish"})
            if finished:
                time.sleep(_IDLE)
                continue
            try:
                finished = not mine.advance()
            except Exception as error:
                problem, finished = error, True
                ranks.send(0, {"kind": "failed"})
            phase.enter("fit")  # not the last member's phase
