"""Arguments of `compile`, and the losses and metrics of each output."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

import numpy as np

from dptrain import losses, ops, optimizers
from dptrain.batches.inputs import check_counts
from dptrain.errors import ConfigError
from dptrain.losses import Loss
from dptrain.losses.base import LossFunctionWrapper, reduce_weighted_values, wide
from dptrain.losses.classes import BinaryCrossentropy, CategoricalCrossentropy, SparseCategoricalCrossentropy
from dptrain.metrics import Metric, resolve
from dptrain.metrics.base import Mean
from dptrain.optimizers import LossScaleOptimizer, Optimizer
from dptrain.optimizers.absent import AbsentOptimizer
from dptrain.program import tree
from dptrain.program.tensor import Tensor, as_tensors
from dptrain.runtime.types import FLOATX, POLICY_TYPES, type_of
from dptrain.train.sharding import Sharded
from dptrain.train.transports import TRANSPORTS


def _option(default: Any, *, agreed: bool = False, of_programs: bool = False) -> Any:
    """A field; `agreed`: all ranks must have the same, `of_programs`: a keyword of `Programs`."""
    return field(default=default, metadata={"agreed": agreed, "of_programs": of_programs})


@dataclass(frozen=True)
class Compiled:
    """The arguments of `compile`."""

    optimizer: Optimizer  # updates the weights
    loss: Any = None  # name, loss or function, or these nested by output; None for custom steps
    loss_weights: Any = None  # factors, nested by output
    metrics: Any = None  # names, metrics or functions, nested by output
    weighted_metrics: Any = None  # likewise, of metrics that get the sample weights
    run_eagerly: bool = False  # whether steps run op by op
    steps_per_execution: int | None = None  # None for as many as fit
    device: Mapping[str, Any] = field(default_factory=dict)  # keywords of `dptrain.train.devices.open_backend`
    comm: str = _option("host", agreed=True)  # transport between ranks, see `train.transports.TRANSPORTS`
    bucket_mb: float = _option(25.0, agreed=True, of_programs=True)  # 10^6 bytes of gradients in one message
    device_mb: float | None = None  # 10^6 bytes of a GPU's memory for samples; None for what is free
    shards_per_batch: int | None = None  # shards of a global batch, whatever the number of ranks; None if not chosen
    auto_scale_loss: bool = True  # whether a policy may wrap the optimizer in a `LossScaleOptimizer`
    # Half precision of gradients in messages; None for their own dtype.
    comm_dtype: str | None = _option(None, agreed=True, of_programs=True)
    shard_optimizer: bool = _option(False, agreed=True)  # whether each replica keeps a part of the optimizer's slots
    shard_weights: bool = _option(False, agreed=True)  # whether each replica keeps a part of weights and slots
    stages: int = _option(1, agreed=True)  # pipeline stages, each on its own rank
    # Of a batch in a pipeline; None for some for each stage.
    microbatches: int | None = _option(None, agreed=True, of_programs=True)

    @property
    def shards(self) -> Sharded | None:
        """What is sharded over the replicas."""
        return "weights" if self.shard_weights else "optimizer" if self.shard_optimizer else None

    @property
    def policy(self) -> str:
        """Name of the model's dtype policy."""
        return str(self.device.get("dtype", "float32"))

    def arguments(self) -> dict[str, Any]:
        """Return keywords with which `compile` can be called again."""
        arguments = {argument.name: getattr(self, argument.name) for argument in fields(self)}
        del arguments["device"]
        steps = "auto" if self.steps_per_execution is None else self.steps_per_execution
        return arguments | {"steps_per_execution": steps, **self.device}

    def marked(self, mark: str) -> dict[str, Any]:
        """Return the options with this mark of `_option`, by name."""
        return {option.name: getattr(self, option.name) for option in fields(self) if option.metadata.get(mark)}

    def describe(self) -> list[Any]:
        """Return optimizer, loss and metrics in JSON: they must agree on all ranks."""
        optimizer = self.optimizer
        if self.auto_scale_loss and isinstance(optimizer, LossScaleOptimizer):
            optimizer = optimizer.inner_optimizer  # a policy may have wrapped it, and policies are compared by name
        nested = (self.loss, self.loss_weights, self.metrics, self.weighted_metrics)
        descriptions = (tree.map_leaves(lambda path, entry: _description(entry), argument) for argument in nested)
        return [[type(optimizer).__name__, optimizer._describe()], *descriptions]

    def check(self) -> None:
        """Refuse unknown names, sizes that are not above 0, and options that exclude each other."""
        if self.comm not in TRANSPORTS:
            raise ConfigError(f"comm = {self.comm!r}: expected one of {', '.join(map(repr, TRANSPORTS))}")
        narrow = [known.name for known in POLICY_TYPES if known.is_narrow]
        if self.comm_dtype not in (None, *narrow):
            raise ConfigError(f"comm_dtype = {self.comm_dtype!r}: expected None, {' or '.join(map(repr, narrow))}")
        if not all(isinstance(factor, Real) for factor in tree.leaves(self.loss_weights)):
            raise ConfigError(f"loss_weights = {self.loss_weights!r}: expected numbers; metrics is the fourth argument")
        for name, size in (("bucket_mb", self.bucket_mb), ("device_mb", self.device_mb)):
            if size is not None and not 0 < size * 1e6 < math.inf:
                raise ConfigError(f"{name} = {size}: expected a number above 0")
        check_counts(shards_per_batch=self.shards_per_batch)
        self.check_shards(self.shards_per_batch)
        self._check_stages()

    def _check_stages(self) -> None:
        for name, number in (("stages", self.stages), ("microbatches", self.microbatches)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ConfigError(f"{name} = {number!r}: expected an integer >= 1")
        if self.stages == 1:
            if self.microbatches is not None:
                raise ConfigError(f"microbatches = {self.microbatches}: needs stages as well")
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
        """Refuse rounded gradients and kernels chosen by measurement with a fixed number of shards."""
        if shards is not None and self.comm_dtype is not None:
            raise ConfigError(
                f"comm_dtype = {self.comm_dtype!r}: not supported with a fixed number of shards, whose sums have the "
                "same bits on any number of ranks; leave out --comm-dtype, or --reproducible and shards_per_batch"
            )
        auto = [f"{kind} = 'auto'" for kind in ("gemm", "conv") if self.device.get(kind) == "auto"]
        if shards is not None and auto:
            raise ConfigError(
                f"{' and '.join(auto)}: not supported with a fixed number of shards (--reproducible, "
                "shards_per_batch), because bits would depend on timings; choose dptrain or a library"
            )


def _description(value: Any) -> Any:
    if isinstance(value, str | int | float):
        return value
    try:
        return [type(value).__name__, value.get_config()]
    except (AttributeError, ConfigError, NotImplementedError, TypeError):
        return getattr(value, "__name__", type(value).__name__)


def checked_steps(steps_per_execution: Any) -> int:
    """Return the number of steps in one execution."""
    if isinstance(steps_per_execution, bool) or not isinstance(steps_per_execution, Integral):
        raise ConfigError(f"steps_per_execution = {steps_per_execution!r}: expected an integer or 'auto'")
    if steps_per_execution < 1:
        raise ConfigError(f"steps_per_execution = {steps_per_execution}: expected an integer >= 1")
    return int(steps_per_execution)


def compiled_optimizer(optimizer: Any, *, scales_loss: bool) -> Optimizer:
    """Return the optimizer of `compile`, in a `LossScaleOptimizer` where the loss is to be scaled."""
    resolved = optimizers.get(optimizer)
    if resolved is None:
        return AbsentOptimizer()
    is_scaled = isinstance(resolved, LossScaleOptimizer)
    return LossScaleOptimizer(resolved) if scales_loss and not is_scaled else resolved


@dataclass(frozen=True)
class Output:
    """Loss and metrics of one output of a model."""

    name: str
    loss: Loss | None  # None for an output without a loss
    weight: float  # factor of the loss
    metrics: Mapping[str, Metric]  # get no sample weights
    weighted_metrics: Mapping[str, Metric]  # get the sample weights
    tracker: Mean | None  # mean of the loss, if several outputs have one

    def compute_loss(self, y_true: Tensor, y_pred: Tensor, sample_weight: Any, rows: int) -> Tensor:
        """Return the weighted loss, and update its mean."""
        assert self.loss is not None
        if isinstance(self.loss, SumOfLosses):
            value = self.loss.tracked(y_true, y_pred, sample_weight, rows)
        else:
            value = self.loss(y_true, y_pred, sample_weight)
        if self.tracker is not None:
            self.tracker.update_state(value, sample_weight=rows)
        return value if self.weight == 1 else value * self.weight


@dataclass(frozen=True)
class JointLoss:
    """A loss of several outputs at once, or an additional loss of an output."""

    path: tuple[Any, ...]  # of the outputs, in the nested outputs
    loss: Loss
    weight: float
    tracker: Mean

    def compute_loss(self, y_true: Any, y_pred: Any, sample_weight: Any, rows: int) -> Tensor:
        """Return the weighted loss over all outputs, and update its mean."""
        target, output = _at(y_true, self.path), _at(y_pred, self.path)
        if tree.is_nested(output):
            outputs = tree.map_leaves(lambda path, leaf: wide(leaf), output)
            targets = tree.map_leaves(lambda path, leaf: ops.cast(leaf, tree.leaves(outputs)[0].dtype), target)
            loss = self.loss
            function = loss.fn if isinstance(loss, LossFunctionWrapper) else loss.call
            (values,) = as_tensors([function(targets, outputs)])
            value = reduce_weighted_values(values, sample_weight, None, loss.reduction)
        else:
            value = self.loss(target, output, sample_weight)
        self.tracker.update_state(value, sample_weight=rows)
        return value if self.weight == 1 else value * self.weight


@dataclass(frozen=True)
class _Weighted:
    """A loss, or None, and its factor."""

    loss: Any
    weight: float


class CompileMetrics(Metric):
    """The metrics of `compile` as a single metric; its results are a dictionary by log key."""

    def __init__(self, outputs: "Outputs", by_key: Mapping[str, Metric]) -> None:
        super().__init__(name="compile_metrics")
        self._update, self.by_key = outputs.update_metrics, dict(by_key)

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of all outputs."""
        return list(self.by_key.values())

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Update all metrics; only `weighted_metrics` get the weights."""
        self._update(y_true, y_pred, sample_weight)

    def result(self) -> dict[str, Any]:
        """Return the results of all metrics by log key."""
        return results_of(self.by_key)

    def reset_state(self) -> None:
        """Reset all metrics."""
        for metric in self.metrics:
            metric.reset_state()


def results_of(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return the results of metrics by key; dictionaries of results keep their own keys."""
    results: dict[str, Any] = {}
    for key, metric in metrics.items():
        result = metric.result()
        results |= result if isinstance(result, Mapping) else {key: result}
    return results


def names_in_order(metrics: Iterable[Metric]) -> Iterator[str]:
    """Yield the names of metrics in the order of an evaluation's results, compiled ones individually."""
    for metric in metrics:
        yield from (inner.name for inner in metric.metrics) if isinstance(metric, CompileMetrics) else [metric.name]


class Outputs:
    """The losses and metrics of a model's outputs, `nested` like these and `flat` in order."""

    def __init__(self, compiled: Compiled, names: Sequence[str], nested: Any, shapes: Sequence[Any]) -> None:
        several = len(names) > 1
        loss, loss_weights = _losses(compiled.loss), compiled.loss_weights
        if not several and isinstance(loss, list | tuple) and len(loss) > 1 and not _is_deep(loss):
            loss, loss_weights = [_tracked(compiled.loss, loss, loss_weights)], None
        located = _located(loss, loss_weights, nested) if several else None
        if located is not None:
            loss = loss_weights = None
        by_output = [
            _by_output(value, names, nested, what, several)
            for value, what in (
                (loss, "loss"),
                (loss_weights, "loss_weights"),
                (compiled.metrics, "metrics"),
                (compiled.weighted_metrics, "weighted_metrics"),
            )
        ]
        joint: list[JointLoss] = []
        self._covered: list[Any] = [None] * len(names)  # losses of groups that contain an output
        labels = list(names)
        if located is not None:
            places = _paths(nested)
            labels = [_label(nested, place) for place in places]
            for path, loss, weight in located:
                number = places.index(path) if path in places else None
                if number is not None and by_output[0][number] is None:
                    by_output[0][number], by_output[1][number] = loss, weight
                else:
                    joint.append(JointLoss(path, loss, weight, Mean(f"{_label(nested, path)}_loss")))
                for covered, place in enumerate(places):
                    if place[: len(path)] == path:
                        self._covered[covered] = loss
        self._joint = joint
        by_output[0] = [_joined(losses) for losses in by_output[0]]
        tracked = len(joint) + sum(loss is not None for loss in by_output[0]) > 1
        self.flat: list[Output] = []
        for name, label, shape, loss, weight, plain, weighted in zip(names, labels, shapes, *by_output, strict=True):
            metrics = resolve(_listed(plain), _listed(weighted), loss, shape, defers=True)
            tracker = Mean(f"{label}_loss") if tracked and loss is not None else None
            self.flat.append(Output(name, loss, 1.0 if weight is None else float(weight), *metrics, tracker))
        self.nested = tree.refilled(nested, iter(self.flat))
        self.trackers: list[Mean] = []
        order = list(compiled.loss) if isinstance(compiled.loss, Mapping) and isinstance(nested, Mapping) else names
        for output in sorted(
            self.flat, key=lambda output: order.index(output.name) if output.name in order else len(order)
        ):
            if isinstance(output.loss, SumOfLosses):
                self.trackers += output.loss.trackers
            if output.tracker is not None:
                self.trackers.append(output.tracker)
        self.trackers += [each.tracker for each in joint]
        by_key: dict[str, Metric] = {}
        for kind in ("metrics", "weighted_metrics"):
            for output in self.flat:
                prefix = f"{output.name}_" if several else ""
                by_key |= {prefix + key: metric for key, metric in getattr(output, kind).items()}
        given_none = compiled.metrics is None and compiled.weighted_metrics is None
        self.metrics = None if given_none else CompileMetrics(self, by_key)

    @property
    def losses(self) -> Any:
        """The losses, nested like the outputs; None without any."""
        losses = [output.loss or covered for output, covered in zip(self.flat, self._covered, strict=True)]
        return None if all(loss is None for loss in losses) else tree.refilled(self.nested, iter(losses))

    def compute_loss(self, y: Any, y_pred: Any, sample_weight: Any, rows: int) -> Tensor | None:
        """Return the sum of the outputs' losses, None without any."""
        each = self._each(y, y_pred, sample_weight)
        losses = [
            output.compute_loss(target, predicted, weight, rows)
            for output, target, predicted, weight in each
            if output.loss is not None
        ]
        if self._joint:
            if tree.is_nested(sample_weight):
                raise ConfigError("not supported: sample weights for each output with one loss over several outputs")
            targets, predictions = (tree.refilled(self.nested, iter([row[place] for row in each])) for place in (1, 2))
            losses += [joint.compute_loss(targets, predictions, sample_weight, rows) for joint in self._joint]
        return sum(losses[1:], losses[0]) if losses else None

    def update_metrics(self, y: Any, y_pred: Any, sample_weight: Any) -> None:
        """Update the metrics with a batch."""
        for output, target, predicted, weight in self._each(y, y_pred, sample_weight):
            if target is None and (output.metrics or output.weighted_metrics):
                raise ConfigError(f"output {output.name!r} has metrics, but no targets")
            for metric in output.metrics.values():
                metric.update_state(target, predicted)
            for metric in output.weighted_metrics.values():
                metric.update_state(target, predicted, sample_weight=weight)

    def _each(self, y: Any, y_pred: Any, sample_weight: Any) -> list[tuple[Output, Any, Any, Any]]:
        names = list(self.nested if isinstance(self.nested, Mapping) else (output.name for output in self.flat))
        count = len(tree.leaves(y_pred))
        if count != len(self.flat) and not isinstance(y_pred, Mapping):
            raise ConfigError(
                f"y_pred: {count} tensor(s) where the model returns {len(self.flat)} outside training; expected as "
                "many, or compile without a loss and compute it with ops"
            )
        if _is_deep(self.nested):
            spread = not tree.is_nested(sample_weight)
            weights = [sample_weight] * len(self.flat) if spread else _flattened_like(sample_weight, self.nested)
            return list(zip(self.flat, _flattened_like(y, self.nested), tree.leaves(y_pred), weights, strict=True))
        if len(names) == 1 and isinstance(y, list | tuple) and len(y) > 1:
            y = y[:1]  # targets of a model's own loss: as in Keras, metrics get the first
        predicted = _ordered(y_pred, names) if isinstance(y_pred, Mapping) else tree.leaves(y_pred)
        targets = map(_for_arithmetic, _ordered(y, names))
        weights = _ordered(sample_weight, names, spread=True)
        return list(zip(self.flat, targets, predicted, weights, strict=True))


class CrossentropyByShape(Loss):
    """`compile(loss="crossentropy")`: binary, sparse or categorical, depending on the shapes."""

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
    """The sum of an output's losses, each with its own reduction, factor and mean in logs, `NAME_loss`."""

    def __init__(self, parts: Sequence[Loss], weights: Sequence[float] = (), names: Sequence[str] = ()) -> None:
        super().__init__(name="_and_".join(loss.name for loss in parts))
        self.parts, self._weights = list(parts), list(weights) or [1.0] * len(parts)
        self.trackers = [Mean(f"{name}_loss") for name in names]
        kinds = {loss._takes_labels for loss in parts}
        self._takes_labels = kinds.pop() if len(kinds) == 1 else None
        self._labels_number_outputs = all(loss._labels_number_outputs for loss in parts)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Return the sum for a batch; see `Loss`."""
        return self._weighted([loss(y_true, y_pred, sample_weight) for loss in self.parts])

    def tracked(self, y_true: Any, y_pred: Any, sample_weight: Any, rows: int) -> Tensor:
        """Return the sum for a batch, and update the means of its parts."""
        values = [loss(y_true, y_pred, sample_weight) for loss in self.parts]
        for tracker, value in zip(self.trackers, values, strict=False):
            tracker.update_state(value, sample_weight=rows)
        return self._weighted(values)

    def _weighted(self, values: Sequence[Tensor]) -> Tensor:
        pairs = zip(values, self._weights, strict=True)
        weighted = [value if weight == 1 else value * weight for value, weight in pairs]
        return sum(weighted[1:], weighted[0])


def _tracked(words: Sequence[Any], losses: Sequence[Any], weights: Any) -> Loss | None:
    """Return the sum of several losses of an output, each with a mean in logs under its name, as in Keras."""
    shared = 1.0 if weights is None else weights
    factors = list(weights) if isinstance(weights, list | tuple) else [shared] * len(losses)
    if len(factors) != len(losses):
        raise ConfigError(
            f"`loss_weights` must match the number of losses, got {len(losses)} losses and {len(factors)} weights."
        )
    pairs = zip(words, losses, strict=True)
    names = [word if isinstance(word, str) else getattr(loss, "name", "") for word, loss in pairs]
    parts = [part for part in zip(losses, map(float, factors), names, strict=True) if part[0] is not None]
    if len(parts) < 2:
        return SumOfLosses([loss for loss, _, _ in parts], [factor for _, factor, _ in parts]) if parts else None
    return SumOfLosses(*map(list, zip(*parts, strict=True)))


def _joined(losses: Any) -> Loss | None:
    """Return an output's loss, or the sum of a list of them."""
    if not isinstance(losses, list | tuple):
        return losses  # type: ignore[no-any-return]
    parts = [loss for loss in losses if loss is not None]
    return None if not parts else parts[0] if len(parts) == 1 else SumOfLosses(parts)


def _listed(value: Any) -> Any:
    return value if value is None or isinstance(value, list | tuple) else [value]


def _losses(loss: Any) -> Any:
    """Resolve names and functions to losses, keeping the nesting."""

    def as_loss(path: str, loss: Any) -> Any:
        return CrossentropyByShape() if loss in ("crossentropy", "ce") else losses.as_loss(loss)

    return tree.map_leaves(as_loss, loss)


def _is_deep(nested: Any) -> bool:
    """Whether outputs are nested more than one level deep."""
    parts = nested.values() if isinstance(nested, Mapping) else nested if isinstance(nested, list | tuple) else ()
    return any(map(tree.is_nested, parts))


def _at(data: Any, path: Iterable[Any]) -> Any:
    for key in path:
        data = data[key]
    return data


def _paths(nested: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not tree.is_nested(nested):
        return [path]
    keys = nested if isinstance(nested, Mapping) else range(len(nested))
    return [leaf for key in keys for leaf in _paths(nested[key], (*path, key))]


def _label(nested: Any, path: tuple[Any, ...]) -> str:
    """Return Keras' log name for the loss of the outputs at a path."""
    inner = _at(nested, path)
    if tree.is_nested(inner):
        return "/".join(map(str, path)) or "_".join(inner if isinstance(inner, Mapping) else tree.leaves(inner))
    return "/".join(map(str, [*path[:-1], inner] if path and isinstance(path[-1], int) else path or [inner]))


def _located(losses: Any, weights: Any, nested: Any) -> list[tuple[tuple[Any, ...], Any, float]] | None:
    """Return losses with paths and factors where some cover several outputs at once, as Keras matches them; else None.

    A list beside outputs in a dictionary or tuple, and vice versa, lists losses of all these outputs.
    """
    try:
        located = list(_parts(_paired(losses, weights), nested))
    except LookupError:  # another structure; `_by_output` reports the error
        return None
    paths = [path for path, _, _ in located]
    joint = (
        any(tree.is_nested(_at(nested, path)) for path in paths) or len(set(paths)) < len(paths) or _is_deep(weights)
    )
    return located if joint and tree.is_nested(losses) else None


def _paired(losses: Any, weights: Any) -> Any:
    """Pair losses with their factors, which are nested alike or equally many."""
    paths = _paths(losses)
    factors = [_at(weights, path) for path in _paths(weights)] if tree.is_nested(weights) else [weights] * len(paths)
    if len(factors) != len(paths):
        raise LookupError
    pairs = [
        _Weighted(_at(losses, path), 1.0 if factor is None else float(factor))
        for path, factor in zip(paths, factors, strict=True)
    ]
    return tree.refilled(losses, iter(pairs))


def _parts(losses: Any, nested: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, float]]:
    """Yield losses with the paths of their outputs, and factors; LookupError where there is no such output."""
    inner = _at(nested, path)
    if not tree.is_nested(losses):
        if losses.loss is not None:
            yield path, losses.loss, losses.weight
        return
    if not tree.is_nested(inner):
        several = [part for part in tree.leaves(losses) if part.loss is not None]
        if several:
            yield path, SumOfLosses([part.loss for part in several], [part.weight for part in several]), 1.0
        return
    if isinstance(losses, list | tuple):
        if not any(map(tree.is_nested, losses)) and len(losses) == len(tree.leaves(inner)):
            losses = tree.refilled(inner, iter(losses))
        elif not isinstance(inner, type(losses)):
            for part in losses:
                yield from _parts(part, nested, path)
            return
    if isinstance(losses, Mapping) != isinstance(inner, Mapping):
        raise LookupError
    for key in losses if isinstance(losses, Mapping) else range(len(losses)):
        yield from _parts(losses[key], nested, (*path, key))


def _flattened_like(data: Any, nested: Any) -> list[Any]:
    """Flatten data nested like the outputs, or less deep; None stands for all outputs below it."""
    if not tree.is_nested(nested):
        return [data]
    if isinstance(nested, Mapping):
        pairs = [(None if data is None else data.get(key), inner) for key, inner in nested.items()]
    else:
        pairs = list(zip([None] * len(nested) if data is None else data, nested, strict=True))
    return [leaf for part, inner in pairs for leaf in _flattened_like(part, inner)]


def _by_output(value: Any, names: Sequence[str], nested: Any, what: str, several: bool) -> list[Any]:
    """Return an argument of `compile` for each output; refuse unknown outputs and other lengths."""
    lists = what in ("metrics", "weighted_metrics")
    if value is None or (lists and not value):
        return [None] * len(names)
    if _is_deep(nested) and tree.is_nested(value) and len(value) == len(nested):
        is_mapping = isinstance(nested, Mapping)
        if is_mapping == isinstance(value, Mapping) and not (is_mapping and set(value) - set(nested)):
            return _flattened_like(value, nested)
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
        inner = [metric for entry in flat for metric in (entry if isinstance(entry, list | tuple) else [entry])]
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


def _for_arithmetic(target: Any) -> Any:
    """Widen targets so that a user's function can compute: -y of uint8 would wrap, and of booleans is undefined."""
    if target is None:
        return None
    (tensor,) = as_tensors([target])
    if tensor.dtype == np.bool_:
        return ops.cast(tensor, FLOATX)
    is_small = type_of(tensor.dtype).is_integer and tensor.dtype.itemsize <= 4
    return ops.cast(tensor, np.promote_types(tensor.dtype, np.int32)) if is_small else tensor


def _ordered(data: Any, names: Sequence[str], *, spread: bool = False) -> list[Any]:
    """Return targets or weights in the order of the outputs."""
    if not tree.is_nested(data):
        return [data] * len(names) if spread or data is None else [data]
    return [data.get(name) for name in names] if isinstance(data, Mapping) else list(data)
