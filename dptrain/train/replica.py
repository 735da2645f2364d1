"""One model on one device: all its memory, and the steps that run on it.

Everything is allocated when the batch size is known; a step allocates nothing. The flat `reduction` buffer is what
ranks exchange: the parameters' gradients, then the tail, whose first element is the sum of the sample weights and
whose others are the sums of loss and metrics.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import Backend, Buffer, amount, flat_features
from dptrain.backend.transfers import SAMPLES
from dptrain.data.sampling import Shard
from dptrain.errors import DeviceError, DeviceMemoryError
from dptrain.layers import Layer, LayerBuffers, Rescaling, StepContext
from dptrain.losses import Loss
from dptrain.metrics import Metric
from dptrain.model import Architecture
from dptrain.optimizers import Optimizer
from dptrain.params import ALIGNMENT
from dptrain.train.feed import Rows, RowSource

# Elements of the tail; what follows are loss and metrics.
_WEIGHT, _LOSS, _FIRST_METRIC = 0, 1, 2


class Replica:
    """Parameters of a model on a device, and what it takes to train and run it there.

    Args:
        backend: the device.
        architecture: the model.
        seed: of the initial parameters and of random layers.

    Attributes:
        params: flat parameters.
        slots: the optimizer's flat buffers by name.
        iterations: updates made.
    """

    def __init__(self, backend: Backend, architecture: Architecture, seed: int) -> None:
        self.backend = backend
        self.architecture = architecture
        self.seed = seed
        self._first, self._scale, self._offset = _absorbed_by_batch_op(architecture.layers)
        # Bytes that the model needs besides what grows with the batch, by the buffer's name.
        self._model_bytes = {"parameters": architecture.layout.size * backend.dtype.itemsize}
        self.params: Buffer = self._allocate(backend.empty, (architecture.layout.size,), name="parameters")
        backend.write(self.params, architecture.layout.initial(seed, backend.dtype))
        self.slots: dict[str, Buffer] = {}
        self.iterations = 0
        self._capacity = 0
        self._views: dict[tuple[int, int], list[LayerBuffers]] = {}
        self._first_element = [
            min((e.offset for e in architecture.layout.entries if e.name.startswith(f"{layer.name}/")), default=0)
            for layer in architecture.layers
        ]

    # Setting up

    def compile(self, loss: Loss, optimizer: Optimizer, metrics: Sequence[Metric]) -> None:
        """Allocate what training needs besides activations, and start the optimizer afresh.

        Raises:
            ConfigError: the loss does not fit the model's last layer.
        """
        self.loss, self.optimizer, self.metrics = loss, optimizer, tuple(metrics)
        self._training_layers = self.architecture.layers_for(loss)
        self._tail_size = _FIRST_METRIC + len(self.metrics)
        self._partials: list[Buffer] = []
        zeros, size = self.backend.zeros, self.architecture.layout.size
        names = ("gradients", *(f"optimizer's {slot}" for slot in optimizer.slots))
        self._model_bytes |= dict.fromkeys(names, size * self.backend.dtype.itemsize)
        self.slots = {slot: self._allocate(zeros, (size,), name=f"optimizer's {slot}") for slot in optimizer.slots}
        self.totals: Buffer = self.backend.zeros((self._tail_size,), np.float64, "sums of metrics")
        self.iterations = 0
        self._views.clear()

    @property
    def reduction(self) -> Buffer:
        """Gradients and tail of this rank's part of the global batch, to be summed over ranks."""
        return self._partial(0)

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
        # The targets of a row are a label of 8 bytes, or values such as the outputs.
        row = sum(map(flat_features, by_row.values())) * self.backend.dtype.itemsize
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

    def as_stored(self, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return samples as a feed takes them: x (rows, features) in its own dtype, y as the loss wants it."""
        stored = np.int64 if self.loss.takes_labels else self.backend.dtype
        return x.reshape(x.shape[0], flat_features(x.shape[1:])), np.ascontiguousarray(y, stored)

    def state(self) -> dict[str, Buffer]:
        """Return the buffers that, with `iterations`, say where a training stands, by name."""
        slots = {f"optimizer/{name}": buffer for name, buffer in self.slots.items()}
        return {"parameters": self.params, **slots, "totals": self.totals}

    # One step

    def forward_backward(
        self, source: RowSource, shards: Sequence[Shard], complete_from: Callable[[int], None] | None = None
    ) -> None:
        """Compute the gradients, weights, loss and metrics of this rank's shards of one global batch.

        The shards' results are added in a binary tree whose shape depends on their number alone, so that a rank that
        holds a whole subtree of a batch's shards gives that subtree's bits whatever the world size.

        Args:
            source: of the samples.
            shards: at least one; `reduction` holds their sum afterwards.
            complete_from: called, with falling element numbers down to 0, when ops that are queued complete
                `reduction` from that element to its end.
        """
        tell = complete_from or (lambda element: None)
        if len(shards) == 1:
            self._shard_gradients(source, shards[0], 0, tell)
            tell(0)
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
        tell(0)

    def update(self) -> None:
        """Apply the optimizer to the summed gradients; the division by the summed weight happens in there.

        Call it after `reduction` has been summed over the ranks. Also adds the global loss and metrics to `totals`.
        """
        size = self.architecture.layout.size
        tail = self.reduction[size:]
        self.iterations += 1
        self.backend.add(tail[: self._tail_size], self.totals)
        weight = tail[_WEIGHT : _WEIGHT + 1]
        self.optimizer.apply(self.backend, self.params, self.reduction[:size], self.slots, weight, self.iterations)

    def evaluate_rows(self, rows: Rows) -> None:
        """Add loss and metrics of the given samples to `totals`."""
        x, y = rows.arrays
        count = len(rows.chosen)
        tail = self.reduction[self.architecture.layout.size :]
        self.backend.fill(tail, 0)
        self.backend.fill(tail[_WEIGHT : _WEIGHT + 1], count)
        buffers = self._buffers(count, 0)
        self._gather(x, rows.chosen)
        self._forward(self._training_layers, buffers, StepContext())
        self._score(buffers[-1].y, self._gather_targets(y, rows.chosen), None, tail)
        self.backend.add(tail[: self._tail_size], self.totals)

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
        """Return the mean loss and metrics since `reset_totals`, under Keras' log names."""
        totals = self.backend.download(self.totals)
        weight = totals[_WEIGHT] or np.nan
        names = ["loss", *(metric.name for metric in self.metrics)]
        return {name: float(total / weight) for name, total in zip(names, totals[_LOSS:], strict=True)}

    def samples_seen(self) -> int:
        """Return the sum of the sample weights since `reset_totals`."""
        return int(self.backend.download(self.totals)[_WEIGHT])

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

    def _shard_gradients(self, source: RowSource, shard: Shard, depth: int, tell: Callable[[int], None]) -> None:
        reduction = self._partial(depth)
        size = self.architecture.layout.size
        if shard.rows == 0:
            self.backend.fill(reduction, 0)
            return
        tail = reduction[size:]
        self.backend.fill(tail, 0)
        self.backend.fill(tail[_WEIGHT : _WEIGHT + 1], shard.rows)
        rows = source.rows(shard)
        x, y = rows.arrays
        buffers = self._buffers(shard.rows, depth)
        self._gather(x, rows.chosen)
        context = StepContext(True, self.seed, self.iterations, shard.first_row)
        self._forward(self._training_layers, buffers, context)
        self._score(buffers[-1].y, self._gather_targets(y, rows.chosen), buffers[-1].dy, tail)
        tell(size)
        first_trained = next((i for i, one in enumerate(buffers) if one.params), len(buffers))
        for position in range(len(buffers) - 1, first_trained - 1, -1):
            layer = self._training_layers[position]
            if not layer.is_view:
                layer.backward(self.backend, buffers[position])
            if buffers[position].params:
                tell(self._first_element[position])

    def _merge(self, depth: int) -> int:
        """Add the top partial sum to the one below it; return the new depth."""
        self.backend.add(self._partial(depth - 1), self._partial(depth - 2))
        return depth - 1

    def _gather(self, x: Buffer, rows: Buffer) -> None:
        batch = self._input[: len(rows)]
        self.backend.gather(x, rows, self._scale, self._offset, batch.reshape(len(rows), -1))

    def _gather_targets(self, y: Buffer, rows: Buffer) -> Buffer:
        targets = self._targets(len(rows), tuple(y.shape[1:]), y.dtype)
        self.backend.gather_targets(y, rows, targets)
        return targets

    def _forward(self, layers: Sequence[Layer], buffers: list[LayerBuffers], context: StepContext) -> None:
        for layer, one in zip(layers[self._first :], buffers[self._first :], strict=True):
            if not layer.is_view:
                layer.forward(self.backend, one, context)

    def _score(self, y: Buffer, targets: Buffer, dy: Buffer | None, tail: Buffer) -> None:
        counted = None  # the loss sums one metric that it knows of, the others have an op of their own
        # Metrics first: the loss may write the gradient over memory that a view layer shares with y.
        for number, metric in enumerate(self.metrics, start=_FIRST_METRIC):
            total = tail[number : number + 1]
            if counted is None and type(metric) is self.loss.counts:
                counted = total
            else:
                metric.update(self.backend, y, targets, total)
        self.loss.compute(self.backend, y, targets, dy, tail[_LOSS : _LOSS + 1], counted)

    # Memory, cut to the rows at hand

    def _partial(self, depth: int) -> Buffer:
        """Return the buffer of gradients and tail at a depth of the tree; depth 0 is `reduction`."""
        while len(self._partials) <= depth:
            tail = -(-self._tail_size // ALIGNMENT) * ALIGNMENT
            size = self.architecture.layout.size + tail
            self._partials.append(self._allocate(self.backend.zeros, (size,), name="gradients"))
        return self._partials[depth]

    def _targets(self, rows: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        key = (shape, np.dtype(dtype))
        if getattr(self, "_targets_key", None) != (*key, self._capacity):
            self._targets_key = (*key, self._capacity)
            whole = (self._capacity, *shape)
            self._targets_buffer = self._allocate(self.backend.empty, whole, dtype, name="targets of the batch")
        return self._targets_buffer[:rows]

    def _buffers(self, rows: int, depth: int) -> list[LayerBuffers]:
        """Return every layer's memory for a batch of that many rows, made at the first use of (rows, depth)."""
        key = (rows, depth)
        if key not in self._views:
            self._views[key] = self._cut_buffers(rows, depth)
        return self._views[key]

    def _cut_buffers(self, rows: int, depth: int) -> list[LayerBuffers]:
        architecture = self.architecture
        params = architecture.layout.views(self.params)
        grads = architecture.layout.views(self._partial(depth)) if hasattr(self, "loss") else {}
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
                position=position,
            )
            result.append(one)
            x, dx = one.y, one.dy
            trained_below = trained_below or bool(one.params)
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
    if first < len(layers) and isinstance(layer := layers[first], Rescaling):
        return first + 1, layer.scale, layer.offset
    return 0, 1.0, 0.0
