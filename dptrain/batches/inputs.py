"""Checks the arguments of `fit`, `evaluate` and `predict` against the model, and turns them into batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from dptrain.backend.cpu.mapped_files import guard_mapped_files
from dptrain.batches.adapters import BatchSource, GeneratorSource, LoaderSource, PyDatasetSource
from dptrain.batches.base import ArrayBatches
from dptrain.batches.fingerprint import fingerprint, is_mapped
from dptrain.batches.sampling import (
    EVALUATION_ROWS,
    GlobalSampler,
    LocalSampler,
    PartSampler,
    Sampler,
    StaticSampler,
)
from dptrain.batches.stream import Mode, StreamBatches
from dptrain.batches.structure import BatchSpec
from dptrain.comm import Communicator
from dptrain.comm.parts import cut
from dptrain.data.checks import check_labels, whole_labels
from dptrain.data.lazy import LazyArray, NativeRows
from dptrain.data.loading import Split
from dptrain.errors import ArgumentTypeError, ConfigError, DataError
from dptrain.losses.base import Loss
from dptrain.program import tree
from dptrain.program.shapes import axis_of_one
from dptrain.program.tensor import native
from dptrain.runtime.failure import warn
from dptrain.runtime.text import short
from dptrain.runtime.types import type_of

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expected:
    """What a model takes."""

    inputs: Any  # shape of a sample of each input, nested as the inputs; None for any
    outputs: Any = None  # likewise of the outputs; None where unknown
    # Loss of each output, nested, None for one without; None where a custom step interprets the targets
    losses: Any = None
    custom_steps: bool = False  # whether the model overrides its steps, which may need no targets
    dtype: str = "float32"  # of floating-point numbers
    input_names: Sequence[str] = ()  # dictionary keys by which a list of inputs may come
    output_names: Sequence[str] = ()  # likewise of the outputs
    takes_lists: bool = False  # whether a list may stand for a dictionary of inputs
    optional_inputs: frozenset[str] = frozenset()  # paths of the inputs that may be None
    encode: Callable[[Any], Any] | None = None  # turns what the user passes into the inputs


@dataclass(frozen=True)
class Samples:
    """Checked arrays of a data set."""

    x: Any  # (rows, ...) features in their own dtypes, nested as the model's inputs
    y: Any = None  # (rows, ...) targets nested as the outputs, or None
    weights: Any = None  # (rows, ...) of samples or their parts, nested as the outputs; None for ones
    dtype: str = "float32"  # of floating-point numbers in the model
    split: Split | None = None  # which rows are used, or belong to this rank alone

    def __len__(self) -> int:
        return len(tree.leaves(self.x)[0])

    @property
    def total(self) -> int:
        """Number of samples over all ranks."""
        return len(self) if self.split is None else len(self.split)

    @property
    def rank_local(self) -> bool:
        """Whether each rank holds different rows."""
        return self.split is not None and self.split.total is not None

    @property
    def data(self) -> Any:
        """The arrays as a step takes them: x alone, (x,), (x, y) or (x, y, sample_weight), as in Keras."""
        if self.y is None:
            return (self.x,) if tree.is_nested(self.x) else self.x
        return (self.x, self.y) if self.weights is None else (self.x, self.y, self.weights)

    def part(self, start: int, stop: int) -> "Samples":
        """Return rows start to stop."""
        x, y, weights = (
            tree.map_leaves(lambda path, array: array[start:stop], each) for each in (self.x, self.y, self.weights)
        )
        return Samples(x, y, weights, self.dtype)

    @property
    def facts(self) -> list[Any]:
        """Facts that must agree on all ranks."""
        if self.rank_local:
            return [self.total]
        rows = () if self.split is None or self.split.rows is None else (self.split.rows,)
        named = {"x": self.x, "y": self.y, "sample_weight": self.weights}
        names = [path for path, _ in tree.flatten(named)]
        return [*(names if len(names) > 3 else []), *fingerprint(*tree.leaves(named), *rows)]

    def stored(self) -> tuple[list[Array], BatchSpec]:
        """Return the arrays for a feed, targets and weights in the model's dtype, and their spec."""
        by_name: dict[str, Array] = {}

        def name(path: str, array: Array) -> str:
            part = ("x", "y", "sample_weight")[int(path[0])] if path[:1].isdigit() else "x"
            full = part + path[1:]
            keep = part == "x" or array.dtype.kind != "f"
            by_name[full] = array if keep else np.ascontiguousarray(array, self.dtype)
            return full

        data = self.data if isinstance(self.data, tuple) else (self.data,)
        named = tree.map_leaves(name, data)
        arrays = list(by_name.values())
        shapes = tuple(array.shape for array in arrays)
        spec = BatchSpec(
            named if isinstance(self.data, tuple) else named[0], shapes, tuple(a.dtype.str for a in arrays), self.dtype
        )
        return arrays, spec


@dataclass(frozen=True)
class Stream:
    """Batches of the user's generator, dataset or loader."""

    source: BatchSource  # where they come from
    rows: int = 0  # rows of the first batch; 0 if it was not drawn yet

    @property
    def facts(self) -> list[Any]:
        """Facts that must agree on all ranks before the first batch."""
        weights = sorted([int(label), float(weight)] for label, weight in (self.source.class_weight or {}).items())
        facts = [self.source.kind, self.source.num_batches]
        if self.source.order is not None:  # the same on any number of ranks
            return [*facts, self.source.order, weights]
        return [*facts, self.source.sharded or self.rows, weights]


def check_numbers(least: int, **numbers: Any) -> None:
    """Refuse epochs, steps or samples that are no integers (Python's or NumPy's) or below `least`."""
    for name, value in numbers.items():
        if not isinstance(value, Integral):
            raise ArgumentTypeError(f"{name} = {value!r}: expected an integer >= {least}")
        if int(value) < least:
            raise ConfigError(f"{name} = {value}: expected an integer >= {least}")


def check_counts(**numbers: Any) -> None:
    """Refuse numbers below 1; None means that the user chose none."""
    check_numbers(1, **{name: value for name, value in numbers.items() if value is not None})


def check_frequency(frequency: Any) -> None:
    """Refuse a `validation_freq` that is neither a positive number of epochs nor a list of them."""
    if isinstance(frequency, Integral):
        check_numbers(1, validation_freq=frequency)
    elif not isinstance(frequency, Sequence) or isinstance(frequency, str):
        raise ConfigError(
            f"Expected `validation_freq` to be a list or int. Received: validation_freq={short(frequency)} of the type "
            f"{type(frequency)}."
        )


def is_array(data: Any) -> bool:
    """Whether data is an array or convertible to one; None, scalars and lists of more than one array are not."""
    if isinstance(data, list | tuple):
        return len(data) == 1 and not isinstance(data[0], list | tuple) and is_array(data[0])
    return not isinstance(data, np.generic) and (hasattr(data, "__array__") or hasattr(data, "__dlpack__"))


def as_array(data: Any, name: str, *, by_row: bool = False) -> Array:
    """Return an array, memory map, tensor or table of any library as a NumPy array, without a copy where possible.

    The only place where users' arrays take native byte order, and bfloat16 and float8 become float32; lists of numbers
    are refused, as in Keras. With `by_row`, a memory map of the other byte order is converted row by row, as a
    `LazyArray`.
    """
    if isinstance(data, np.ndarray):
        if is_mapped(data):
            guard_mapped_files()
        return _in_native_order(np.asarray(data), by_row)  # a memory map stays one
    if isinstance(data, LazyArray):
        return cast(Array, data)
    if isinstance(data, dict) or (isinstance(data, list | tuple) and len(data) > 1 and all(map(is_array, data))):
        received = f"a dictionary with {list(data)}" if isinstance(data, dict) else f"{len(data)} arrays"
        raise DataError(
            f"{name}: The structure of `inputs` doesn't match the expected structure. Expected: one array, as the "
            f"model has one input and one output. Received: {received}"
        )
    if not is_array(data):
        advice = "; convert it to an array" if isinstance(data, list | tuple) else ""
        if advice and data and isinstance(data[0], Mapping):
            advice = "; records are for models that were trained on a table, and this one was not: pass an array"
        raise DataError(f"Unrecognized data type: {name}={short(data)} (of type {type(data)}){advice}")
    if isinstance(data, list | tuple):
        return as_array(data[0], name, by_row=by_row)
    try:
        if hasattr(data, "detach") and hasattr(data, "cpu"):
            data = data.detach().cpu()  # a PyTorch tensor, which may be on a GPU or want gradients
        array = np.asarray(data) if hasattr(data, "__array__") else np.from_dlpack(data)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise DataError(f"{name}: {type(data)} cannot be read as a NumPy array: {error}") from error
    return _in_native_order(array, by_row)


def _in_native_order(array: Array, by_row: bool) -> Array:
    if by_row and array.ndim and not array.dtype.isnative and is_mapped(array):
        return cast(Array, LazyArray(NativeRows(array), np.arange(len(array))))
    known = type_of(array.dtype)
    return native(array if known.is_numpy else array.astype(known.portable))


def check_inputs(x: Any, expected: Expected) -> Any:
    """Return x as arrays, (rows, ...) each, nested as the model's inputs; refuse other dtypes and shapes."""
    if expected.encode is not None:
        x = expected.encode(x)
    if not tree.is_nested(expected.inputs) or tree.is_shape(expected.inputs):
        if expected.inputs is None and tree.is_nested(x):
            return tree.map_leaves(lambda path, array: _check_features(array, None, path), x)
        if isinstance(x, Mapping) and len(x) == 1 and list(x) == list(expected.input_names):
            (x,) = x.values()
        return _check_features(x, expected.inputs, "x")
    arrays = _matched(x, expected.inputs, "x", expected.input_names, by_key=not expected.takes_lists)
    if warning := tree.structure_warning(x, expected.inputs):
        warn(warning)
    checked = [
        None if array is None and path in expected.optional_inputs else _check_features(array, shape, f"x[{path!r}]")
        for array, (path, shape) in zip(arrays, tree.flat_shapes(expected.inputs), strict=True)
    ]
    lengths = [len(array) for array in checked if array is not None]
    if len(set(lengths)) != 1:
        raise DataError(
            "Data cardinality is ambiguous. Make sure all arrays contain the same number of samples. 'x' sizes: "
            f"{', '.join(map(str, lengths)) or 'none'}"
        )
    return tree.refilled(expected.inputs, iter(checked))


def _matched(data: Any, like: Any, name: str, names: Sequence[str], *, by_key: bool = False) -> list[Any]:
    try:
        return tree.matched(data, like, names, by_key=by_key)
    except ConfigError as error:
        raise DataError(f"{name}: {error}") from error


def _check_features(x: Any, expected: tuple[int | None, ...] | None, name: str) -> Array:
    if x is None or (isinstance(x, list | tuple) and len(x) == 1 and x[0] is None):
        raise DataError(f"The input '{name}' is not optional, but None was passed. Please provide a valid tensor.")
    features = as_array(x, name, by_row=True)
    if features.dtype.kind not in "uifb":
        raise DataError(f"{name} has dtype {features.dtype}: expected real numbers")
    if features.ndim == 0:
        raise DataError(f"{name} is the single number {features}: expected samples of shape {expected}")
    if expected is None:
        return features
    adjusted = axis_of_one(features.shape[1:], expected)
    if adjusted is not None:
        features = features.reshape(len(features), *adjusted)
    shape = features.shape[1:]
    if len(shape) != len(expected) or any(n is not None and n != size for n, size in zip(expected, shape, strict=True)):
        if None in expected:
            raise DataError(f"model expects samples of shape {expected}, data has samples of shape {shape}")
        flat = math.prod(n for n in expected if n is not None)
        raise DataError(
            f"model expects {flat} features of shape {expected}, data has {math.prod(shape)} of shape {shape}"
        )
    return features


def check_samples(x: Any, y: Any, weights: Any, expected: Expected) -> Samples:
    """Return features, targets and weights after checking them against the model and the loss.

    Weights are (rows,) or (rows, 1), or one for each step or pixel of an output: (rows, steps), (rows, height, width).
    """
    features = check_inputs(x, expected)
    rows = len(tree.leaves(features)[0])
    weights = _weights_of_outputs(weights, expected, rows)
    if expected.losses is None or (y is None and expected.custom_steps):
        targets = tree.map_leaves(lambda path, array: _check_unspecified(array, rows), y)
        return Samples(features, targets, weights, expected.dtype)
    if y is None:
        raise DataError("y is missing: the loss compares the model's outputs with it")
    if not tree.is_nested(expected.losses):
        if expected.custom_steps and tree.is_nested(y) and all(np.ndim(array) for array in tree.leaves(y)):
            targets = tree.map_leaves(lambda path, array: _check_unspecified(array, rows), y)
            return Samples(features, targets, weights, expected.dtype)
        targets = _check_targets(y, expected.losses, _single_shape(expected.outputs), rows, "y", expected.custom_steps)
        return Samples(features, targets, weights, expected.dtype)
    paths = tree.flat_shapes(expected.losses)
    shapes = (
        [None] * len(paths) if expected.outputs is None else [leaf for _, leaf in tree.flat_shapes(expected.outputs)]
    )
    try:
        by_output = _matched(_beside_none(y, paths), expected.losses, "y", expected.output_names)
    except DataError:
        if not expected.custom_steps:
            raise
        targets = tree.map_leaves(lambda path, array: _check_unspecified(array, rows), y)
        return Samples(features, targets, weights, expected.dtype)
    checked = [
        None if target is None else _check_targets(target, loss, shape, rows, f"y[{path!r}]", expected.custom_steps)
        for target, (path, loss), shape in zip(by_output, paths, shapes, strict=True)
    ]
    return Samples(features, tree.refilled(expected.losses, iter(checked)), weights, expected.dtype)


def _beside_none(y: Any, losses: Sequence[tuple[str, Any]]) -> Any:
    """Insert None for outputs without a loss, where y lists targets only of those with one."""
    targets = list(y) if isinstance(y, list | tuple) else [y]
    expected = sum(loss is not None for _, loss in losses)
    if expected == len(losses) or len(targets) != expected or any(tree.is_nested(target) for target in targets):
        return y
    rest = iter(targets)
    return [None if loss is None else next(rest) for _, loss in losses]


def _single_shape(outputs: Any) -> Any:
    shapes = [] if outputs is None else tree.flat_shapes(outputs)
    return shapes[0][1] if len(shapes) == 1 else None


def _check_targets(
    y: Any, loss: Any, output: tuple[int | None, ...] | None, rows: int, name: str, custom_steps: bool
) -> Array:
    """Return targets for an output; a model's own steps may compare them with something else."""
    targets = as_array(y, name)
    if targets.ndim == 0 or len(targets) != rows:
        raise DataError(
            "Data cardinality is ambiguous. Make sure all arrays contain the same number of samples. "
            f"x has {rows} samples, {name} has {len(targets) if targets.ndim else 'none'}"
        )
    if loss is not None and loss._takes_labels and output is not None and len(output) == 1 and output[-1] is not None:
        targets = whole_labels(targets, name)
        if loss._labels_number_outputs:
            check_labels(targets if loss._ignored is None else targets[targets != loss._ignored], output[-1], name)
        return targets.astype(np.int64, copy=False)
    if targets.dtype.kind not in "uifb":
        raise DataError(f"{name} has dtype {targets.dtype}: expected real numbers")
    if output is None or loss is None or loss._takes_labels is not False:
        return targets
    if targets.ndim == 1 and output == (1,):
        targets = targets[:, None]
    shape = targets.shape[1:]
    if not custom_steps and not _goes_with(shape, output):
        expected = f"expected targets of shape {output}, the model's output"
        raise DataError(f"{name}: {expected}, found {shape}{_advice(name, shape, output)}")
    return targets.astype(np.float64, copy=False) if targets.dtype.kind != "f" else targets


def _goes_with(target: tuple[int, ...], output: tuple[int | None, ...]) -> bool:
    """Whether a loss can compare a target with an output: lengths of 1 are broadcast, and may lack at the end.

    Axes are never added in front: then rows of the batch would be compared with steps.
    """
    if len(target) == len(output) + 1 and target[-1] == 1:
        target = target[:-1]
    elif len(output) == len(target) + 1 and output[-1] == 1:
        output = output[:-1]
    pairs = zip(output, target, strict=False)
    return len(target) == len(output) and all(n in (length, None) or 1 in (n, length) for n, length in pairs)


def _advice(name: str, target: tuple[int, ...], output: tuple[int | None, ...]) -> str:
    """Return how to reshape targets for an output, if that is possible; else nothing."""
    if None not in output and math.prod(target) == math.prod(n or 0 for n in output):
        return f"; pass {name}.reshape(-1, {', '.join(map(str, output))})"
    missing = len(output) - len(target)
    if missing > 0 and _goes_with((1,) * missing + target, output):
        return f"; pass {name}[:, {', '.join(['None'] * missing)}], to compare it with each"
    return ""


def _weights_of_outputs(weights: Any, expected: Expected, rows: int) -> Any:
    """Return sample weights, one array for all outputs or nested as they are, None for an output without."""
    losses, what = expected.losses, "sample_weight"
    if weights is None:
        return None
    if losses is None:  # the model's own steps interpret them
        return tree.map_leaves(lambda path, array: _check_weights(array, rows, what, None, None), weights)
    flat = tree.flat_shapes(losses)
    outputs = [(None, loss) for _, loss in flat]
    if expected.outputs is not None and len(shapes := tree.flat_shapes(expected.outputs)) == len(flat):
        outputs = [(shape, loss) for (_, shape), (_, loss) in zip(shapes, flat, strict=True)]
    names = list(losses) if isinstance(losses, Mapping) else list(expected.output_names)
    if isinstance(weights, Mapping) and names:
        if unknown := [key for key in weights if key not in names]:
            raise DataError(f"{what}: {unknown[0]!r} is not one of the outputs {names}")
        weights = {name: weights.get(name) for name in names}
    if len(outputs) == 1 or is_array(weights):
        if isinstance(weights, Mapping) and len(weights) == 1:
            (weights,) = weights.values()
        if weights is None:
            return None
        for shape, loss in outputs:
            checked = _check_weights(weights, rows, what, shape, loss)
        return checked
    if isinstance(weights, list | tuple) and all(isinstance(number, Real) for number in weights):
        as_array(weights, what)  # it says what to do with a list of numbers
    each = [
        None if array is None else _check_weights(array, rows, f"{what}[{path!r}]", shape, loss)
        for array, (path, _), (shape, loss) in zip(_matched(weights, losses, what, names), flat, outputs, strict=True)
    ]
    return None if all(array is None for array in each) else tree.refilled(losses, iter(each))


def _check_weights(
    sample_weight: Any, rows: int, name: str, output: tuple[int | None, ...] | None, loss: Loss | None
) -> Array:
    """Return weights of samples, or of their steps or pixels: the axes of an output except the last."""
    weights = as_array(sample_weight, name)
    axes = None if output is None else output if loss is None or loss._takes_labels is None else output[:-1]
    if weights.ndim > 1 and weights.shape[-1] == 1 and (axes is None or weights.ndim != len(axes) + 1):
        weights = weights[..., 0]
    parts = weights.shape[1:]
    fits = axes is None or (
        len(parts) <= len(axes) and all(n in (1, axis) or axis is None for n, axis in zip(parts, axes, strict=False))
    )
    if weights.dtype.kind not in "uifb" or weights.ndim < 1 or len(weights) != rows or not fits:
        more = f", or up to {(rows, *axes)}, one for each of a sample's parts" if axes else ""
        raise DataError(
            f"{name}: expected ({rows},) real numbers, one per sample{more}, found {weights.dtype} {weights.shape}"
        )
    if (wrong := ~np.isfinite(weights)).any():
        index = np.unravel_index(int(wrong.argmax()), weights.shape)
        place = ", ".join(map(str, index))
        raise DataError(f"{name}: {int(wrong.sum())} values are not finite, the first at index {place}")
    return weights.astype(np.float64, copy=False) if weights.dtype.kind != "f" else weights


def _check_unspecified(y: Any, rows: int) -> Array:
    """Return targets that only the model's custom steps interpret."""
    targets = as_array(y, "y")
    if targets.dtype.kind not in "uifb" or targets.ndim < 1 or len(targets) != rows:
        raise DataError(f"y: expected real numbers, one row for each of {rows} samples, found {targets.shape}")
    return targets


def weights_of_classes(y: Any, class_weight: Mapping[int, float]) -> Array:
    """Return each sample's weight from its class, as Keras; classes that are not named have weight 1."""
    if not isinstance(class_weight, Mapping) or not all(isinstance(label, Real) for label in class_weight):
        raise ConfigError(f"class_weight = {short(class_weight)}: expected a dictionary from class number to weight")
    labels = as_array(y, "y")
    if labels.ndim == 2 and labels.shape[1] > 1:
        labels = labels.argmax(axis=1)
    elif labels.ndim > 2:
        raise ConfigError("`class_weight` not supported for 3+ dimensional targets.")
    labels = np.round(labels.reshape(-1)).astype(np.int64)
    weights = np.ones(len(labels))
    for label, weight in class_weight.items():
        if not math.isfinite(weight):
            raise ConfigError(f"class_weight[{label}] = {weight}: expected a finite number")
        weights[labels == int(label)] = weight
    return weights


def unpack(data: Any, name: str = "data") -> tuple[Any, Any, Any]:
    """Return x, y and sample_weight of x, (x,), (x, y) or (x, y, sample_weight); None for missing ones."""
    if not isinstance(data, list | tuple):
        return data, None, None
    if not 1 <= len(data) <= 3:
        raise ConfigError(
            f"{name}: Data is expected to be in format `x`, `(x,)`, `(x, y)`, or `(x, y, sample_weight)`, found "
            f"{len(data)} parts"
        )
    x, y, weights = [*data, None, None][:3]
    return x, y, weights


def split_off(samples: Samples, fraction: float) -> tuple[Samples, Samples]:
    """Return training and validation samples: the last `fraction`, before any shuffling."""
    if not 0 < fraction < 1:
        raise ConfigError(f"`validation_split` must be between 0 and 1, received: {fraction}")
    rows = len(samples)
    at = math.floor(rows * (1.0 - fraction))
    if at in (0, rows):
        raise ConfigError(
            f"Training data contains {rows} samples, which is not sufficient to split it into a validation and "
            f"training set as specified by `validation_split={fraction}`. Either provide more data, or a different "
            "value for the `validation_split` argument."
        )
    return samples.part(0, at), samples.part(at, rows)


def training_sampler(
    samples: Samples,
    batch_size: int,
    comm: Communicator,
    *,
    seed: int,
    shuffle: bool | Literal["batch"] = True,
    drop_last: bool = False,
    shards: int | None = None,
) -> Sampler:
    """Return the sampler of a training: `shards` is the model's fixed number, reduced for smaller batches."""
    split, total = samples.split, samples.total
    if samples.rank_local:
        if shards is not None or shuffle == "batch":
            what = "shuffle='batch'" if shards is None else "--reproducible and shards_per_batch"
            raise ConfigError(
                f"{what}: not supported with static sharding (--sharding), where each rank has rows of its own"
            )
        return StaticSampler(
            total, batch_size, comm.replica, comm.replicas, seed=seed, shuffle=bool(shuffle), drop_last=drop_last
        )
    sampler = GlobalSampler(
        total,
        batch_size,
        comm.replica,
        comm.replicas,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        shards_per_batch=None if shards is None else min(shards, batch_size),
    )
    return sampler if split is None or split.rows is None else PartSampler(split.rows, sampler)


def evaluation_batches(
    samples: Samples,
    comm: Communicator,
    *,
    batch_size: int | None = None,
    otherwise: int | None = None,
    steps: int | None = None,
    together: bool = False,
    shards: int | None = None,
) -> ArrayBatches:
    """Return the batches of an evaluation or prediction of arrays: the only place that decides how they are cut.

    Unless the result depends on the batches, each rank takes a contiguous part of the rows, in its own batches.
    `together` keeps all ranks in step: callbacks see every batch, or the result depends on how samples are batched.
    """
    arrays, spec = samples.stored()
    rows = len(samples)
    if samples.rank_local:
        return ArrayBatches(arrays, spec, LocalSampler(0, rows, EVALUATION_ROWS), restarts=True)
    if shards is not None and rows:
        chosen = batch_size is not None or steps is not None or together
        rows_wanted = batch_size or otherwise
        size = rows_of_batch(rows_wanted, rows, steps) if chosen else shards * EVALUATION_ROWS
        size = size if rows_wanted else max(size, shards)  # enough for any number of ranks
        position = (comm.replica, comm.replicas)
        fixed = GlobalSampler(rows, size, *position, shuffle=False, shards_per_batch=min(shards, size))
        return ArrayBatches(arrays, spec, fixed, steps, restarts=True)
    least = comm.replicas if batch_size is None else 1  # a user's own that leaves a rank without work is refused
    if steps is not None or together:
        batch_size = rows_of_batch(batch_size or otherwise, rows, steps)
    if rows == 0 or (batch_size is None and not together):
        part = cut(0, rows, comm.replicas)[comm.replica]
        return ArrayBatches(arrays, spec, LocalSampler(*part, EVALUATION_ROWS), steps, restarts=True)
    assert batch_size is not None
    ordered = GlobalSampler(rows, max(batch_size, least), comm.replica, comm.replicas, shuffle=False)
    return ArrayBatches(arrays, spec, ordered, steps, restarts=True)


def rows_of_batch(batch_size: int | None, rows: int, steps: int | None) -> int:
    """Return the samples of a batch as Keras: 32 by default, or as many as let `steps` cover the rows."""
    if batch_size is not None:
        return batch_size
    return 32 if steps is None else max(1, math.ceil(rows / steps))


# Batches from the user's code


def refuse_split(*data: Any) -> None:
    """Refuse to split anything but (nested) arrays."""
    wrong = list(dict.fromkeys(type(leaf) for leaf in tree.leaves(list(data)) if not is_array(leaf)))
    if wrong:
        raise ConfigError(
            "Argument `validation_split` is only supported for tensors or NumPy arrays. Found incompatible type in the "
            f"input: {wrong}"
        )


def source_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    class_weight: Mapping[int, float] | None = None,
    shuffle: bool | str = False,
    seed: int = 0,
    comm: Communicator,
) -> BatchSource | None:
    """Return the source of x if it makes its own batches, None if it is an array: the only place that decides.

    In this order, x is an array or convertible to one (None); a `PyDataset` or an object with `__getitem__` and
    `__len__` or `num_batches`; an iterator such as a generator, whose first two batches are drawn before the training;
    or another iterable, such as a torch DataLoader. Every rank draws all batches and takes its part, except of a
    PyDataset with `shard`.
    """
    if x is None:
        raise ConfigError("x is missing")
    if is_array(x) or (tree.is_nested(x) and x and all(map(is_array, tree.leaves(x)))):
        return None
    if isinstance(x, str | bytes | list | tuple | dict) or hasattr(x, "tocoo"):
        as_array(x, "x")
    by_number = hasattr(x, "__getitem__") and (hasattr(x, "__len__") or hasattr(x, "num_batches"))
    if by_number:
        kind = "PyDataset"
    elif hasattr(x, "__next__"):
        kind = "generator"
    elif hasattr(x, "__iter__"):
        kind = "torch DataLoader" if _is_torch_loader(x) else type(x).__name__
    else:
        raise ConfigError(f"Unrecognized data type: x={short(x)} (of type {type(x)})")
    for name, value, words in (("y", y, "the targets"), ("sample_weights", sample_weight, "the sample weights")):
        if value is not None:
            raise ConfigError(
                f"When providing `x` as a {kind}, `{name}` should not be passed. Instead, {words} should be included "
                f"as part of the {kind}."
            )
    if by_number:
        rank, world = comm.replica, comm.replicas
        source = PyDatasetSource(x, class_weight=class_weight, shuffle=bool(shuffle), seed=seed, rank=rank, world=world)
        if shuffle and source.num_batches is None:
            _warn_of_shuffle("an infinite PyDataset. The PyDataset is expected to already be shuffled.")
        return source
    if class_weight is not None:
        words = "Python generator" if kind == "generator" else kind
        raise ConfigError(
            f"Argument `class_weight` is not supported for {words} inputs. Received: class_weight={class_weight}"
        )
    if kind == "generator":
        if shuffle:
            _warn_of_shuffle("a generator. The generator is expected to yield already-shuffled data.")
        return GeneratorSource(x)
    if shuffle:
        _warn_of_shuffle(f"a {kind}. The {kind.split()[-1]} is expected to already be shuffled.")
    return LoaderSource(x, kind)


def stream_batches(
    source: BatchSource,
    expected: Expected,
    comm: Communicator,
    steps: int | None,
    *,
    rows: int = 0,
    mode: Mode = "training",
    shards: int | None = None,
) -> StreamBatches:
    """Return the batches of a source, each checked as arrays are."""

    def read(parts: tuple[Any, ...]) -> Samples:
        x, y, weights = [*parts, None, None][:3]
        if mode == "prediction":
            return Samples(check_inputs(x, expected), dtype=expected.dtype)
        if source.class_weight is not None and y is not None:
            weights = weights_of_classes(y, source.class_weight)
        return check_samples(x, y, weights, expected)

    return StreamBatches(source, lambda parts: read(parts).stored(), comm, steps, rows=rows, mode=mode, shards=shards)


def _is_torch_loader(x: Any) -> bool:
    return any(cls.__name__ == "DataLoader" and "torch.utils.data" in cls.__module__ for cls in type(x).__mro__)


def _warn_of_shuffle(what: str) -> None:
    warn(f"`shuffle=True` was passed, but will be ignored since the data `x` was provided as {what}")
