"""The one training loop."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain.batches.base import Batches
from dptrain.batches.sampling import Shard
from dptrain.callbacks import CallbackList, Logs, StepLogs
from dptrain.comm.base import Communicator
from dptrain.runtime.failure import phase
from dptrain.train.allreduce import DEFAULT_BUCKET_MB, AllReduce, SmallSums
from dptrain.train.replica import Replica

T = TypeVar("T")
# A piece of work that yields when a step has been queued, so that others can have a turn.
StepIterator = Generator[None, None, T]


@dataclass(frozen=True)
class Timing:
    """How long the steps of an epoch took, validation and what comes after it aside.

    Attributes:
        seconds: since the epoch began.
        samples: trained on by all ranks since then.
        steps: made since then.
    """

    seconds: float
    samples: int
    steps: int

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks a second."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


class Trainer:
    """Trains a replica together with the other ranks'.

    Args:
        replica: this rank's, compiled.
        comm: the ranks.
        bucket_mb: as `AllReduce`; the same on all ranks.
        direct: hand device memory to MPI, which must be CUDA-aware.
        data_bytes: of the device's memory that samples may take; None for what is free.
    """

    def __init__(
        self,
        replica: Replica,
        comm: Communicator,
        *,
        bucket_mb: float = DEFAULT_BUCKET_MB,
        direct: bool = False,
        data_bytes: int | None = None,
    ) -> None:
        self.replica = replica
        self.comm = comm
        self._all_reduce: AllReduce | None = None
        self._bucket_mb, self._direct, self._data_bytes = bucket_mb, direct, data_bytes
        if comm.size > 1:
            replica.reduce = SmallSums(replica.backend, comm, direct=direct)
        self._started = 0.0
        self._steps = 0
        self._samples_before = 0
        self._finished: Timing | None = Timing(0.0, 0, 0)
        self._first: tuple[int, int] = (0, 0)
        self._then: Callable[[], None] | None = None

    @property
    def timing(self) -> Timing:
        """Of the epoch at hand, until its steps are done, then of that epoch."""
        if self._finished is not None:
            return self._finished
        samples = self.replica.samples_seen() - self._samples_before
        return Timing(time.perf_counter() - self._started, samples, self._steps)

    def go_to(self, epoch: int, step: int = 0, then: Callable[[], None] | None = None) -> None:
        """Let the training begin there: for a callback that restores an interrupted one in its `on_train_begin`.

        Args:
            epoch: counted from 0.
            step: of that epoch that are done already; `Replica.totals` is to hold their sums.
            then: called after the hooks of that epoch's begin, which may change what was restored.
        """
        self._first, self._then = (epoch, step), then

    def training(
        self,
        train: Batches,
        hooks: CallbackList,
        *,
        epochs: int,
        initial_epoch: int = 0,
        validation: Batches | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> StepIterator[None]:
        """Train, and yield whenever a step has been queued: who drives it may do other work in between. Collective.

        Args:
            train: this rank's part of the training data.
            hooks: what to call; `hooks.model.stop_training` ends the training, wherever it is set.
            epochs: number of the last epoch.
            initial_epoch: number of epochs that are done already.
            validation: evaluated after epochs; its logs have the prefix "val_".
            validation_freq: evaluate after every so many epochs, or after those whose numbers (from 1) are given.
        """
        self.replica.reserve(max(train.capacity, 0 if validation is None else validation.capacity))
        self._prepare_exchange()
        backend = self.replica.backend
        # All other memory has been taken: samples get what is left.
        with ExitStack() as stack:
            stack.enter_context(train.open(backend, self._data_bytes))
            if validation is not None:
                stack.enter_context(validation.open(backend, self._data_bytes))
            self.share_parameters()
            hooks.set_trainer(self)
            hooks.model.stop_training = False
            logs: Logs = {}
            self.go_to(initial_epoch)
            hooks.on_train_begin()
            first_epoch, first_step = self._first
            if (first_epoch, first_step) != (initial_epoch, 0):
                train.resume(first_epoch - initial_epoch, first_step)
            for epoch in range(first_epoch, epochs):
                hooks.on_epoch_begin(epoch)
                if epoch == first_epoch and self._then is not None:
                    self._then()
                logs = yield from self._train_epoch(train, epoch, hooks, first_step if epoch == first_epoch else 0)
                if validation is not None and _is_due(epoch, validation_freq):
                    phase.enter("validation")
                    validated = yield from self._evaluate(validation, hooks)
                    logs |= {f"val_{key}": value for key, value in validated.items()}
                hooks.on_epoch_end(epoch, logs)
                if self._stopped(hooks.model, "stop_training"):
                    break
            hooks.on_train_end(logs)

    def evaluate(self, batches: Batches, hooks: CallbackList) -> Logs:
        """Return the mean loss and metrics over all ranks' samples. Collective.

        Args:
            batches: this rank's part of the samples.
            hooks: what to call; `hooks.model.stop_evaluating` ends the evaluation after a step, where any rank has a
                hook of steps.
        """
        self.replica.reserve(batches.capacity)
        self.share_parameters()
        hooks.set_trainer(self)
        with batches.open(self.replica.backend, self._data_bytes):
            return run_to_end(self._evaluate(batches, hooks))

    def predict(self, batches: Batches, rows: int | None, hooks: CallbackList) -> npt.NDArray[Any]:
        """Return the outputs for all samples, (rows, *output_shape), on every rank. Collective.

        Args:
            batches: of features alone, in their stored order.
            rows: the most samples that all ranks have together; None where only their end will tell.
            hooks: what to call; `hooks.model.stop_predicting` ends the prediction after a step, where any rank has a
                hook of steps.
        """
        backend = self.replica.backend
        self.replica.reserve(batches.capacity)
        self.share_parameters()
        shape = self.replica.architecture.output_shape
        outputs = np.zeros((rows or 0, *shape), backend.dtype)
        found: list[tuple[Shard, npt.NDArray[Any]]] = []  # until the number of rows is known
        last = 0  # one past the last row that this rank has answered
        hooks.set_trainer(self)
        watched = self._any(hooks.has_batch_hooks("predict"))
        if watched:
            hooks.model.stop_predicting = False
        hooks.on_predict_begin()
        with batches.open(backend, self._data_bytes):
            for step, shards in enumerate(batches.epoch(0)):
                hooks.on_predict_batch_begin(step)
                self._reserve(shards)
                if rows is None:
                    mine = [np.empty((shard.rows, *shape), backend.dtype) for shard in shards]
                    found.extend(zip(shards, mine, strict=True))
                else:
                    mine = [outputs[shard.start : shard.stop] for shard in shards]
                with backend.step_scope():
                    for shard, part in zip(shards, mine, strict=True):
                        if shard.rows:
                            part[:] = self.replica.predict_rows(batches.rows(shard))
                last = max([last, *(shard.stop for shard in shards)])
                hooks.on_predict_batch_end(step, {"outputs": mine[0] if len(mine) == 1 else np.concatenate(mine)})
                if watched and self._stopped(hooks.model, "stop_predicting"):
                    break
        hooks.on_predict_end()
        last = max(self.comm.allgather(last))
        if rows is not None:
            outputs = outputs[:last]
        else:
            outputs = np.zeros((last, *shape), backend.dtype)
            for shard, part in found:
                outputs[shard.start : shard.stop] = part
        self.comm.allreduce_sum(outputs)  # every row is zero on all ranks but one
        return outputs

    def train_on_batch(self, batches: Batches) -> Logs:
        """Make the one step of `batches`; return its loss and metrics. Collective."""
        self.replica.reserve(batches.capacity)
        self._prepare_exchange()
        self.replica.reset_totals()
        with batches.open(self.replica.backend, self._data_bytes):
            for shards in batches.epoch(0):
                self._step(batches, shards)
        return self.replica.logs()

    def test_on_batch(self, batches: Batches) -> Logs:
        """Return the loss and metrics of `batches`. Collective."""
        self.replica.reserve(batches.capacity)
        self.replica.reset_totals()
        with batches.open(self.replica.backend, self._data_bytes):
            run_to_end(self._add_up(batches, CallbackList([]), watched=False))
        self._sum_totals()
        return self.replica.logs()

    def share_parameters(self) -> None:
        """Give every rank rank 0's parameters."""
        if self.comm.size == 1:
            return
        host = self.replica.backend.download(self.replica.params)
        self.comm.broadcast(host)
        self.replica.backend.write(self.replica.params, host)

    def _train_epoch(self, batches: Batches, epoch: int, hooks: CallbackList, first_step: int) -> StepIterator[Logs]:
        phase.enter("training")
        phase.epoch = epoch + 1
        if not first_step:
            self.replica.reset_totals()
        self._samples_before = self.replica.samples_seen() if first_step else 0
        self._started, self._steps, self._finished = time.perf_counter(), 0, None
        # A step's hooks may stop the training on one rank; where no rank has any, there is nothing to agree on.
        watched = self._any(hooks.has_batch_hooks("train"))
        for step, shards in enumerate(batches.epoch(epoch), first_step):
            if step == first_step:
                self.replica.require_shards(len(shards))
            phase.step = step + 1
            hooks.on_train_batch_begin(step)
            self._step(batches, shards)
            self._steps += 1
            hooks.on_train_batch_end(step, StepLogs(self.replica.logs))
            if watched and self._stopped(hooks.model, "stop_training"):
                break
            yield
        # As Keras, an epoch for which no data was left has no logs.
        logs = self.replica.logs() if self._steps or first_step else {}
        self._finished = self.timing
        return logs

    def _step(self, batches: Batches, shards: Sequence[Shard]) -> None:
        """Gather, forward, loss, backward; sum over the ranks; update."""
        self._reserve(shards)
        with self.replica.backend.step_scope():
            if self._all_reduce is None:
                self.replica.forward_backward(batches, shards)
            else:
                self.replica.forward_backward(batches, shards, self._all_reduce.on_gradients_ready)
                self._all_reduce.finish()
            self.replica.update()

    def _reserve(self, shards: Sequence[Shard]) -> None:
        """Make room for shards that may be larger than anybody knew when the training began."""
        self.replica.reserve(max((shard.rows for shard in shards), default=0))

    def _prepare_exchange(self) -> None:
        reduction = self.replica.reduction  # allocates it
        if self.comm.size > 1 and self._all_reduce is None:
            # One rank has nothing to sum, and a device would copy to the host and back.
            self._all_reduce = AllReduce(
                self.replica.backend, self.comm, reduction, self._bucket_mb, direct=self._direct
            )

    def _evaluate(self, batches: Batches, hooks: CallbackList) -> StepIterator[Logs]:
        batches.resume(0, 0)  # with validation_steps each validation sees the same first batches, as in Keras
        self.replica.reset_totals()
        watched = self._any(hooks.has_batch_hooks("test"))
        if watched:
            hooks.model.stop_evaluating = False
        hooks.on_test_begin()
        yield from self._add_up(batches, hooks, watched)
        self._sum_totals()
        # As Keras, an evaluation without samples has no logs: a loss of 0 would look like a perfect one.
        logs = self.replica.logs() if self.replica.samples_seen() else {}
        hooks.on_test_end(logs)
        return logs

    def _add_up(self, batches: Batches, hooks: CallbackList, watched: bool) -> StepIterator[None]:
        """Add the loss and metrics of this rank's samples to the totals."""
        for step, shards in enumerate(batches.epoch(0)):
            hooks.on_test_batch_begin(step)
            self._reserve(shards)
            with self.replica.backend.step_scope():
                for shard in shards:
                    if shard.rows:
                        self.replica.evaluate_rows(batches.rows(shard))
            if watched:
                logs = self._logs_so_far()
                hooks.on_test_batch_end(step, logs)
                if self._stopped(hooks.model, "stop_evaluating"):
                    break
            yield

    def _sum_totals(self) -> None:
        """Sum the totals, which each rank has of its own samples, over the ranks."""
        if self.comm.size > 1:
            totals = self.replica.backend.download(self.replica.totals)
            self.comm.allreduce_sum(totals)
            self.replica.backend.write(self.replica.totals, totals)

    def _logs_so_far(self) -> Logs:
        """Return the means over all ranks of what each has in its totals, and leave those as they are. Collective."""
        own = self.replica.backend.download(self.replica.totals)
        self._sum_totals()
        logs = self.replica.logs()
        self.replica.backend.write(self.replica.totals, own)
        return logs

    def _stopped(self, model: Any, flag: str) -> bool:
        """Return whether any rank's model is to stop ("stop_training", ...), and say so to this rank's. Collective."""
        stop = self._any(bool(getattr(model, flag)))
        setattr(model, flag, stop)
        return stop

    def _any(self, mine: bool) -> bool:
        """Return whether it is true on any rank. Collective."""
        if self.comm.size == 1:
            return mine
        flag = np.array([mine], np.int32)
        self.comm.allreduce_sum(flag)
        return bool(flag[0])


def run_to_end(steps: Generator[Any, None, T]) -> T:
    """Do all of a piece of work at once and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _is_due(epoch: int, frequency: int | Sequence[int]) -> bool:
    return epoch + 1 in frequency if isinstance(frequency, Sequence) else (epoch + 1) % frequency == 0
