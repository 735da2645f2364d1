"""Where ranks synchronize between steps to save a checkpoint, or to leave after a signal: all after the same step."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.callbacks import CallbackList, Logs
from dptrain.callbacks.checkpointing import Checkpointing, Position
from dptrain.comm import Communicator
from dptrain.errors import ExitCode, PreemptedError
from dptrain.program.tensor import Variable
from dptrain.runtime import signals
from dptrain.runtime.failure import phase

Array = npt.NDArray[Any]


class SyncPoints:
    """The sync points of one training, a context while it lasts; there are none where no callback keeps checkpoints.

    Between two of them ranks go ahead by themselves: how many steps they queue at once is each rank's own choice. So
    each sync point says after which step the next is. Rank 0's clock decides when it is time to save, any rank's
    signal that the training ends. That costs one message of a few numbers in as many steps as rank 0 queues at once.

    Args:
        comm: the ranks.
        hooks: all callbacks.
        look: called before a state is saved, on all ranks; raises where it should not be.
        local: returns what this rank has of variables in its memory.

    Attributes:
        skipped_at_begin: steps that had been left out when the epoch at hand began; None where none are.
    """

    def __init__(
        self,
        comm: Communicator,
        hooks: CallbackList,
        look: Callable[[], None],
        local: Callable[[Iterable[Variable]], list[Variable]],
    ) -> None:
        self._comm, self._hooks, self._look, self._local = comm, hooks, look, local
        self._keepers = [one for one in hooks.callbacks if isinstance(one, Checkpointing)]
        self._held = ExitStack()
        self._source: Checkpointing | None = None
        self._position = Position(0, 0, 0)
        self._made = 0
        # Steps of the training and of validations since it began here, and after how many the next sync point is,
        # and the last in a validation may be.
        self._queued = self._next = self._last = 0
        self._before: tuple[Position, list[tuple[Variable, Array]]] | None = None
        self._rate_at_begin = 0.0
        self.skipped_at_begin: int | None = None

    def __enter__(self) -> Self:
        """Note signals instead of ending by them."""
        if self._keepers:
            self._held.enter_context(signals.catching())
        return self

    def __exit__(self, *error: object) -> None:
        """Let signals do what they did before."""
        self._held.close()

    def resume(self) -> Position | None:
        """Return where an interrupted training goes on, with the model's state as it was; or None. Collective.

        Raises:
            PreemptedError: a signal has come already.
        """
        for keeper in self._keepers:
            found = keeper.resume(self._hooks)
            if found is not None and self._source is None:
                self._source, self._position = keeper, found
                self._made = found.made
        self._next = self._queued + 1
        if self._keepers:
            number, _ = self._agree(1)
            if number is not None:
                raise _preempted(number, "before the first step")
        if self._source is None:
            return None
        self._hooks.params["resumes"] = True  # beyond Keras' parameters, where Keras goes on in its own way
        return self._position

    def load(self, *, begun: bool = False) -> None:
        """Give callbacks what they held, where the training goes on; see `Checkpointing.load`. Collective."""
        if self._source is not None:
            self._source.load(self._hooks, self._position, begun=begun)

    def begin_epoch(self, epoch: int) -> None:
        """Note what a checkpoint in the middle of the epoch needs."""
        model, before = self._hooks.model, self._position
        resumed = self._source is not None and before.step and before.epoch == epoch
        self.skipped_at_begin = before.skipped_at_begin if resumed else model._skipped_steps
        if self._keepers:
            self._rate_at_begin = before.rate_at_begin if resumed else model._compiled_optimizer._resumed_rate

    def most(self, steps: int) -> int:
        """Return how many of so many steps may be queued before the next sync point."""
        return min(steps, max(self._next - self._queued, 1)) if self._keepers else steps

    def count(self, steps: int) -> None:
        """Count steps that were queued just now."""
        self._made += steps
        self._queued += steps

    def after_steps(self, epoch: int, done: int, *, ahead: int) -> None:
        """Synchronize if it is time to. Collective.

        Args:
            epoch: at hand, counted from 0.
            done: steps of it.
            ahead: steps that rank 0 may queue before the next sync point.

        Raises:
            PreemptedError: a signal has come; a checkpoint is saved.
            OutputError: a checkpoint cannot be written.
        """
        if not self._keepers or self._queued < self._next:
            return
        due = [one for one in self._keepers if one.steps is not None and self._made % one.steps == 0]
        self._synchronize(self._within(epoch, done), due, ahead)

    def begin_validation(self, epoch: int, done: int, *, stops: bool, steps: int | None) -> None:
        """Note where the training stands, which a checkpoint is to hold that is saved before the validation ends.

        Collective.

        Args:
            epoch: at hand, counted from 0.
            done: steps of it.
            stops: whether no other is to follow.
            steps: that this rank has in the validation; None where all ranks have the same number.
        """
        if self._keepers:
            self._last = self._queued + (0 if steps is None else max(self._comm.allgather(steps)))
            model = self._hooks.model
            still = {id(one) for one in (*model.trainable_weights, *model._compiled_optimizer.variables)}
            changing = [one for one in model._variables_on_device() if id(one) not in still]
            state = [(one, one.numpy()) for one in self._local(changing)]
            self._before = replace(self._within(epoch, done), stops=stops), state

    def after_evaluated(self, steps: int, *, ahead: int) -> None:
        """Synchronize if it is time to, after so many steps of a validation. Collective.

        Args:
            steps: that were queued just now.
            ahead: as of `after_steps`.

        Raises:
            PreemptedError: a signal has come; a checkpoint is saved of where the training stood before the validation.
            OutputError: it cannot be written.
        """
        self._queued += steps
        if not self._keepers or self._queued < self._next:
            return
        number, _ = self._agree(ahead)
        if number is None:
            return
        assert self._before is not None
        position, state = self._before
        for one, value in state:
            one.assign(value)
        self._save(position, self._keepers, number)

    def end_validation(self, *, ahead: int) -> None:
        """Attend the sync points of other ranks, which may have more steps in the validation. Collective.

        Args:
            ahead: as of `after_steps`.

        Raises:
            PreemptedError: as `after_evaluated`.
            OutputError: likewise.
        """
        while self._keepers and self._next <= self._last:
            self.after_evaluated(self._next - self._queued, ahead=ahead)

    def after_epoch(self, epoch: int, logs: Logs, *, ended: bool, ahead: int) -> None:
        """Synchronize after all hooks of an epoch's end. Collective.

        Args:
            epoch: that has ended, counted from 0.
            logs: of it.
            ended: whether no other is to follow.
            ahead: as of `after_steps`.

        Raises:
            PreemptedError: as `after_steps`.
            OutputError: likewise.
        """
        if self._keepers:
            due = [one for one in self._keepers if one.epochs]
            self._synchronize(Position(epoch + 1, 0, self._made, ended=ended, logs=logs), due, ahead)

    def _within(self, epoch: int, done: int) -> Position:
        """Return where the training stands after so many steps of an epoch."""
        return Position(epoch, done, self._made, self._rate_at_begin, skipped_at_begin=self.skipped_at_begin)

    def _synchronize(self, position: Position, due: list[Checkpointing], ahead: int) -> None:
        left = [steps for one in self._keepers if (steps := one.steps_left(self._made)) is not None]
        number, wanted = self._agree(min([max(ahead, 1), *left]))
        saving = [
            keeper
            for keeper, wants in zip(self._keepers, wanted, strict=True)
            if wants or keeper in due or number is not None
        ]
        self._save(position, saving, number)

    def _save(self, position: Position, keepers: Sequence[Checkpointing], number: int | None) -> None:
        """Let some save, and end the training where a signal has come."""
        if keepers:
            self._look()
        with phase.during("saving"):
            for keeper in keepers:
                keeper.save(self._hooks, position)
        if number is not None:
            with phase.during("saving"):
                where = [keeper.wait() for keeper in self._keepers]
            made = f"{self._made} step{'s' * (self._made != 1)}"
            raise _preempted(number, f"after {made}, saved as {where[0]}")

    def _agree(self, ahead: int) -> tuple[int | None, list[bool]]:
        """Return the signal that has come to any rank, and which callbacks rank 0's clock lets save. Collective.

        Checkpoints whose parts all ranks have written meanwhile are then joined.
        """
        mine = signals.caught()
        came = [int(number == mine) for number in signals.SIGNALS]
        leads = self._comm.rank == 0
        wants = [int(leads and one.is_due) for one in self._keepers]
        written = [int(one.is_written) for one in self._keepers]
        facts = np.array([*came, *wants, *written, ahead if leads else 0], np.int64)
        if self._comm.size > 1:
            self._comm.allreduce_sum(facts)
        *flags, ahead = facts.tolist()
        self._next = self._queued + ahead
        number = next((one for one, count in zip(signals.SIGNALS, flags, strict=False) if count), None)
        counts = iter(flags[len(signals.SIGNALS) :])
        wanted = [bool(next(counts)) for _ in self._keepers]
        for one, count in zip(self._keepers, counts, strict=True):
            if count == self._comm.size:
                one.join()
        return number, wanted


def _preempted(number: int, where: str) -> PreemptedError:
    """Return what ends a training by a signal on all ranks."""
    name = signals.name_of(number)
    code = ExitCode.INTERRUPTED if name == "SIGINT" else ExitCode.PREEMPTED
    return PreemptedError("training", code, f"{'interrupted' if name == 'SIGINT' else name} {where}", [])
