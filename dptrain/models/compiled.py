"""What `compile` was given, and what it means for a model's outputs: losses and metrics by output."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dptrain import losses, ops
from dptrain.errors import ConfigError
from dptrain.losses import Loss
from dptrain.losses.classes import BinaryCrossentropy, CategoricalCrossentropy, SparseCategoricalCrossentropy
from dptrain.metrics import Metric, resolve
from dptrain.metrics.base import Mean
from dptrain.optimizers import Optimizer
from dptrain.program import tree
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.train.sharding import Sharded


@dataclass(frozen=True)
class Compiled:
    """What `compile` was given.

    Attributes:
        optimizer: what updates the weights.
        loss: name, loss or function, or these nested by output; None for steps that need none.
        loss_weights: factors, nested by output.
        metrics: names, metrics or functions, nested by output.
        weighted_metrics: likewise, of those that get the sample weights.
        run_eagerly: whether steps run op by op.
        steps_per_execution: None for as many as fit.
        device: keywords of `dptrain.train.devices.open_backend`.
        comm: how messages between ranks travel, see `train.transports.TRANSPORTS`.
        bucket_mb: 10^6 bytes of gradients that travel as one message.
        device_mb: 10^6 bytes of a GPU's memory for samples; None for what is free.
        comm_dtype: half precision in which gradients travel; None for the type that they have.
        auto_scale_loss: whether a policy may make a `LossScaleOptimizer` of the optimizer.
        shard_optimizer: whether each replica keeps a part of the optimizer's slots.
        shard_weights: whether each replica keeps a part of the weights and of the optimizer's slots.
        stages: into which the layers are cut, each on a rank of its own.
        microbatches: into which a batch is cut for them; None for some for each stage.
        shards_per_batch: into which global batches are cut, whatever the number of ranks; None if nobody says.
    """

    optimizer: Optimizer
    loss: Any = None
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None
    run_eagerly: bool = False
    steps_per_execution: int | None = None
    device: Mapping[str, Any] = field(default_factory=dict)
    comm: str = "host"
    bucket_mb: float = 25.0
    device_mb: float | None = None
    shards_per_batch: int | None = None
    auto_scale_loss: bool = True
    comm_dtype: str | None = None
    shard_optimizer: bool = False
    shard_weights: bool = False
    stages: int = 1
    microbatches: int | None = None

    @property
    def shards(self) -> Sharded | None:
        """What is sharded over the replicas."""
        return "weights" if self.shard_weights else "optimizer" if self.shard_optimizer else None

    @property
    def policy(self) -> str:
        """The name of the model's policy."""
        return str(self.device.get("dtype", "float32"))

    def check_stages(self) -> None:
        """Refuse what stages do not go together with.

        Raises:
            ConfigError: as above, or a number below 1.
        """
        for name, number in (("stages", self.stages), ("microbatches", self.microbatches)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ConfigError(f"{name} = {number!r}: expected an integer >= 1")
        if self.stages == 1:
            if self.microbatches is not None:
                raise ConfigError(f"microbatches = {self.microbatches}: expected stages as well, which they go through")
            return
        others = {
            "shard_optimizer": self.shard_optimizer,
            "shard_weights": self.shard_weights,
            "comm_dtype": self.comm_dtype is not None,
            "run_eagerly": self.run_eagerly,
            "shards_per_batch": self.shards_per_batch is not None,
        }
        if both := [name for name, is_given in others.items() if is_given]:
            raise ConfigError(f"stages = {self.stages}: not supported with {both[0]}; leave out one of them")

    def check_shards(self, shards: int | None) -> None:
        """Refuse to round what ranks send, and to choose by the clock, where bits are to be the same on all of them.

        Args:
            shards: as `shards_per_batch`, or what the environment asks for.

        Raises:
            ConfigError: both are asked for.
        """
        if shards is not None and self.comm_dtype is not None:
            raise ConfigError(
                f"comm_dtype = {self.comm_dtype!r}: not supported with a fixed number of shards, whose sums have the "
                "same bits on any number of ranks; leave out --comm-dtype, or --reproducible and shards_per_batch"
            )
        auto = [f"{kind} = 'auto'" for kind in ("gemm", "conv") if self.device.get(kind) == "auto"]
        if shards is not None and auto:
            raise ConfigError(
                f"{' and '.join(auto)}: not supported with a fixed number of shards (--reproducible, "
                "shards_per_batch), as bits would depend on what was measured; choose dptrain, or a library"
            )


@dataclass(frozen=True)
class Output:
    """What is done with one output of a model.

    Attributes:
        name: of the output.
        loss: None for an output without.
        weight: factor of the loss.
        metrics: that get no sample weights.
        weighted_metrics: that do.
        tracker: the mean of the loss, where several outputs have one.
    """

    name: str
    loss: Loss | None
    weight: float
    metrics: Mapping[str, Metric]
    weighted_metrics: Mapping[str, Metric]
    tracker: Mean | None

    def compute_loss(self, y_true: Tensor, y_pred: Tensor, sample_weight: Any, rows: int) -> Tensor:
        """Return the weighted loss, and note it."""
        assert self.loss is not None
        value = self.loss(y_true, y_pred, sample_weight)
        if self.tracker is not None:
            self.tracker.update_state(value, sample_weight=rows)
        return value if self.weight == 1 else value * self.weight


class CompileMetrics(Metric):
    """What `compile` was given as metrics, as one of the model's: its results are a dictionary by log key.

    Args:
        outputs: of the model.
        by_key: the metrics by their keys in logs.

    Attributes:
        by_key: as above.
    """

    def __init__(self, outputs: "Outputs", by_key: Mapping[str, Metric]) -> None:
        super().__init__(name="compile_metrics")
        self._update, self.by_key = outputs.update_metrics, dict(by_key)

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of all outputs."""
        return list(self.by_key.values())

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Show a batch to the metrics; only `weighted_metrics` get the weights.

        Args:
            y_true: targets, nested as the outputs.
            y_pred: the model's outputs.
            sample_weight: one for all outputs, or nested as these; or None.
        """
        self._update(y_true, y_pred, sample_weight)

    def result(self) -> dict[str, Any]:
        """Return the results of all metrics by their keys in logs."""
        return results_of(self.by_key)

    def reset_state(self) -> None:
        """Let all metrics begin anew."""
        for one in self.metrics:
            one.reset_state()


def results_of(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return the results of metrics by their keys; those of a metric that gives a dictionary under its own."""
    found: dict[str, Any] = {}
    for key, metric in metrics.items():
        result = metric.result()
        found |= result if isinstance(result, Mapping) else {key: result}
    return found


def names_in_order(metrics: Iterable[Metric]) -> Iterator[str]:
    """Yield the names of metrics in the order of an evaluation's results, those of compiled ones each by itself."""
    for one in metrics:
        yield from (inner.name for inner in one.metrics) if isinstance(one, CompileMetrics) else [one.name]


class Outputs:
    """The losses and metrics of a model's outputs.

    Args:
        compiled: what `compile` was given.
        names: of the outputs, in order.
        nested: how the outputs are nested, a name for each.
        shapes: of a sample of each output.

    Attributes:
        nested: as given, with an `Output` for each.
        flat: the `Output`s in order.
        trackers: the means of the losses, where several outputs have one.
        metrics: what `compile` was given as such, or None where that is nothing.

    Raises:
        ConfigError: something for an output that there is not, or losses and metrics that do not go together.
    """

    def __init__(self, compiled: Compiled, names: Sequence[str], nested: Any, shapes: Sequence[Any]) -> None:
        several = len(names) > 1
        given = [
            _by_output(value, names, nested, what, several)
            for value, what in (
                (_losses(compiled.loss), "loss"),
                (compiled.loss_weights, "loss_weights"),
                (compiled.metrics, "metrics"),
                (compiled.weighted_metrics, "weighted_metrics"),
            )
        ]
        given[0] = [_joined(one) for one in given[0]]
        tracked = sum(loss is not None for loss in given[0]) > 1
        self.flat: list[Output] = []
        for name, shape, loss, weight, plain, weighted in zip(names, shapes, *given, strict=True):
            found = resolve(_listed(plain), _listed(weighted), loss, shape, defers=True)
            tracker = Mean(f"{name}_loss") if tracked and loss is not None else None
            self.flat.append(Output(name, loss, 1.0 if weight is None else float(weight), *found, tracker))
        self.nested = tree.refilled(nested, iter(self.flat))
        self.trackers: list[Mean] = []
        order = list(compiled.loss) if isinstance(compiled.loss, Mapping) and isinstance(nested, Mapping) else names
        for one in sorted(self.flat, key=lambda one: order.index(one.name) if one.name in order else len(order)):
            if one.tracker is not None:
                self.trackers.append(one.tracker)
        by_key: dict[str, Metric] = {}
        for kind in ("metrics", "weighted_metrics"):
            for one in self.flat:
                prefix = f"{one.name}_" if several else ""
                by_key |= {prefix + key: metric for key, metric in getattr(one, kind).items()}
        given_none = compiled.metrics is None and compiled.weighted_metrics is None
        self.metrics = None if given_none else CompileMetrics(self, by_key)

    @property
    def losses(self) -> Any:
        """The losses, nested as the outputs; None where there is none at all."""
        if all(one.loss is None for one in self.flat):
            return None
        return tree.map_leaves(lambda path, one: one.loss, self.nested)

    def compute_loss(self, y: Any, y_pred: Any, sample_weight: Any, rows: int) -> Tensor | None:
        """Return the sum of the outputs' losses, None where there is none."""
        found = [
            one.compute_loss(target, predicted, weight, rows)
            for one, target, predicted, weight in self._each(y, y_pred, sample_weight)
            if one.loss is not None
        ]
        return sum(found[1:], found[0]) if found else None

    def update_metrics(self, y: Any, y_pred: Any, sample_weight: Any) -> None:
        """Show a batch to the metrics."""
        for one, target, predicted, weight in self._each(y, y_pred, sample_weight):
            if target is None and (one.metrics or one.weighted_metrics):
                raise ConfigError(f"output {one.name!r} has metrics, but no targets")
            for metric in one.metrics.values():
                metric.update_state(target, predicted)
            for metric in one.weighted_metrics.values():
                metric.update_state(target, predicted, sample_weight=weight)

    def _each(self, y: Any, y_pred: Any, sample_weight: Any) -> list[tuple[Output, Any, Any, Any]]:
        names = list(self.nested if isinstance(self.nested, Mapping) else (one.name for one in self.flat))
        if _is_deep(self.nested):
            spread = not tree.is_nested(sample_weight)
            weights = [sample_weight] * len(self.flat) if spread else _like(sample_weight, self.nested)
            return list(zip(self.flat, _like(y, self.nested), tree.leaves(y_pred), weights, strict=True))
        predicted = _ordered(y_pred, names) if isinstance(y_pred, Mapping) else tree.leaves(y_pred)
        targets = map(_for_arithmetic, _ordered(y, names))
        weights = _ordered(sample_weight, names, spread=True)
        return list(zip(self.flat, targets, predicted, weights, strict=True))


class CrossentropyByShape(Loss):
    """What `compile(loss="crossentropy")` means: that of two classes, of labels or of probabilities, by the shapes."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Return the loss of a batch; see `Loss`."""
        target, output = np.shape(y_true), np.shape(y_pred)
        if output[-1:] == (1,) or len(output) == 1:
            kind: type[Loss] = BinaryCrossentropy
        elif len(target) < len(output) or target[-1:] == (1,):
            kind = SparseCategoricalCrossentropy
        else:
            kind = CategoricalCrossentropy
        return kind()(y_true, y_pred, sample_weight)


class SumOfLosses(Loss):
    """The sum of an output's losses, each with its own reduction.

    Args:
        parts: the losses, at least one.
    """

    def __init__(self, parts: Sequence[Loss]) -> None:
        super().__init__(name="_and_".join(one.name for one in parts))
        self.parts = list(parts)
        kinds = {one._takes_labels for one in parts}
        self._takes_labels = kinds.pop() if len(kinds) == 1 else None
        self._labels_number_outputs = all(one._labels_number_outputs for one in parts)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Return the sum for a batch; as `Loss`."""
        found = [one(y_true, y_pred, sample_weight) for one in self.parts]
        return sum(found[1:], found[0])


def _joined(losses: Any) -> Loss | None:
    """Return an output's loss: that which there is, or the sum of a list."""
    if not isinstance(losses, list | tuple):
        return losses  # type: ignore[no-any-return]
    parts = [one for one in losses if one is not None]
    return None if not parts else parts[0] if len(parts) == 1 else SumOfLosses(parts)


def _listed(given: Any) -> Any:
    return given if given is None or isinstance(given, list | tuple) else [given]


def _losses(loss: Any) -> Any:
    """Return losses of names and functions, nested as these are."""

    def found(path: str, one: Any) -> Any:
        return CrossentropyByShape() if one in ("crossentropy", "ce") else losses.as_loss(one)

    return tree.map_leaves(found, loss)


def _is_deep(nested: Any) -> bool:
    """Whether some outputs are nested in others' structures."""
    parts = nested.values() if isinstance(nested, Mapping) else nested if isinstance(nested, list | tuple) else ()
    return any(map(tree.is_nested, parts))


def _like(data: Any, nested: Any) -> list[Any]:
    """Return what is nested as the outputs, or as far as it is, in their order: None for all outputs below a None."""
    if not tree.is_nested(nested):
        return [data]
    if isinstance(nested, Mapping):
        pairs = [(None if data is None else data.get(key), one) for key, one in nested.items()]
    else:
        pairs = list(zip([None] * len(nested) if data is None else data, nested, strict=True))
    return [leaf for one, inner in pairs for leaf in _like(one, inner)]


def _by_output(value: Any, names: Sequence[str], nested: Any, what: str, several: bool) -> list[Any]:
    """Return what was given for each output.

    Raises:
        ConfigError: it names an output that there is not, or is as long as there are no outputs.
    """
    lists = what in ("metrics", "weighted_metrics")
    if value is None or (lists and not value):
        return [None] * len(names)
    if _is_deep(nested) and tree.is_nested(value) and len(value) == len(nested):
        is_mapping = isinstance(nested, Mapping)
        if is_mapping == isinstance(value, Mapping) and not (is_mapping and set(value) - set(nested)):
            return _like(value, nested)
    if isinstance(value, Mapping):
        keys = list(nested) if isinstance(nested, Mapping) else list(names)
        if unknown := [key for key in value if key not in keys]:
            raise ConfigError(
                f"In the dict argument `{what}`, key '{unknown[0]}' does not correspond to any model output. "
                f"Received:\n{what}={value}"
            )
        return [value.get(key) for key in keys]
    if lists and not several:
        flat = value if isinstance(value, list | tuple) else [value]
        inner = [one for entry in flat for one in (entry if isinstance(entry, list | tuple) else [entry])]
        return [inner]
    if what == "loss" and not several and isinstance(value, list | tuple) and not tree.is_nested(nested):
        return [value]
    if isinstance(value, list | tuple):
        if len(value) != len(names):
            raise ConfigError(
                f"For a model with multiple outputs, when providing the `{what}` argument as a list, it should have as "
                f"many entries as the model has outputs. Received:\n{what}={value}\nof length {len(value)} whereas "
                f"the model has {len(names)} outputs."
            )
        return list(value)
    return [value] * len(names)


# The types of targets in which arithmetic wraps, or is not defined, and those that losses and metrics get them in.
_WIDER = {"bool": "float32", "uint8": "int32", "int8": "int32", "uint16": "int32", "int16": "int32", "uint32": "int64"}


def _for_arithmetic(target: Any) -> Any:
    """Return targets in a type in which a user's own function may compute: -y of uint8 is no number of theirs."""
    if target is None:
        return None
    (tensor,) = as_tensors([target])
    return ops.cast(tensor, _WIDER[tensor.dtype.name]) if tensor.dtype.name in _WIDER else tensor


def _ordered(data: Any, names: Sequence[str], *, spread: bool = False) -> list[Any]:
    """Return the parts of targets or weights in the order of the outputs."""
    if not tree.is_nested(data):
        return [data] * len(names) if spread or data is None else [data]
    return [data.get(name) for name in names] if isinstance(data, Mapping) else list(data)
