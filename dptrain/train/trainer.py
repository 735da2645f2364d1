"""The one training loop."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Buffer
from dptrain.comm.base import Communicator
from dptrain.data.loading import Split
from dptrain.data.sampling import Sampler, Shard, cut
from dptrain.failure import phase
from dptrain.train.callbacks import Callback, CallbackList, Logs
from dptrain.train.replica import DeviceData, Replica

# Samples that a rank evaluates at once, at least: a larger batch is faster, and activations of this many are small.
_EVALUATION_ROWS = 256


@dataclass(frozen=True)
class Timing:
    """How long the steps of an epoch took, validation and callbacks aside.

    Attributes:
        seconds: time from the first step to the end of the last.
        samples: trained on by all ranks.
    """

    seconds: float
    samples: int

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks a second."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


class Trainer:
    """Trains a replica together with the other ranks'.

    Args:
        replica: this rank's, compiled.
        comm: the ranks.

    Attributes:
        timing: of the last finished epoch.
    """

    def __init__(self, replica: Replica, comm: Communicator) -> None:
        self.replica = replica
        self.comm = comm
        self.timing = Timing(0.0, 0)
        self._started = 0.0

    def fit(
        self,
        train: Split,
        sampler: Sampler,
        *,
        epochs: int,
        validation: Split | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Train for some epochs. Collective.

        Args:
            train: this rank's training data.
            sampler: which of it goes into which step.
            epochs: how many times through.
            validation: evaluated after every epoch; its logs have the prefix "val_".
            callbacks: called on every rank.
        """
        hooks = CallbackList(callbacks)
        hooks.set_trainer(self)
        hooks.set_params({"epochs": epochs, "steps": sampler.steps})
        self.replica.reserve(max(sampler.capacity, self._evaluation_rows(validation)))
        data = self.replica.upload(train.x, train.y)
        validation_data = None if validation is None else self.replica.upload(validation.x, validation.y)
        self.share_parameters()
        hooks.on_train_begin()
        for epoch in range(epochs):
            hooks.on_epoch_begin(epoch)
            logs = self._train_epoch(data, sampler, epoch, hooks)
            if validation is not None and validation_data is not None:
                phase.enter("validation")
                validated = self._evaluate(validation_data, validation)
                logs |= {f"val_{key}": value for key, value in validated.items()}
            hooks.on_epoch_end(epoch, logs)
        hooks.on_train_end()

    def evaluate(self, split: Split) -> Logs:
        """Return the mean loss and metrics over all ranks' rows of a split. Collective."""
        self.replica.reserve(self._evaluation_rows(split))
        self.share_parameters()
        return self._evaluate(self.replica.upload(split.x, split.y), split)

    def predict(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the outputs for all rows of x, (rows, *output_shape), on every rank. Collective.

        Each rank computes a contiguous part.
        """
        backend, comm = self.replica.backend, self.comm
        start, stop = cut(0, len(x), comm.size)[comm.rank]
        size = max(1, min(_EVALUATION_ROWS, stop - start))
        self.replica.reserve(size)
        self.share_parameters()
        outputs = np.zeros((len(x), *self.replica.architecture.output_shape), backend.dtype)
        device_x = backend.upload(x.reshape(len(x), -1))
        rows = backend.upload(np.arange(len(x), dtype=np.int64))
        with backend.step_scope():
            for begin in range(start, stop, size):
                end = min(begin + size, stop)
                outputs[begin:end] = self.replica.predict_rows(device_x, rows[begin:end])
        comm.allreduce_sum(outputs)  # every row is zero on all ranks but one
        return outputs

    def share_parameters(self) -> None:
        """Give every rank rank 0's parameters."""
        if self.comm.size == 1:
            return
        host = self.replica.backend.host_view(self.replica.params)
        self.comm.broadcast(host)
        self.replica.backend.commit(self.replica.params, host)

    def logs(self) -> Logs:
        """Return the mean loss and metrics over the epoch so far, over all ranks."""
        return self.replica.logs()

    def timing_so_far(self) -> Timing:
        """Return the time and the samples of the epoch so far."""
        return Timing(time.perf_counter() - self._started, self.replica.samples_seen())

    def _train_epoch(self, data: DeviceData, sampler: Sampler, epoch: int, hooks: CallbackList) -> Logs:
        phase.enter("training")
        phase.epoch = epoch + 1
        order = self.replica.backend.upload(sampler.order(epoch))
        self.replica.reset_totals()
        self._started = time.perf_counter()
        for step in range(sampler.steps):
            phase.step = step + 1
            self._step(data, order, sampler.shards(step))
            hooks.on_train_batch_end(step)
        logs = self.logs()
        self.timing = self.timing_so_far()
        return logs

    def _step(self, data: DeviceData, order: Buffer, shards: Sequence[Shard]) -> None:
        """Gather, forward, loss, backward; sum over the ranks; update."""
        with self.replica.backend.step_scope():
            self.replica.forward_backward(data, order, shards)
            self._all_reduce(self.replica.reduction)
            self.replica.update()

    def _all_reduce(self, buffer: Buffer) -> None:
        if self.comm.size == 1:
            return  # a device would copy to the host, wait, and copy back
        host = self.replica.backend.host_view(buffer)
        self.comm.allreduce_sum(host)
        self.replica.backend.commit(buffer, host)

    def _evaluate(self, data: DeviceData, split: Split) -> Logs:
        backend = self.replica.backend
        self.replica.reset_totals()
        start, stop = split.mine
        rows = backend.upload(np.arange(start, stop, dtype=np.int64))
        size = self._evaluation_rows(split)
        with backend.step_scope():
            for begin in range(0, stop - start, size):
                self.replica.evaluate_rows(data, rows[begin : begin + size])
        self._all_reduce(self.replica.totals)
        return self.logs()

    def _evaluation_rows(self, split: Split | None) -> int:
        return 1 if split is None else max(1, min(_EVALUATION_ROWS, split.mine[1] - split.mine[0]))
