"""Sync points between steps: all ranks save a checkpoint, or stop after a signal, after the same step."""

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
from dptrain.runtime.failure import end_job, phase
from dptrain.runtime.watch import watchdog
from dptrain.train.step_deadline import StepDeadline

Array = npt.NDArray[Any]

# How a message goes on where a step was abandoned, and the most seconds until all ranks have.
_ENDLESS, _TOGETHER = "; the step that followed did not end", 5.0


class SyncPoints:
    """The sync points of one training, a context; there are none without a callback that saves checkpoints.

    Between them each rank chooses how many steps it queues at once, so each sync point says after which step the next
    one is. Rank 0's clock decides when to save, any rank's signal ends the training. That costs one message of a few
    numbers in as many steps as rank 0 queues at once.
    """

    def __init__(
        self,
        comm: Communicator,
        hooks: CallbackList,
        check: Callable[[], None],
        local: Callable[[Iterable[Variable]], list[Variable]],
    ) -> None:
        self._comm, self._hooks, self._check, self._local = comm, hooks, check, local
        self._keepers = [callback for callback in hooks.callbacks if isinstance(callback, Checkpointing)]
        self._signal_scope = ExitStack()
        self._deadline = StepDeadline(comm)
        self._source: Checkpointing | None = None
        self._position = Position(0, 0, 0)
        self._step_count = 0
        # Steps of the training and of validations since the start here, and after how many the next sync point is, and
        # the last in a validation may be.
        self._queued = self._next = self._last = 0
        self._before: tuple[Position, list[tuple[Variable, Array]]] | None = None
        self._rate_at_begin = 0.0
        self.skipped_at_begin: int | None = None

    def __enter__(self) -> Self:
        if self._keepers:
            self._signal_scope.enter_context(signals.catching())
            self._signal_scope.enter_context(self._deadline)
        return self

    def __exit__(self, *error: object) -> None:
        self._signal_scope.close()

    def resume(self) -> Position | None:
        """Restore the model's state of an interrupted training and return its position, or None. Collective."""
        for keeper in self._keepers:
            position = keeper._resume(self._hooks)
            if position is not None and self._source is None:
                self._source, self._position = keeper, position
                self._step_count = position.made
        self._next = self._queued + 1
        if self._keepers:
            number, _ = self._agree(1)
            if number is not None:
                raise _preempted(number, "before the first step")
        if self._source is None:
            return None
        self._hooks.params["resumes"] = True  # not one of Keras' parameters
        return self._position

    def load(self, *, begun: bool = False) -> None:
        """Restore the callbacks' states at the position; see `Checkpointing.load`. Collective."""
        if self._source is not None:
            self._source._load(self._hooks, self._position, begun=begun)

    def begin_epoch(self, epoch: int) -> None:
        """Record what a checkpoint in the middle of the epoch needs."""
        model, before = self._hooks.model, self._position
        resumed = self._source is not None and before.step and before.epoch == epoch
        self.skipped_at_begin = before.skipped_at_begin if resumed else model._skipped_steps
        if self._keepers:
            self._rate_at_begin = before.rate_at_begin if resumed else model._compiled_optimizer._resumed_rate

    def most(self, steps: int) -> int:
        """Return how many of so many steps may be queued before the next sync point."""
        return min(steps, max(self._next - self._queued, 1)) if self._keepers else steps

    def count(self, steps: int) -> None:
        """Count queued steps."""
        self._step_count += steps
        self._queued += steps

    def after_steps(self, epoch: int, step: int, *, ahead: int) -> None:
        """Synchronize if due; `ahead` steps may be queued before the next sync point. Collective.

        Raises:
            PreemptedError: a signal has come; a checkpoint is saved.
            OutputError: a checkpoint cannot be written.
        """
        if not self._keepers or self._queued < self._next:
            return
        due = [keeper for keeper in self._keepers if keeper.steps is not None and self._step_count % keeper.steps == 0]
        self._synchronize(self._within(epoch, step), due, ahead)

    def begin_validation(self, epoch: int, step: int, *, stops: bool, steps: int | None) -> None:
        """Record the position before a validation, for checkpoints during it. Collective."""
        if self._keepers:
            self._last = self._queued + (0 if steps is None else max(self._comm.allgather(steps)))
            model = self._hooks.model
            still = {id(variable) for variable in (*model.trainable_weights, *model._compiled_optimizer.variables)}
            changing = [variable for variable in model._variables_on_device() if id(variable) not in still]
            state = [(variable, variable.numpy()) for variable in self._local(changing)]
            self._before = replace(self._within(epoch, step), stops=stops), state

    def after_evaluated(self, steps: int, *, ahead: int) -> None:
        """Synchronize if due, after steps of a validation; a checkpoint is of the state before it. Collective."""
        self._queued += steps
        if not self._keepers or self._queued < self._next:
            return
        number, _ = self._agree(ahead)
        if number is not None:
            self._save_before_validation(number)

    def _save_before_validation(self, number: int, more: str = "") -> None:
        assert self._before is not None
        position, state = self._before
        for variable, value in state:
            variable.assign(value)
        self._save(position, self._keepers, number, more)

    def abandon(self, epoch: int, step: int, error: signals.EndlessStepError) -> None:
        """End the training after a signal, during a step that does not end. Collective.

        Raises:
            PreemptedError: a checkpoint of the steps before is saved.
        """
        self._save(self._within(epoch, step), self._keepers, self._abandoned(error), _ENDLESS)

    def abandon_validation(self, error: signals.EndlessStepError) -> None:
        """As `abandon`, during a step of a validation."""
        self._save_before_validation(self._abandoned(error), _ENDLESS)

    def _abandoned(self, error: signals.EndlessStepError) -> int:
        """Return the signal once all ranks have abandoned the step; ends the job if they do not."""
        self._deadline.obey()
        number = signals.caught()
        if number is None or not self._keepers:
            raise error
        if self._comm.size > 1 and not watchdog.abandon_step(_TOGETHER):
            what = f"{signals.name_of(number)}{_ENDLESS}, and not all ranks could leave it: nothing was saved after it"
            end_job(PreemptedError("training", _code_of(number), what, []))
        return number

    def end_validation(self, *, ahead: int) -> None:
        """Take part in the sync points of ranks with more validation steps. Collective."""
        while self._keepers and self._next <= self._last:
            self.after_evaluated(self._next - self._queued, ahead=ahead)

    def after_epoch(self, epoch: int, logs: Logs, *, ended: bool, ahead: int) -> None:
        """Synchronize after all hooks of an epoch's end. Collective."""
        if self._keepers:
            due = [keeper for keeper in self._keepers if keeper.epochs]
            self._synchronize(Position(epoch + 1, 0, self._step_count, ended=ended, logs=logs), due, ahead)

    def _within(self, epoch: int, step: int) -> Position:
        return Position(epoch, step, self._step_count, self._rate_at_begin, skipped_at_begin=self.skipped_at_begin)

    def _synchronize(self, position: Position, due: list[Checkpointing], ahead: int) -> None:
        left = [steps for keeper in self._keepers if (steps := keeper._steps_left(self._step_count)) is not None]
        number, flags = self._agree(min([max(ahead, 1), *left]))
        saving = [
            keeper
            for keeper, wants in zip(self._keepers, flags, strict=True)
            if wants or keeper in due or number is not None
        ]
        self._save(position, saving, number)

    def _save(self, position: Position, keepers: Sequence[Checkpointing], number: int | None, more: str = "") -> None:
        """Save some checkpoints, and end the training if a signal has come."""
        if keepers:
            self._check()
        with phase.during("saving"):
            for keeper in keepers:
                keeper._save(self._hooks, position)
        if number is not None:
            with phase.during("saving"):
                where = [keeper._wait() for keeper in self._keepers]
            steps = f"{self._step_count} step{'s' * (self._step_count != 1)}"
            raise _preempted(number, f"after {steps}, saved as {where[0]}{more}")

    def _agree(self, ahead: int) -> tuple[int | None, list[bool]]:
        """Return the signal of any rank, and which callbacks rank 0's clock lets save. Collective.

        Checkpoints whose parts all ranks have written are then joined.
        """
        mine = signals.caught()
        came = [int(number == mine) for number in signals.SIGNALS]
        leads = self._comm.rank == 0
        wants = [int(leads and keeper._is_due) for keeper in self._keepers]
        written = [int(keeper._is_written) for keeper in self._keepers]
        facts = np.array([*came, *wants, *written, ahead if leads else 0], np.int64)
        if self._comm.size > 1:
            self._comm.allreduce_sum(facts)
        *flags, ahead = facts.tolist()
        self._next = self._queued + ahead
        number = next((signal for signal, count in zip(signals.SIGNALS, flags, strict=False) if count), None)
        if number is not None:
            self._deadline.obey()
        counts = iter(flags[len(signals.SIGNALS) :])
        saving = [bool(next(counts)) for _ in self._keepers]
        for keeper, count in zip(self._keepers, counts, strict=True):
            if count == self._comm.size:
                keeper._join()
        return number, saving


def _preempted(number: int, where: str) -> PreemptedError:
    name = signals.name_of(number)
    return PreemptedError("training", _code_of(number), f"{'interrupted' if name == 'SIGINT' else name} {where}", [])


def _code_of(number: int) -> ExitCode:
    return ExitCode.INTERRUPTED if signals.name_of(number) == "SIGINT" else ExitCode.PREEMPTED
