"""The one training loop."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.data.loading import Split
from dptrain.data.sampling import Sampler, Shard, cut
from dptrain.failure import phase
from dptrain.train.allreduce import DEFAULT_BUCKET_MB, AllReduce, SmallSums
from dptrain.train.callbacks import Callback, CallbackList, Logs
from dptrain.train.feed import Feed, make_feed
from dptrain.train.replica import Replica

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
        bucket_mb: as `AllReduce`; the same on all ranks.
        direct: hand device memory to MPI, which must be CUDA-aware.
        data_bytes: of the device's memory that samples may take; None for what is free.

    Attributes:
        timing: of the last finished epoch.
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
        self.replica.require_shards(len(sampler.shards(0)))
        hooks = CallbackList(callbacks)
        hooks.set_trainer(self)
        hooks.set_params({"epochs": epochs, "steps": sampler.steps})
        self.replica.reserve(max(sampler.capacity, self._evaluation_rows(validation)))
        reduction = self.replica.reduction
        if self.comm.size > 1 and self._all_reduce is None:
            # One rank has nothing to sum, and a device would copy to the host and back.
            self._all_reduce = AllReduce(
                self.replica.backend, self.comm, reduction, self._bucket_mb, direct=self._direct
            )
        # All other memory has been taken: samples get what is left.
        with ExitStack() as stack:
            feed = stack.enter_context(self._feed(train, sampler.capacity))
            validation_feed = None if validation is None else stack.enter_context(self._evaluation_feed(validation))
            self.share_parameters()
            hooks.on_train_begin()
            for epoch in range(epochs):
                hooks.on_epoch_begin(epoch)
                logs = self._train_epoch(feed, sampler, epoch, hooks)
                if validation is not None and validation_feed is not None:
                    phase.enter("validation")
                    validated = self._evaluate(validation_feed, validation)
                    logs |= {f"val_{key}": value for key, value in validated.items()}
                hooks.on_epoch_end(epoch, logs)
            hooks.on_train_end()

    def evaluate(self, split: Split) -> Logs:
        """Return the mean loss and metrics over all ranks' rows of a split. Collective."""
        self.replica.reserve(self._evaluation_rows(split))
        self.share_parameters()
        with self._evaluation_feed(split) as feed:
            return self._evaluate(feed, split)

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
        shards = _in_order(start, stop, size)
        with make_feed(backend, [x.reshape(len(x), -1)], size, self._data_bytes) as feed, backend.step_scope():
            feed.start(np.arange(len(x), dtype=np.int64), shards)
            for shard in shards:
                outputs[shard.start : shard.stop] = self.replica.predict_rows(feed.rows(shard))
        comm.allreduce_sum(outputs)  # every row is zero on all ranks but one
        return outputs

    def share_parameters(self) -> None:
        """Give every rank rank 0's parameters."""
        if self.comm.size == 1:
            return
        host = self.replica.backend.download(self.replica.params)
        self.comm.broadcast(host)
        self.replica.backend.write(self.replica.params, host)

    def logs(self) -> Logs:
        """Return the mean loss and metrics over the epoch so far, over all ranks."""
        return self.replica.logs()

    def timing_so_far(self) -> Timing:
        """Return the time and the samples of the epoch so far."""
        return Timing(time.perf_counter() - self._started, self.replica.samples_seen())

    def _train_epoch(self, feed: Feed, sampler: Sampler, epoch: int, hooks: CallbackList) -> Logs:
        phase.enter("training")
        phase.epoch = epoch + 1
        plan = [sampler.shards(step) for step in range(sampler.steps)]
        feed.start(sampler.order(epoch), [shard for shards in plan for shard in shards])
        self.replica.reset_totals()
        self._started = time.perf_counter()
        for step, shards in enumerate(plan):
            phase.step = step + 1
            self._step(feed, shards)
            hooks.on_train_batch_end(step)
        logs = self.logs()
        self.timing = self.timing_so_far()
        return logs

    def _step(self, feed: Feed, shards: Sequence[Shard]) -> None:
        """Gather, forward, loss, backward; sum over the ranks; update."""
        with self.replica.backend.step_scope():
            if self._all_reduce is None:
                self.replica.forward_backward(feed, shards)
            else:
                self.replica.forward_backward(feed, shards, self._all_reduce.complete_from)
                self._all_reduce.finish()
            self.replica.update()

    def _evaluate(self, feed: Feed, split: Split) -> Logs:
        backend = self.replica.backend
        self.replica.reset_totals()
        start, stop = split.mine
        shards = _in_order(start, stop, self._evaluation_rows(split))
        feed.start(np.arange(len(split.x), dtype=np.int64), shards)
        with backend.step_scope():
            for shard in shards:
                self.replica.evaluate_rows(feed.rows(shard))
        if self.comm.size > 1:
            totals = backend.download(self.replica.totals)
            self.comm.allreduce_sum(totals)
            backend.write(self.replica.totals, totals)
        return self.logs()

    def _feed(self, split: Split, largest: int) -> Feed:
        return make_feed(self.replica.backend, self.replica.as_stored(split.x, split.y), largest, self._data_bytes)

    def _evaluation_feed(self, split: Split) -> Feed:
        return self._feed(split, self._evaluation_rows(split))

    def _evaluation_rows(self, split: Split | None) -> int:
        return 1 if split is None else max(1, min(_EVALUATION_ROWS, split.mine[1] - split.mine[0]))


def _in_order(start: int, stop: int, size: int) -> list[Shard]:
    """Return [start, stop) cut into shards of `size` rows."""
    return [Shard(begin, min(begin + size, stop), begin - start) for begin in range(start, stop, size)]
