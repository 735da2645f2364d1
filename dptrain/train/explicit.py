"""A replica whose steps are written by the user: forward, loss, backward and update as calls of their own.

The loop drives it as it drives any replica. What the loop sums over the ranks after each step is not the gradient,
which `apply_gradients` has summed by then, but the sums of the metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from dptrain import metrics
from dptrain.backend.base import DIVISOR, FIRST_STATE, LOSS, ROWS, Backend, Buffer, flat_features
from dptrain.backend.transfers import Staging
from dptrain.batches.feed import Rows, RowSource
from dptrain.batches.sampling import Shard
from dptrain.comm.base import Communicator
from dptrain.errors import ConfigError
from dptrain.layers import LayerBuffers, StepContext
from dptrain.losses import Loss
from dptrain.metrics.tracking import MeanTracker, Reading, Tally, Tracker
from dptrain.model import Architecture
from dptrain.optimizers import Optimizer
from dptrain.random import Purpose, stream
from dptrain.train.allreduce import AllReduce, SmallSums
from dptrain.train.measuring import MetricTracker
from dptrain.train.replica import Replica

# Losses of one step that are at hand at the same time.
_LOSSES = 64
# Bits of a step's number that the number of a forward pass within it leaves.
_STEP_BITS = 40

StepLog = Mapping[str, Any]


class StepData(tuple[Buffer | None, ...]):
    """This rank's part of a global batch, on the device: as in Keras a tuple (x, y), with weights (x, y, weights).

    Attributes:
        x: (rows, *input_shape) in the backend's dtype.
        y: (rows,) int64 labels, or (rows, ...) values in the backend's dtype; None where `fit` was given none.
        sample_weight: (rows,) in the backend's dtype, or None.
        rows: samples of this rank; 0 where there are fewer than ranks.
        first_row: place of the first of them in the global batch.
    """

    x: Buffer
    y: Buffer | None
    sample_weight: Buffer | None
    rows: int
    first_row: int

    def __new__(cls, x: Buffer, y: Buffer | None, sample_weight: Buffer | None, rows: int, first_row: int) -> Self:
        """Return the tuple, with what it holds by name too."""
        batch = super().__new__(cls, (x, y) if sample_weight is None else (x, y, sample_weight))
        batch.x, batch.y, batch.sample_weight, batch.rows, batch.first_row = x, y, sample_weight, rows, first_row
        return batch


class NoLoss(Loss):
    """Stands where `compile` was given no loss."""

    takes_labels = None

    def write(self, *arguments: Any) -> None:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("No loss to compute. Provide a `loss` argument in `compile()`.")


class StepOwner(Protocol):
    """The model whose methods the loop calls."""

    def train_step(self, data: StepData) -> StepLog:
        """Make one step."""
        ...

    def test_step(self, data: StepData) -> StepLog:
        """Evaluate one batch."""
        ...


class ExplicitReplica(Replica):
    """A replica with forward, backward and update as calls of their own.

    Args:
        backend: the device.
        architecture: the model.
        seed: of the initial parameters and of random layers.
    """

    def __init__(self, backend: Backend, architecture: Architecture, seed: int) -> None:
        super().__init__(backend, architecture, seed)
        # Inputs may come from anywhere, not from the batch op alone: all layers run.
        self._first, self._scale, self._offset = 0, 1.0, 0.0
        self._input_gradient: Buffer = None
        self._named: dict[str, Buffer] = {}
        self.measured: list[MetricTracker] = []
        self._noises: dict[str, Staging] = {}
        self._target_like: tuple[tuple[int, ...], Any] = ((), np.dtype(np.int64))
        self._has_weights = False
        self._all_reduce: AllReduce | None = None
        self._owner: StepOwner | None = None
        self._partners: tuple[ExplicitReplica, ...] = ()
        self._tally: Tally | None = None
        self._returned: StepLog | None = None
        self._pass: tuple[int, bool] | None = None  # rows of the last forward pass, and whether it was for training
        self._passes = 0
        self._context = StepContext()  # of the last forward pass
        self.first_row = 0  # place of this rank's first sample in the global batch, for random layers; a step sets it
        self._has_gradients = False
        self._rows_of_gradient = 0
        self._losses_made = 0
        self._draws = {False: 0, True: 0}
        self._testing = False

    # Setting up

    def compile(self, loss: Loss, optimizer: Optimizer, metrics: Any = None, weighted_metrics: Any = None) -> None:
        """Allocate as any replica, and say how each metric is tracked."""
        super().compile(loss, optimizer, metrics, weighted_metrics)
        self.measured = [MetricTracker(one) for one in self.metrics]

    def join(self, comm: Communicator, bucket_mb: float, direct: bool) -> None:
        """Sum gradients with these ranks from now on, see `AllReduce`."""
        if comm.size > 1 and self.reduce is StepContext.reduce:
            self.reduce = SmallSums(self.backend, comm, direct=direct)
        if comm.size > 1 and hasattr(self, "loss") and self._all_reduce is None:
            self._all_reduce = AllReduce(self.backend, comm, self._partial(0), bucket_mb, direct=direct)

    def drive(self, owner: StepOwner, trackers: Sequence[Tracker], partners: Sequence["ExplicitReplica"]) -> None:
        """Let the loop call the steps of `owner`, keep these trackers, and tell partners where a step is."""
        self._owner, self._partners = owner, (self, *partners)
        if self._tally is None:
            self._tally = Tally(self.backend, [MeanTracker("rows"), *trackers])

    def reserve(self, rows: int) -> None:
        """Allocate as any replica, and the gradient in the input."""
        before = self._capacity
        super().reserve(rows)
        if self._capacity > before:
            shape = (self._capacity, *self.architecture.input_shape)
            self._input_gradient = self._allocate(self.backend.empty, shape, name="gradients of the batch")

    def as_stored(
        self, x: npt.NDArray[Any], y: npt.NDArray[Any], weights: npt.NDArray[Any] | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return samples as a feed takes them; without a loss that says what targets are, integers are labels."""
        if isinstance(self.loss, NoLoss) or y.shape[1:] == (0,):
            targets = np.ascontiguousarray(y, np.int64 if y.dtype.kind in "iub" else self.backend.dtype)
            arrays: tuple[npt.NDArray[Any], ...] = (x.reshape(x.shape[0], flat_features(x.shape[1:])), targets)
            if weights is not None:
                arrays = (*arrays, np.ascontiguousarray(weights, self.backend.dtype))
        else:
            arrays = super().as_stored(x, y, weights)
        self._target_like, self._has_weights = (arrays[1].shape[1:], arrays[1].dtype), len(arrays) > 2
        return arrays

    # What the loop calls

    @property
    def tally(self) -> Tally:
        """The sums of the metrics."""
        assert self._tally is not None, "nobody drives this replica"
        return self._tally

    @property
    def reduction(self) -> Buffer:
        """What the loop sums over the ranks after a step."""
        return self.tally.step

    @property
    def totals(self) -> Buffer:
        """Sums and counts since `reset_totals`."""
        return self.tally.totals

    @totals.setter
    def totals(self, buffer: Buffer) -> None:
        """The replica's own are not used."""

    def forward_backward(
        self, source: RowSource, shards: Sequence[Shard], on_gradients_ready: Callable[[int], None] | None = None
    ) -> None:
        """Make the user's training step on the one shard of this rank."""
        assert self._owner is not None
        if len(shards) != 1:
            raise ConfigError(f"not supported: a train_step of your own with {len(shards)} shards a rank")
        shard = shards[0]
        batch = self._begin(source.rows(shard) if shard.rows else None, shard.first_row, testing=False)
        self._returned = _checked("train_step", self._owner.train_step(batch))
        self.tally.count(1, batch.rows)
        if on_gradients_ready is not None:
            on_gradients_ready(0)

    def update(self) -> None:
        """Add the metrics, which are summed over the ranks by now, to the totals."""
        self.tally.end_step()

    def evaluate_rows(self, rows: Rows) -> None:
        """Make the user's test step and add its metrics to the totals."""
        self._test(rows)

    def reset_totals(self) -> None:
        """Start new sums of the metrics."""
        self.tally.reset()
        self._returned = None
        for replica in self._partners:
            replica._draws[True] = 0

    def logs(self) -> dict[str, float]:
        """Return what the last step returned, with the metrics as they are now, summed over the ranks."""
        if self._returned is None:  # a rank that had nothing to evaluate has to know the names
            self._test(None)
        assert self._returned is not None
        totals = self.backend.download(self.totals)
        return {
            name: value.of(totals) if isinstance(value, Reading) else float(value)
            for name, value in self._returned.items()
        }

    def samples_seen(self) -> int:
        """Return the number of samples since `reset_totals`."""
        return int(self.backend.download(self.totals)[1])

    def _test(self, rows: Rows | None) -> None:
        assert self._owner is not None
        batch = self._begin(rows, 0, testing=True)
        passes = [replica._passes for replica in self._partners]
        self._returned = _checked("test_step", self._owner.test_step(batch))
        # Ranks may make different numbers of test steps, which must not move what random layers draw in training.
        for replica, count in zip(self._partners, passes, strict=True):
            replica._passes = count
        self.tally.count(1, batch.rows)
        self.tally.end_step()

    def _begin(self, rows: Rows | None, first_row: int, *, testing: bool) -> StepData:
        """Return the batch of a step, which all models that take part in it are told of."""
        self.tally.bind()
        for replica in self._partners:
            replica.first_row, replica._testing = first_row, testing
        return self._batch(rows, first_row)

    def _batch(self, rows: Rows | None, first_row: int) -> StepData:
        count = 0 if rows is None else len(rows.chosen)
        x = self.buffer("batch of the step", (count, *self.architecture.input_shape))
        shape, dtype, has_weights = *self._target_like, self._has_weights
        if rows is not None:  # training and validation may differ; a rank without rows goes by what came last
            shape, dtype, has_weights = rows.arrays[1].shape[1:], rows.arrays[1].dtype, len(rows.arrays) > 2
        y = None if 0 in shape else self.buffer("targets of the step", (count, *shape), dtype)
        weights = self.buffer("weights of the step", (count,)) if has_weights else None
        if rows is not None:
            self.backend.gather(rows.arrays[0], rows.chosen, 1.0, 0.0, x.reshape(count, -1))
            if y is not None:
                self.backend.gather_targets(rows.arrays[1], rows.chosen, y)
            if weights is not None:
                self.backend.gather_targets(rows.arrays[2], rows.chosen, weights)
        return StepData(x, y, weights, count, first_row)

    # What a step is made of

    def forward(self, x: Buffer, training: bool) -> Buffer:
        """Run all layers that the loss leaves to the model; see `Steps.forward`."""
        rows = len(x)
        if tuple(x.shape[1:]) != self.architecture.input_shape:
            raise ConfigError(
                f"forward: expected inputs of shape (rows, {', '.join(map(str, self.architecture.input_shape))}), "
                f"found {tuple(x.shape)}"
            )
        self.reserve(rows)
        self._pass = (rows, training)
        buffers = self._buffers(rows, 0)
        joining = training and any(layer.synchronizes_ranks for layer in self._layers)
        if joining and self._testing:
            raise ConfigError(
                "not supported: forward(x, training=True) in a test_step, which ranks call for different numbers of "
                "batches, of a model with layers that sum over the ranks, such as BatchNormalization"
            )
        # The passes of one step draw different numbers; those of the first are the built-in step's.
        step = (self.iterations if hasattr(self, "loss") else 0) + (self._passes << _STEP_BITS)
        self._context = StepContext(training, self.seed, step, self.first_row, self.reduce)
        if rows:
            self.backend.copy(x, buffers[0].x)
            self._forward(self._layers, buffers, self._context)
            self._passes += training
        elif joining:
            for layer, one in zip(self._layers, buffers, strict=True):
                if layer.synchronizes_ranks:
                    layer.forward(self.backend, one, self._context)
        return buffers[-1].y

    @property
    def _layers(self) -> Sequence[Any]:
        return self._training_layers if hasattr(self, "loss") else self.architecture.layers

    def loss_and_gradient(
        self, y: Buffer, y_pred: Buffer, weights: Buffer | None, training: bool
    ) -> tuple[Buffer, Buffer | None]:
        """Return the compiled loss and, in training, its gradient; see `Steps.compute_loss`."""
        self._require_compiled("compute_loss")
        loss = self.loss
        if isinstance(loss, NoLoss):
            loss.write()
        if loss.reduction not in ("sum_over_batch_size", "mean") or loss.ignored is not None:
            raise ConfigError(
                f"not supported: steps of your own with loss {loss.name!r}, reduction {loss.reduction!r}, which is not "
                "divided by the number of samples; override compute_loss"
            )
        if y is None:
            raise ConfigError(f"loss {loss.name!r} compares the outputs with targets, and `y` is missing")
        losses = self.buffer("losses", (_LOSSES,), np.float64)
        place = self._losses_made % _LOSSES
        self._losses_made += 1
        total = losses[place : place + 1]
        self.backend.fill(total, 0)
        rows = len(y_pred)
        self.reserve(rows)
        dy = self._buffers(rows, 0)[-1].dy if training else None
        if rows:
            tail = self.buffer("tail of a loss", (FIRST_STATE,))
            self.backend.fill(tail, 0)
            batch = self._samples(y_pred, y, weights)
            loss.compute(self.backend, batch, self._fused or loss.from_logits, dy, tail)
            self.backend.sum(tail[LOSS : LOSS + 1], total)
            self._regularize(tail[DIVISOR : ROWS + 1], None, total)
        return total, dy

    def measure(self, y: Buffer, y_pred: Buffer, weights: Buffer | None) -> None:
        """Update the compiled metrics; see `Steps.compute_metrics`."""
        if len(y_pred) == 0:
            return
        self.reserve(len(y_pred))
        activation = self.loss.fused_activation if self._fused else None
        outputs: Buffer | None = y_pred if activation is None else None
        for tracker in self.measured:
            metric, seen = tracker.measured.metric, y_pred
            if not metric.takes_outputs_before(activation):
                if outputs is None:
                    outputs = self.buffer("outputs of the step", tuple(y_pred.shape))
                    self.backend.activation_forward(y_pred, str(activation), outputs)
                seen = outputs
            batch = self._samples(seen, y, weights if tracker.measured.weighted else None)
            tracker.update(batch, self.buffer("state of a metric", (metric.size,)))

    def _samples(self, y_pred: Buffer, y: Buffer, weights: Buffer | None) -> metrics.Batch:
        def scratch(name: str, shape: tuple[int, ...] = (), dtype: npt.DTypeLike | None = None) -> Buffer:
            return self._kept(len(y_pred), name, shape, dtype or self.backend.dtype)

        return metrics.Batch(y_pred, y, weights, scratch)

    def backward(self, dy: Buffer, *, input_gradient: bool, frozen: bool) -> Buffer | None:
        """Run all layers backwards; see `Steps.backward`."""
        self._require_compiled("backward")
        if self._pass is None or not self._pass[1]:
            raise ConfigError("backward() needs a forward(x, training=True) before it, each time")
        rows, _ = self._pass
        self._pass = None
        if tuple(dy.shape) != (rows, *self.architecture.output_shape):
            raise ConfigError(
                f"backward: expected the gradient in the output, {(rows, *self.architecture.output_shape)}, found "
                f"{tuple(dy.shape)}"
            )
        self._rows_of_gradient = rows
        aside = frozen or self._has_gradients
        buffers = self._buffers(rows, 1 if aside else 0)
        last = 0 if input_gradient else self._first_trained
        if rows == 0:
            for position in range(len(buffers) - 1, last - 1, -1):
                if self._layers[position].synchronizes_ranks:
                    self._layers[position].backward(self.backend, buffers[position], self._context)
            return buffers[0].dx if input_gradient else None
        if dy is not buffers[-1].dy:
            self.backend.copy(dy, buffers[-1].dy)
        for position in range(len(buffers) - 1, last - 1, -1):
            layer, one = self._layers[position], buffers[position]
            if not layer.is_view:
                kept = one if input_gradient or position > self._first_trained else replace(one, dx=None)
                layer.backward(self.backend, kept, self._context)
        if not frozen:
            size = self.architecture.layout.size
            if self._has_gradients:
                self.backend.add(self._partial(1)[:size], self._partial(0)[:size])
            self._has_gradients = True
        return buffers[0].dx if input_gradient else None

    def gradients(self) -> dict[str, Buffer]:
        """Return the gradients that `apply_gradients` will sum over the ranks, by name; zero before `backward`."""
        self._require_compiled("gradients")
        size = self.architecture.layout.size
        if not self._has_gradients:
            self.backend.fill(self._partial(0)[:size], 0)
            self._has_gradients = True
        return self.architecture.layout.gradient_views(self._partial(0))

    def apply_gradients(self, rows: float | None) -> None:
        """Sum over the ranks, divide, update; see `Steps.apply_gradients`."""
        self.gradients()
        size = self.architecture.layout.size
        reduction = self._partial(0)
        gradients, tail = reduction[:size], reduction[size:]
        self.backend.fill(tail, 0)
        divisor_rows = tail[DIVISOR : ROWS + 1]
        self.backend.fill(divisor_rows, self._rows_of_gradient if rows is None else rows)
        if self._all_reduce is not None:
            self._all_reduce.on_gradients_ready(0)
            self._all_reduce.finish()
        # The penalties are in the loss already, see `loss_and_gradient`.
        self._regularize(divisor_rows, gradients, self.buffer("penalties", (1,), np.float64))
        self._passes = 0
        self._updater.apply(self.params[:size], gradients, tail[DIVISOR : DIVISOR + 1])
        self._has_gradients = False
        self._rows_of_gradient = 0

    def buffer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None) -> Buffer:
        """Return memory that is kept under a name; see `Steps.buffer`."""
        kind = self.backend.dtype if dtype is None else np.dtype(dtype)
        kept = self._named.get(name)
        if kept is None or kept.dtype != kind or tuple(kept.shape[1:]) != shape[1:] or len(kept) < shape[0]:
            rows = max(shape[0], self._capacity)
            kept = self._named[name] = self._allocate(self.backend.zeros, (rows, *shape[1:]), kind, name=name)
        return kept[: shape[0]]

    def random_normal(self, name: str, rows: int, features: int, first_row: int) -> Buffer:
        """Return standard normal numbers; see `Steps.random_normal`."""
        draw = self._draws[self._testing]
        self._draws[self._testing] += 1
        staging = self._noises.get(name)
        if staging is None or len(staging.host) < rows or staging.host.shape[1] != features:
            shape = (max(rows, self._capacity), features)
            staging = self._noises[name] = self.backend.staging(shape, self.backend.dtype)
        staging.reuse()
        staging.host[:rows] = normal(self.seed, (int(self._testing), draw), rows, features, first_row)
        staging.release()
        staging.send(rows)
        staging.arrive()
        return staging.device[:rows]

    # Inside

    def _require_compiled(self, method: str) -> None:
        if not hasattr(self, "loss"):
            raise ConfigError(f"You must call `compile()` before calling `{method}()`.")

    def _cut_buffers(self, rows: int, depth: int) -> list[LayerBuffers]:
        """Cut as any replica, with a gradient in the input of every layer, the first ones included."""
        result = super()._cut_buffers(rows, depth)
        shapes = self.architecture.input_shapes
        dx = self._input_gradient[:rows]
        for position, one in enumerate(result):
            one.dx = dx.reshape(rows, *shapes[position])
            if self.architecture.layers[position].is_view:
                one.dy = one.dx.reshape(rows, *self.architecture.output_shapes[position])
            dx = one.dy
        return result


def normal(seed: int, position: tuple[int, ...], rows: int, features: int, first_row: int) -> npt.NDArray[np.float64]:
    """Return (rows, features) standard normal numbers, a function of (seed, position, place in the global batch).

    Source: G. Box and M. Muller, "A note on the generation of random normal deviates", 1958, of Philox's numbers.
    """
    blocks = -(-features // 4)
    generator = stream(seed, Purpose.NOISE, *position, offset=first_row * blocks).bit_generator
    bits: npt.NDArray[np.uint64] = np.asarray(generator.random_raw(rows * blocks * 4), np.uint64)
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53  # inside (0, 1)
    radius, angle = np.sqrt(-2 * np.log(uniform[0::2])), 2 * np.pi * uniform[1::2]
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return both.reshape(rows, blocks * 4)[:, :features]


def _checked(step: str, returned: Any) -> StepLog:
    """Return a step's logs.

    Raises:
        ConfigError: it returned something else.
    """
    if isinstance(returned, Mapping):
        return returned
    raise ConfigError(f"{step}: expected a dictionary of logs to be returned, found {type(returned).__name__}")
