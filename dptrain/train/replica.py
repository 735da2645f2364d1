"""One model on one device: all its memory, and the steps that run on it.

Everything is allocated when the batch size is known; a step allocates nothing. The flat `reduction` buffer is what
ranks exchange: the parameters' gradients, then the tail, which is what gradients and loss are divided by, the number of
rows, the loss's sum, and then each metric's state.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import DIVISOR, FIRST_STATE, LOSS, ROWS, Backend, Buffer, amount, flat_features
from dptrain.backend.transfers import SAMPLES
from dptrain.batches.feed import Rows, RowSource
from dptrain.batches.sampling import Shard
from dptrain.errors import ConfigError, DeviceError, DeviceMemoryError
from dptrain.layers import Layer, LayerBuffers, Rescaling, StepContext
from dptrain.losses import Loss
from dptrain.metrics import Batch, Mean, resolve
from dptrain.metrics.base import ratio
from dptrain.model import Architecture
from dptrain.optimizers import Optimizer, Updater
from dptrain.params import ALIGNMENT


class Replica:
    """Parameters of a model on a device, and what it takes to train and run it there.

    Args:
        backend: the device.
        architecture: the model.
        seed: of the initial parameters and of random layers.

    Attributes:
        params: flat parameters.
        reduce: replaces a small buffer on the device by its sum over the ranks; set by who knows the ranks.
        slots: the optimizer's flat buffers by name.
    """

    def __init__(self, backend: Backend, architecture: Architecture, seed: int) -> None:
        self.backend = backend
        self.architecture = architecture
        self.seed = seed
        self._first, self._scale, self._offset = _absorbed_by_batch_op(architecture.layers)
        # Bytes that the model needs besides what grows with the batch, by the buffer's name.
        self._model_bytes = {"parameters": architecture.layout.full_size * backend.dtype.itemsize}
        self.params: Buffer = self._allocate(backend.empty, (architecture.layout.full_size,), name="parameters")
        backend.write(self.params, architecture.layout.initial(seed, backend.dtype))
        self.slots: dict[str, Buffer] = {}
        self._capacity = 0
        self._views: dict[tuple[int, int], list[LayerBuffers]] = {}
        self._beside: dict[tuple[str, tuple[int, ...], npt.DTypeLike | None], Buffer] = {}
        self.reduce: Callable[[Buffer], None] = StepContext.reduce
        trained = architecture.layout.trained
        offsets = [
            [entry.offset for entry in trained if entry.name.startswith(f"{layer.name}/")]
            for layer in architecture.layers
        ]
        self._first_element = [min(one, default=0) for one in offsets]
        # Backward passes through this layer and all above it.
        self._first_trained = next((position for position, one in enumerate(offsets) if one), len(offsets))
        self._penalized = [(entry, entry.regularizer) for entry in trained if entry.regularizer is not None]
        self._fixed = [
            {
                name: self._allocate(backend.zeros, shape, dtype, name="statistics")
                for name, (shape, dtype) in layer.fixed_shapes(input_shape).items()
            }
            for layer, input_shape in zip(architecture.layers, architecture.input_shapes, strict=True)
        ]

    # Setting up

    def compile(self, loss: Loss, optimizer: Optimizer, metrics: Any = None, weighted_metrics: Any = None) -> None:
        """Allocate what training needs besides activations, and start the optimizer afresh.

        Raises:
            ConfigError: a metric or the loss does not fit the model (see `metrics.resolve`).
        """
        shape = self.architecture.output_shape
        if len(shape) != 1 and (loss.takes_labels or loss.reduction not in ("sum_over_batch_size", "mean")):
            raise ConfigError(
                f"not supported: loss {loss.name!r} with reduction {loss.reduction!r} on outputs of shape {shape}"
            )
        self.loss, self.optimizer = loss, optimizer
        self.metrics = resolve(metrics, weighted_metrics, loss.takes_labels, shape)
        self._training_layers, self._fused = self.architecture.layers_for(loss)
        ends = np.cumsum([FIRST_STATE, *(one.metric.size for one in self.metrics)]).tolist()
        self._states = [slice(begin, end) for begin, end in pairwise(ends)]
        self._tail_size = ends[-1]
        self._partials: list[Buffer] = []
        zeros, size = self.backend.zeros, self.architecture.layout.size
        slots, scratch = optimizer.all_slots, [f"scratch {number}" for number in range(optimizer.scratch)]
        names = ("gradients", *(f"optimizer's {slot}" for slot in (*slots, *scratch)))
        self._model_bytes |= dict.fromkeys(names, size * self.backend.dtype.itemsize)
        flat = {one: self._allocate(zeros, (size,), name=f"optimizer's {one}") for one in (*slots, *scratch)}
        self.slots = {slot: flat[slot] for slot in slots}
        entries = self.architecture.layout.trained
        self._updater = Updater(self.backend, optimizer, entries, self.slots, [flat[one] for one in scratch])
        self.totals: Buffer = self.backend.zeros((self._tail_size,), np.float64, "sums of metrics")
        self._views.clear()

    @property
    def iterations(self) -> int:
        """Batches whose gradients the optimizer has taken, which number the steps of random layers and schedules."""
        return self.optimizer.steps

    @iterations.setter
    def iterations(self, steps: int) -> None:
        self.optimizer.steps = steps

    @property
    def reduction(self) -> Buffer:
        """Gradients and tail of this rank's part of the global batch, to be summed over ranks."""
        return self._partial(0)

    @property
    def nbytes(self) -> int:
        """The memory that it takes on its device, samples and what ops keep for themselves aside."""
        by_row = sum(map(flat_features, self._row_shapes().values())) * self.backend.dtype.itemsize
        return sum(self._model_bytes.values()) + self._capacity * by_row

    def release(self) -> None:
        """Give all memory back, for models that are trained by the hundred; the replica cannot be used afterwards."""
        vars(self).clear()

    def reserve(self, rows: int) -> None:
        """Allocate inputs and activations for batches of up to `rows` samples."""
        rows = max(rows, 1)
        if rows <= self._capacity:
            return
        memory = {
            name: self._allocate(self.backend.empty, (rows, *shape), name=name, rows=rows)
            for name, shape in self._row_shapes().items()
        }
        self._capacity = rows
        self._views.clear()
        self._input = memory["batch"]
        self._outputs: list[Buffer] = []
        self._gradients: list[Buffer] = []
        self._scratch: list[dict[str, Buffer]] = []
        for position, layer in enumerate(self.architecture.layers):
            self._outputs.append(memory.get(f"activations of {layer.name}"))
            self._gradients.append(memory.get(f"gradients of {layer.name}"))
            wanted = layer.scratch_shapes(self.architecture.input_shapes[position])
            self._scratch.append({one: memory[f"{one} of {layer.name}"] for one in wanted})

    def _row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return what a row of a batch needs, by the buffer's name: the shapes of all that grows with the batch."""
        architecture = self.architecture
        shapes = {"batch": architecture.input_shapes[self._first]}
        for position, layer in enumerate(architecture.layers):
            if position >= self._first and not layer.is_view:
                shapes[f"activations of {layer.name}"] = architecture.output_shapes[position]
                shapes[f"gradients of {layer.name}"] = architecture.output_shapes[position]
            for name, shape in layer.scratch_shapes(architecture.input_shapes[position]).items():
                shapes[f"{name} of {layer.name}"] = shape
        return shapes

    def _allocate(self, make: Callable[..., Buffer], *arguments: Any, name: str, rows: int | None = None) -> Buffer:
        """Return a new buffer of the backend.

        Raises:
            DeviceError: too little memory; says what would fit. `rows` is the batch, where one is being reserved.
        """
        try:
            return make(*arguments, name=name)
        except DeviceMemoryError as error:
            raise DeviceError(f"{error}; {self.what_fits(error, rows)}") from error

    def what_fits(self, short: DeviceMemoryError, rows: int | None = None) -> str:
        """Say how many rows a batch may have, or that nothing helps but a smaller model or data set."""
        model, by_row = self._model_bytes, self._row_shapes()
        # Drivers round allocations up, and some ops need scratch.
        usable = int(0.95 * (sum(short.buffers.values()) + short.free))
        needed = sum(model.values())
        if needed > usable:
            return f"the model alone needs {amount(needed)} ({', '.join(model)}): make it smaller"
        others = {name: size for name, size in short.buffers.items() if name not in model and name not in by_row}
        if short.name not in model and short.name not in by_row:
            others[short.name] = others.get(short.name, 0) + short.asked
        # The targets of a row are a label of 8 bytes, or values such as the outputs; loss and metrics some numbers.
        row = (sum(map(flat_features, by_row.values())) + 8) * self.backend.dtype.itemsize
        if self.backend.room_for_data() is not None:
            # Samples that do not fit are streamed: two chunks of at least a batch, of a byte or more a feature.
            others.pop(SAMPLES, None)
            row += 2 * flat_features(by_row["batch"])
        row += max(8, flat_features(self.architecture.output_shape) * self.backend.dtype.itemsize)
        fitting = (usable - needed - sum(others.values())) // row
        if fitting < 1:
            beside = (
                ", ".join(f"{name} {amount(size)}" for name, size in sorted(others.items(), key=_by_size))
                or "nothing else"
            )
            return (
                f"beside the model ({amount(needed)}) and {beside} not one row fits: use less data or a smaller model"
            )
        instead = "" if rows is None else f" instead of {rows}{'' if others else ', the data set not counted'}"
        return f"a batch of about {fitting} rows a rank would fit{instead}"

    def as_stored(
        self, x: npt.NDArray[Any], y: npt.NDArray[Any], weights: npt.NDArray[Any] | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return samples as a feed takes them: x (rows, features) in its own dtype, y as the loss wants it.

        Args:
            x: (rows, ...).
            y: (rows,) or (rows, 1) labels, or (rows, *output_shape) values, for one output (rows,) as well.
            weights: (rows,) or (rows, 1) sample weights, of samples whose output is a vector; None for 1, and then they
                are not among what is returned.
        """
        stored = np.int64 if self.loss.takes_labels else self.backend.dtype
        shape = () if self.loss.takes_labels else self.architecture.output_shape
        arrays = (
            x.reshape(x.shape[0], flat_features(x.shape[1:])),
            np.ascontiguousarray(y, stored).reshape(len(y), *shape),
        )
        if weights is None:
            return arrays
        return (*arrays, np.ascontiguousarray(weights.reshape(len(x)), self.backend.dtype))

    def state(self) -> dict[str, Buffer]:
        """Return the buffers that, with `iterations`, say where a training stands, by name."""
        slots = {f"optimizer/{name}": buffer for name, buffer in self.slots.items()}
        return {"parameters": self.params, **slots, "totals": self.totals}

    # One step

    def require_shards(self, count: int) -> None:
        """Check that the model can be trained with that many shards of a batch on this rank.

        Raises:
            ConfigError: a layer needs the whole batch at once.
        """
        joining = next((layer for layer in self.architecture.layers if layer.synchronizes_ranks), None)
        if count > 1 and joining is not None:
            raise ConfigError(
                f"layer {joining.name!r} ({type(joining).__name__}) needs all samples of a batch at once: {count} "
                "shards a rank are not supported; leave train.shards_per_batch out, or make it the number of ranks"
            )

    def forward_backward(
        self, source: RowSource, shards: Sequence[Shard], on_gradients_ready: Callable[[int], None] | None = None
    ) -> None:
        """Compute the gradients, weights, loss and metrics of this rank's shards of one global batch.

        The shards' results are added in a binary tree whose shape depends on their number alone, so that a rank that
        holds a whole subtree of a batch's shards gives that subtree's bits whatever the world size.

        Args:
            source: of the samples.
            shards: at least one; `reduction` holds their sum afterwards.
            on_gradients_ready: called, with falling element numbers down to 0, when ops that are queued complete
                `reduction` from that element to its end.
        """
        on_gradients_ready = on_gradients_ready or (lambda element: None)
        if len(shards) == 1:
            self._shard_gradients(source, shards[0], 0, on_gradients_ready)
            on_gradients_ready(0)
            return
        depth = 0
        for number, shard in enumerate(shards, start=1):
            self._shard_gradients(source, shard, depth, lambda element: None)
            depth += 1
            while number % 2 == 0:
                depth = self._merge(depth)
                number //= 2
        while depth > 1:
            depth = self._merge(depth)
        on_gradients_ready(0)

    def update(self) -> None:
        """Apply the optimizer to the summed gradients; the division by the tail's divisor happens in there.

        Call it after `reduction` has been summed over the ranks. Also adds the global loss and metrics to `totals`.
        """
        size = self.architecture.layout.size
        tail = self.reduction[size:]
        divisor_rows = tail[DIVISOR : ROWS + 1]
        gradients = self.reduction[:size]
        self.backend.add_totals(tail[: self._tail_size], self.totals)
        self._regularize(divisor_rows, gradients, self.totals[LOSS : LOSS + 1])
        self._updater.apply(self.params[:size], gradients, tail[DIVISOR : DIVISOR + 1])

    def evaluate_rows(self, rows: Rows) -> None:
        """Add loss and metrics of the given samples, taken as one batch, to `totals`.

        Where the loss depends on how samples are cut into batches (`Loss.depends_on_batches`), an evaluation has Keras'
        result only if each of its batches is given whole, to one rank.
        """
        count = len(rows.chosen)
        tail = self.reduction[self.architecture.layout.size :]
        self.backend.fill(tail, 0)
        buffers = self._buffers(count, 0)
        self._gather(rows.arrays[0], rows.chosen)
        self._forward(self._training_layers, buffers, StepContext())
        self._score(buffers[-1].y, rows, None, tail)
        self.backend.add_totals(tail[: self._tail_size], self.totals)
        self._regularize(tail[DIVISOR : ROWS + 1], None, self.totals[LOSS : LOSS + 1])

    def predict_rows(self, rows: Rows) -> npt.NDArray[Any]:
        """Return the model's outputs for the given samples, (rows, *output_shape) on the host."""
        buffers = self._buffers(len(rows.chosen), 0)
        self._gather(rows.arrays[0], rows.chosen)
        self._forward(self.architecture.layers, buffers, StepContext())
        return self.backend.download(buffers[-1].y)

    # Totals of loss and metrics

    def reset_totals(self) -> None:
        """Start new sums of loss and metrics."""
        self.backend.fill(self.totals, 0)

    def logs(self) -> dict[str, float]:
        """Return the loss and metrics since `reset_totals`, under Keras' log names; 0 of no samples."""
        totals = self.backend.download(self.totals)
        rows = float(totals[ROWS])
        logs = {"loss": ratio(totals[LOSS], rows)}
        for one, place in zip(self.metrics, self._states, strict=True):
            logs[one.key] = one.metric.result(totals[place], rows)
        return logs

    def samples_seen(self) -> int:
        """Return the number of samples since `reset_totals`."""
        return int(self.backend.download(self.totals)[ROWS])

    # Divergence

    def nonfinite_parameter(self) -> tuple[str, int] | None:
        """Return the first parameter with values that are NaN or infinite, and how many; None if all are finite.

        Reads one number back where all is well.
        """
        if not self._count_nonfinite(self.params):
            return None
        found = (
            (entry.name, self._count_nonfinite(entry.view(self.params))) for entry in self.architecture.layout.entries
        )
        return next(((name, count) for name, count in found if count), None)

    def _count_nonfinite(self, buffer: Buffer) -> int:
        count = self.backend.zeros((1,), np.float64)
        self.backend.count_nonfinite(buffer, count)
        return int(self.backend.download(count)[0])

    # Inside a step

    def _shard_gradients(
        self, source: RowSource, shard: Shard, depth: int, on_gradients_ready: Callable[[int], None]
    ) -> None:
        reduction = self._partial(depth)
        size = self.architecture.layout.size
        context = StepContext(True, self.seed, self.iterations, shard.first_row, self.reduce)
        if shard.rows == 0:
            self.backend.fill(reduction, 0)
            self._join_ranks(depth, context)
            return
        tail = reduction[size:]
        self.backend.fill(tail, 0)
        rows = source.rows(shard)
        buffers = self._buffers(shard.rows, depth)
        self._gather(rows.arrays[0], rows.chosen)
        self._forward(self._training_layers, buffers, context)
        self._score(buffers[-1].y, rows, buffers[-1].dy, tail)
        on_gradients_ready(size)
        for position in range(len(buffers) - 1, self._first_trained - 1, -1):
            layer = self._training_layers[position]
            if not layer.is_view:
                layer.backward(self.backend, buffers[position], context)
            if buffers[position].grads:
                on_gradients_ready(self._first_element[position])

    def _join_ranks(self, depth: int, context: StepContext) -> None:
        """Run the layers that sum over the ranks, in the order of the ranks that have rows, on a batch without any."""
        joining = {position for position, layer in enumerate(self._training_layers) if layer.synchronizes_ranks}
        if not joining:
            return
        buffers = self._buffers(0, depth)
        for position in sorted(joining):
            self._training_layers[position].forward(self.backend, buffers[position], context)
        for position in sorted(joining, reverse=True):
            if position >= self._first_trained:
                self._training_layers[position].backward(self.backend, buffers[position], context)

    def _regularize(self, weight: Buffer, gradients: Buffer | None, total: Buffer) -> None:
        """Add the regularizers' penalties, times the batch's weight, to the total loss and to the summed gradients.

        Whoever divides by the weight then has the mean loss plus the penalty, and its gradient.
        """
        for entry, regularizer in self._penalized:
            self.backend.regularize(
                entry.view(self.params),
                None if gradients is None else entry.view(gradients),
                weight,
                regularizer.l1,
                regularizer.l2,
                total,
            )

    def _merge(self, depth: int) -> int:
        """Add the top partial sum to the one below it; return the new depth."""
        self.backend.add(self._partial(depth - 1), self._partial(depth - 2))
        return depth - 1

    def _gather(self, x: Buffer, rows: Buffer) -> None:
        batch = self._input[: len(rows)]
        self.backend.gather(x, rows, self._scale, self._offset, batch.reshape(len(rows), -1))

    def _gather_beside(self, name: str, stored: Buffer, rows: Buffer) -> Buffer:
        """Return what belongs to the samples besides their features."""
        gathered = self._kept(len(rows), name, tuple(stored.shape[1:]), stored.dtype)
        self.backend.gather_targets(stored, rows, gathered)
        return gathered

    def _forward(self, layers: Sequence[Layer], buffers: list[LayerBuffers], context: StepContext) -> None:
        for layer, one in zip(layers[self._first :], buffers[self._first :], strict=True):
            if not layer.is_view:
                layer.forward(self.backend, one, context)

    def _score(self, y: Buffer, samples: Rows, dy: Buffer | None, tail: Buffer) -> None:
        """Write divisor, rows, loss and the metrics' states into a tail of zeros, and the loss's gradient into dy."""
        ops, rows, chosen = self.backend, len(samples.chosen), samples.chosen
        target = self._gather_beside("targets of the batch", samples.arrays[1], chosen)
        weights = None
        if len(samples.arrays) > 2:
            weights = self._gather_beside("weights of the batch", samples.arrays[2], chosen)
        scratch = partial(self._kept, rows)
        batch = Batch(y, target, weights, scratch)
        activation = self.loss.fused_activation if self._fused else None
        outputs: Buffer | None = y if activation is None else None
        # The loss finds the values of one metric that it knows of, the others have an op of their own.
        metric_sum = None
        # Metrics first: the loss may write the gradient over memory that a view layer shares with y.
        for one, place in zip(self.metrics, self._states, strict=True):
            metric, seen = one.metric, y
            mine = weights if one.weighted else None
            if not metric.takes_outputs_before(activation):
                if outputs is None:
                    outputs = scratch("outputs of the batch", tuple(y.shape[1:]))
                    ops.activation_forward(y, str(activation), outputs)
                seen = outputs
            if metric_sum is None and type(metric) is self.loss.fused_metric and isinstance(metric, Mean):
                metric_sum = metric.row_sum(scratch("values that the loss finds"), mine, tail[place])
            else:
                metric.update(ops, Batch(seen, target, mine, scratch), tail[place])
        self.loss.compute(ops, batch, self._fused or self.loss.from_logits, dy, tail, metric_sum)

    # Memory, cut to the rows at hand

    def _partial(self, depth: int) -> Buffer:
        """Return the buffer of gradients and tail at a depth of the tree; depth 0 is `reduction`."""
        while len(self._partials) <= depth:
            tail = -(-self._tail_size // ALIGNMENT) * ALIGNMENT
            size = self.architecture.layout.size + tail
            self._partials.append(self._allocate(self.backend.zeros, (size,), name="gradients"))
        return self._partials[depth]

    def _kept(self, rows: int, name: str, shape: tuple[int, ...] = (), dtype: npt.DTypeLike | None = None) -> Buffer:
        """Return memory of (rows, *shape) that is allocated at its first use and kept."""
        key = (name, shape, dtype)
        kept = self._beside.get(key)
        if kept is None or len(kept) < rows:
            kept = self._allocate(self.backend.empty, (self._capacity, *shape), dtype, name=name)
            self._beside[key] = kept
        return kept[:rows]

    def _buffers(self, rows: int, depth: int) -> list[LayerBuffers]:
        """Return every layer's memory for a batch of that many rows, made at the first use of (rows, depth)."""
        key = (rows, depth)
        if key not in self._views:
            self._views[key] = self._cut_buffers(rows, depth)
        return self._views[key]

    def _cut_buffers(self, rows: int, depth: int) -> list[LayerBuffers]:
        architecture = self.architecture
        params = architecture.layout.views(self.params)
        grads = architecture.layout.gradient_views(self._partial(depth)) if hasattr(self, "loss") else {}
        result: list[LayerBuffers] = []
        x, dx = self._input[:rows], None
        trained_below = False
        for position, layer in enumerate(architecture.layers):
            x = x.reshape(rows, *architecture.input_shapes[position])
            dx = None if dx is None else dx.reshape(rows, *architecture.input_shapes[position])
            prefix = f"{layer.name}/"
            output, gradient = self._outputs[position], self._gradients[position]
            one = LayerBuffers(
                x=x,
                y=x if output is None else output[:rows],
                dx=dx if trained_below else None,
                dy=dx if gradient is None else gradient[:rows],
                params={name.removeprefix(prefix): v for name, v in params.items() if name.startswith(prefix)},
                grads={name.removeprefix(prefix): v for name, v in grads.items() if name.startswith(prefix)},
                scratch={name: buffer[:rows] for name, buffer in self._scratch[position].items()},
                fixed=self._fixed[position],
                position=position,
            )
            result.append(one)
            x, dx = one.y, one.dy
            trained_below = trained_below or bool(one.grads)
        last = result[-1]
        shape = (rows, *architecture.output_shape)
        last.y = last.y.reshape(shape)
        last.dy = None if last.dy is None else last.dy.reshape(shape)
        return result


def _by_size(buffer: tuple[str, int]) -> int:
    return -buffer[1]


def _absorbed_by_batch_op(layers: Sequence[Layer]) -> tuple[int, float, float]:
    """Return how many leading layers the batch op replaces, with the scale and offset that it applies instead."""
    first = 0
    while first < len(layers) and layers[first].is_view:
        first += 1
    # The batch op writes the input of the layer behind it: there must be one.
    if first + 1 < len(layers) and isinstance(layer := layers[first], Rescaling):
        return first + 1, layer.scale, layer.offset
    return 0, 1.0, 0.0
