"""What users hand to `fit`, `evaluate` and `predict`, checked against the model and made into batches."""

import math
from collections.abc import Mapping, Sequence
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
from dptrain.batches.stream import StreamBatches, What
from dptrain.batches.structure import Batch
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

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expected:
    """What a model takes.

    Attributes:
        inputs: shape of a sample of each input, nested as the inputs; None for anything.
        outputs: likewise of the outputs; None where nobody knows.
        losses: the loss of each output, nested as the outputs, None for one without; None where the model's own steps
            know what targets are.
        own_steps: the model's own steps may do without targets.
        dtype: of floating-point numbers.
        input_names: under which inputs that are a list may come in a dictionary.
        output_names: likewise.
        takes_lists: whether a list may stand for a dictionary of inputs.
    """

    inputs: Any
    outputs: Any = None
    losses: Any = None
    own_steps: bool = False
    dtype: str = "float32"
    input_names: Sequence[str] = ()
    output_names: Sequence[str] = ()
    takes_lists: bool = False


@dataclass(frozen=True)
class Samples:
    """Arrays that belong together, checked.

    Attributes:
        x: (rows, ...) features in their own dtypes, nested as the model's inputs.
        y: (rows, ...) targets, nested as its outputs, or None.
        weights: (rows, ...) of the samples, or of their parts, in the loss; nested as the outputs, or None for ones.
        dtype: of floating-point numbers in the model.
        split: which of the rows are used, or are this rank's alone, where the user says so.
    """

    x: Any
    y: Any = None
    weights: Any = None
    dtype: str = "float32"
    split: Split | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return len(tree.leaves(self.x)[0])

    @property
    def total(self) -> int:
        """Number of samples over all ranks."""
        return len(self) if self.split is None else len(self.split)

    @property
    def are_own(self) -> bool:
        """Whether other ranks have other rows."""
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
            tree.map_leaves(lambda path, one: one[start:stop], each) for each in (self.x, self.y, self.weights)
        )
        return Samples(x, y, weights, self.dtype)

    @property
    def facts(self) -> list[Any]:
        """What must be the same on all ranks."""
        if self.are_own:
            return [self.total]
        rows = () if self.split is None or self.split.rows is None else (self.split.rows,)
        named = {"x": self.x, "y": self.y, "sample_weight": self.weights}
        names = [path for path, _ in tree.flatten(named)]
        return [*(names if len(names) > 3 else []), *fingerprint(*tree.leaves(named), *rows)]

    def stored(self) -> tuple[list[Array], Batch]:
        """Return the arrays as a feed takes them, targets and weights in the model's dtype, and what they are."""
        found: dict[str, Array] = {}

        def name(path: str, array: Array) -> str:
            part = ("x", "y", "sample_weight")[int(path[0])] if path[:1].isdigit() else "x"
            full = part + path[1:]
            keep = part == "x" or array.dtype.kind != "f"
            found[full] = array if keep else np.ascontiguousarray(array, self.dtype)
            return full

        data = self.data if isinstance(self.data, tuple) else (self.data,)
        named = tree.map_leaves(name, data)
        arrays = list(found.values())
        shapes = tuple(array.shape for array in arrays)
        about = Batch(
            named if isinstance(self.data, tuple) else named[0], shapes, tuple(a.dtype.str for a in arrays), self.dtype
        )
        return arrays, about


@dataclass(frozen=True)
class Stream:
    """Batches that the user's own code makes.

    Attributes:
        source: where they come from.
        rows: of the first batch; 0 if nobody has looked.
    """

    source: BatchSource
    rows: int = 0

    @property
    def facts(self) -> list[Any]:
        """What must be the same on all ranks, before the first batch."""
        weights = sorted([int(label), float(weight)] for label, weight in (self.source.class_weight or {}).items())
        return [self.source.kind, self.source.num_batches, self.source.sharded or self.rows, weights]


def check_numbers(least: int, **numbers: Any) -> None:
    """Refuse numbers of epochs, steps and samples that mean nothing.

    Args:
        least: the lowest that is allowed.
        numbers: by argument; NumPy's are as good as Python's.

    Raises:
        ConfigError: one of them is below, or an ArgumentTypeError: no integer.
    """
    for name, value in numbers.items():
        if not isinstance(value, Integral):
            raise ArgumentTypeError(f"{name} = {value!r}: expected an integer >= {least}")
        if int(value) < least:
            raise ConfigError(f"{name} = {value}: expected an integer >= {least}")


def check_given(**numbers: Any) -> None:
    """Refuse as `check_numbers` what is below 1, but for None, which stands for what nobody has chosen."""
    check_numbers(1, **{name: value for name, value in numbers.items() if value is not None})


def check_frequency(frequency: Any) -> None:
    """Refuse a `validation_freq` that is neither a number of epochs nor a list of them.

    Raises:
        ConfigError: it is something else (a ValueError, as in Keras), or a number below 1.
    """
    if isinstance(frequency, Integral):
        check_numbers(1, validation_freq=frequency)
    elif not isinstance(frequency, Sequence) or isinstance(frequency, str):
        raise ConfigError(
            f"Expected `validation_freq` to be a list or int. Received: validation_freq={short(frequency)} of the type "
            f"{type(frequency)}."
        )


def is_array(data: Any) -> bool:
    """Return whether data is an array, or an object that says how to read it as one; None and single numbers are not.

    A list or tuple that holds one array is one, as in Keras, which takes it for the list of a model's inputs.
    """
    if isinstance(data, list | tuple):
        return len(data) == 1 and not isinstance(data[0], list | tuple) and is_array(data[0])
    return not isinstance(data, np.generic) and (hasattr(data, "__array__") or hasattr(data, "__dlpack__"))


def as_array(data: Any, name: str, *, by_row: bool = False) -> Array:
    """Return an array, a memory map, a tensor or a table of any library as NumPy's, without a copy where that can be.

    It is in this machine's byte order: the one place where arrays of users become those that feeds and kernels read.
    Lists of numbers are refused, as in Keras.

    Args:
        data: an array, or what has `__array__` or `__dlpack__`; or a list or tuple of one of these.
        name: for messages: "x", "y", "sample_weight".
        by_row: a memory map of the other byte order is brought into this machine's row by row, as a `LazyArray`.

    Raises:
        DataError: it is none.
    """
    if isinstance(data, np.ndarray):
        if is_mapped(data):
            guard_mapped_files()
        return _in_native_order(np.asarray(data), by_row)  # a memory map stays one
    if isinstance(data, LazyArray):
        return cast(Array, data)
    if isinstance(data, dict) or (isinstance(data, list | tuple) and len(data) > 1 and all(map(is_array, data))):
        found = f"a dictionary with {list(data)}" if isinstance(data, dict) else f"{len(data)} arrays"
        raise DataError(
            f"{name}: The structure of `inputs` doesn't match the expected structure. Expected: one array, as the "
            f"model has one input and one output. Received: {found}"
        )
    if not is_array(data):
        advice = "; make an array of it" if isinstance(data, list | tuple) else ""
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
    return native(array)


def check_inputs(x: Any, expected: Expected) -> Any:
    """Return x as arrays, (rows, ...) each, nested as the model's inputs.

    Raises:
        DataError: no arrays of real numbers, or others than the model has inputs, or another shape.
    """
    if not tree.is_nested(expected.inputs) or tree.is_shape(expected.inputs):
        if expected.inputs is None and tree.is_nested(x):
            return tree.map_leaves(lambda path, one: _check_features(one, None, path), x)
        if isinstance(x, Mapping) and len(x) == 1 and list(x) == list(expected.input_names):
            (x,) = x.values()
        return _check_features(x, expected.inputs, "x")
    given = _matched(x, expected.inputs, "x", expected.input_names, by_key=not expected.takes_lists)
    checked = [
        _check_features(one, shape, f"x[{path!r}]")
        for one, (path, shape) in zip(given, tree.flat_shapes(expected.inputs), strict=True)
    ]
    if len({len(one) for one in checked}) > 1:
        raise DataError(
            "Data cardinality is ambiguous. Make sure all arrays contain the same number of samples. 'x' sizes: "
            f"{', '.join(str(len(one)) for one in checked)}"
        )
    return tree.refilled(expected.inputs, iter(checked))


def _matched(data: Any, like: Any, name: str, names: Sequence[str], *, by_key: bool = False) -> list[Any]:
    try:
        return tree.matched(data, like, names, by_key=by_key)
    except ConfigError as error:
        raise DataError(f"{name}: {error}") from error


def _check_features(x: Any, expected: tuple[int | None, ...] | None, name: str) -> Array:
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
    if len(shape) != len(expected) or any(n is not None and n != own for n, own in zip(expected, shape, strict=True)):
        if None in expected:
            raise DataError(f"model expects samples of shape {expected}, data has samples of shape {shape}")
        flat = math.prod(n for n in expected if n is not None)
        raise DataError(
            f"model expects {flat} features of shape {expected}, data has {math.prod(shape)} of shape {shape}"
        )
    return features


def check_samples(x: Any, y: Any, weights: Any, expected: Expected) -> Samples:
    """Return features, targets and weights after checking them against the model and the loss.

    Args:
        x: (rows, ...), nested as the model's inputs.
        y: labels (rows,) or (rows, 1), or values (rows, ...), as the loss takes them, nested as the outputs.
        weights: (rows,) or (rows, 1), or one for each step or pixel, (rows, steps), (rows, height, width), of outputs
            that have such; or None. Of several outputs one for all, or nested.
        expected: what the model takes.

    Raises:
        DataError: they do not go together.
    """
    features = check_inputs(x, expected)
    rows = len(tree.leaves(features)[0])
    weights = _weights_of_outputs(weights, expected, rows)
    if expected.losses is None or (y is None and expected.own_steps):
        targets = tree.map_leaves(lambda path, one: _check_unspecified(one, rows), y)
        return Samples(features, targets, weights, expected.dtype)
    if y is None:
        raise DataError("y is missing: the loss compares the model's outputs with it")
    if not tree.is_nested(expected.losses):
        targets = _check_targets(y, expected.losses, _of_one(expected.outputs), rows, "y")
        return Samples(features, targets, weights, expected.dtype)
    paths = tree.flat_shapes(expected.losses)
    shapes = [None] * len(paths) if expected.outputs is None else [one for _, one in tree.flat_shapes(expected.outputs)]
    given = _matched(_beside_none(y, paths), expected.losses, "y", expected.output_names)
    checked = [
        None if one is None else _check_targets(one, loss, shape, rows, f"y[{path!r}]")
        for one, (path, loss), shape in zip(given, paths, shapes, strict=True)
    ]
    return Samples(features, tree.refilled(expected.losses, iter(checked)), weights, expected.dtype)


def _beside_none(y: Any, losses: Sequence[tuple[str, Any]]) -> Any:
    """Return targets as they are; those of the outputs with a loss alone, with None for the others.

    Args:
        y: as `check_samples`.
        losses: of the outputs in order, with their paths.
    """
    given = list(y) if isinstance(y, list | tuple) else [y]
    wanted = sum(loss is not None for _, loss in losses)
    if wanted == len(losses) or len(given) != wanted or any(tree.is_nested(one) for one in given):
        return y
    rest = iter(given)
    return [None if loss is None else next(rest) for _, loss in losses]


def _of_one(outputs: Any) -> Any:
    found = [] if outputs is None else tree.flat_shapes(outputs)
    return found[0][1] if len(found) == 1 else None


def _check_targets(y: Any, loss: Any, output: tuple[int | None, ...] | None, rows: int, name: str) -> Array:
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
    if not _goes_with(shape, output):
        raise DataError(f"{name}: expected targets of shape {output}, the model's output, found {shape}")
    return targets.astype(np.float64, copy=False) if targets.dtype.kind != "f" else targets


def _goes_with(target: tuple[int, ...], output: tuple[int | None, ...]) -> bool:
    """Whether a loss can compare a sample's target with its output.

    As in Keras either may lack an axis of length 1 at the end, and a target is repeated along axes of length 1.
    """
    if len(target) == len(output) + 1 and target[-1] == 1:
        target = target[:-1]
    elif len(output) == len(target) + 1 and output[-1] == 1:
        output = output[:-1]
    pairs = zip(output, target, strict=False)
    return len(target) == len(output) and all(n in (own, None) or own == 1 for n, own in pairs)


def _weights_of_outputs(weights: Any, expected: Expected, rows: int) -> Any:
    """Return sample weights, one for all outputs or nested as these, None for an output without.

    Raises:
        DataError: no arrays of real numbers, or others than there are outputs, or another shape.
    """
    losses, what = expected.losses, "sample_weight"
    if weights is None:
        return None
    if losses is None:  # the model's own steps know what they are
        return tree.map_leaves(lambda path, array: _check_weights(array, rows, what, None, None), weights)
    flat = tree.flat_shapes(losses)
    outputs = [(None, loss) for _, loss in flat]
    if expected.outputs is not None and len(shapes := tree.flat_shapes(expected.outputs)) == len(flat):
        outputs = [(shape, loss) for (_, shape), (_, loss) in zip(shapes, flat, strict=True)]
    names = list(losses) if isinstance(losses, Mapping) else list(expected.output_names)
    if isinstance(weights, Mapping) and names:
        if unknown := [key for key in weights if key not in names]:
            raise DataError(f"{what}: {unknown[0]!r} is none of the outputs {names}")
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
        as_array(weights, what)  # which says what to do with a list of numbers
    each = [
        None if array is None else _check_weights(array, rows, f"{what}[{path!r}]", shape, loss)
        for array, (path, _), (shape, loss) in zip(_matched(weights, losses, what, names), flat, outputs, strict=True)
    ]
    return None if all(array is None for array in each) else tree.refilled(losses, iter(each))


def _check_weights(
    sample_weight: Any, rows: int, name: str, output: tuple[int | None, ...] | None, loss: Loss | None
) -> Array:
    """Return weights of samples, or of their steps or pixels, which are the axes of an output but for the last.

    Args:
        sample_weight: the user's.
        rows: of the samples.
        name: for messages.
        output: shape of a sample's output; None where nobody knows.
        loss: of that output; a user's own may have a number for each element of it.

    Raises:
        DataError: another shape, or not all of them are finite real numbers.
    """
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
            f"{name}: expected ({rows},) real numbers, one a sample{more}, found {weights.dtype} {weights.shape}"
        )
    if not np.isfinite(weights).all():
        raise DataError(f"{name}: {int((~np.isfinite(weights)).sum())} values are not finite")
    return weights.astype(np.float64, copy=False) if weights.dtype.kind != "f" else weights


def _check_unspecified(y: Any, rows: int) -> Array:
    """Return targets where the model's own steps alone know what they are."""
    targets = as_array(y, "y")
    if targets.dtype.kind not in "uifb" or targets.ndim < 1 or len(targets) != rows:
        raise DataError(f"y: expected real numbers, one row for each of {rows} samples, found {targets.shape}")
    return targets


def weights_of_classes(y: Any, class_weight: Mapping[int, float]) -> Array:
    """Return each sample's weight from its class, 1 for classes that are not named, as Keras.

    Args:
        y: labels (rows,) or (rows, 1), or one-hot (rows, classes).
        class_weight: class -> weight.

    Raises:
        ConfigError: targets that name no class, no dictionary of class numbers, or weights that are not finite.
    """
    if not isinstance(class_weight, Mapping) or not all(isinstance(one, Real) for one in class_weight):
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
    """Return x, y and sample_weight of x, (x,), (x, y) or (x, y, sample_weight); what is missing is None.

    Raises:
        ConfigError: it is none of these.
    """
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
    """Return training and validation samples, the last `fraction` of them, before any shuffling.

    Raises:
        ConfigError: one of them would be empty.
    """
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
    """Return the order in which samples are trained on, and how ranks share them.

    Args:
        samples: what is trained on.
        batch_size: samples of a global batch.
        comm: the ranks.
        seed: of the order.
        shuffle: as `GlobalSampler`.
        drop_last: as `GlobalSampler`.
        shards: as the model was compiled with; of smaller batches than that fewer.

    Raises:
        ConfigError: as `GlobalSampler`; or what needs all rows on all ranks, of samples that are a rank's own.
    """
    split, total = samples.split, samples.total
    if samples.are_own:
        if shards is not None or shuffle == "batch":
            what = "shuffle='batch'" if shards is None else "--reproducible and shards_per_batch"
            raise ConfigError(f"{what}: not supported with static sharding (--sharding), where rows are a rank's own")
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
    """Return the batches of an evaluation or prediction of arrays: the one place that decides how they are cut.

    Where nothing depends on it, each rank takes a contiguous part of the rows, in pieces of its own.

    Args:
        samples: the arrays.
        comm: the ranks.
        batch_size: samples of a global batch that the user has chosen for this; None for none.
        otherwise: what else says it, should it matter: the training's.
        steps: end after that many batches; if there is no batch size they hold all samples.
        together: all ranks take the same steps: hooks are called for every batch, or the result depends on how samples
            are cut into batches.
        shards: a fixed number of them, as in the training, so that sums have the same bits on any number of ranks;
            all ranks have all rows.
    """
    arrays, about = samples.stored()
    rows = len(samples)
    if samples.are_own:
        return ArrayBatches(arrays, about, LocalSampler(0, rows, EVALUATION_ROWS), restarts=True)
    if shards is not None and rows:
        chosen = batch_size is not None or steps is not None or together
        known = batch_size or otherwise
        size = rows_of_batch(known, rows, steps) if chosen else shards * EVALUATION_ROWS
        size = size if known else max(size, shards)  # enough for any number of ranks
        own = (comm.replica, comm.replicas)
        fixed = GlobalSampler(rows, size, *own, shuffle=False, shards_per_batch=min(shards, size))
        return ArrayBatches(arrays, about, fixed, steps, restarts=True)
    least = comm.replicas if batch_size is None else 1  # a user's own that leaves a rank without work is refused
    if steps is not None or together:
        batch_size = rows_of_batch(batch_size or otherwise, rows, steps)
    if rows == 0 or (batch_size is None and not together):
        part = cut(0, rows, comm.replicas)[comm.replica]
        return ArrayBatches(arrays, about, LocalSampler(*part, EVALUATION_ROWS), steps, restarts=True)
    assert batch_size is not None
    ordered = GlobalSampler(rows, max(batch_size, least), comm.replica, comm.replicas, shuffle=False)
    return ArrayBatches(arrays, about, ordered, steps, restarts=True)


def rows_of_batch(batch_size: int | None, rows: int, steps: int | None) -> int:
    """Return the samples of a batch of arrays as Keras: 32 if nobody says, or such that `steps` go through them."""
    if batch_size is not None:
        return batch_size
    return 32 if steps is None else max(1, math.ceil(rows / steps))


# Batches that the user's own code makes


def refuse_split(*data: Any) -> None:
    """Refuse to split anything but arrays, which may be nested.

    Raises:
        ConfigError: one of them is none.
    """
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
    """Return where batches come from if x makes them itself, None if x is an array: the one place that tells.

    x is, in this order:

    - an array, a memory map, or an object with `__array__` or `__dlpack__`, such as tensors and tables: None.
    - a `dptrain.utils.PyDataset`, or any object with `__getitem__` and `__len__` or `num_batches`: batches by number.
    - a generator or another iterator: a tuple (x,), (x, y) or (x, y, sample_weight) a batch, global batches, the same
      on every rank. It is drawn from two batches before the training and up to two ahead of it.
    - any other object that can be iterated over, such as a torch DataLoader: the same, afresh for every epoch; batches
      may also be lists, or x alone.

    Batches may differ in size. Every rank draws them all and takes its part, but for a PyDataset with `shard`.

    Args:
        x: the user's.
        y: must be None unless x is an array.
        sample_weight: the same.
        class_weight: for arrays and PyDatasets.
        shuffle: for arrays and PyDatasets; otherwise a warning.
        seed: of the order of a PyDataset's batches.
        comm: the ranks.

    Raises:
        ConfigError: x is none of these, or an argument does not go with it.
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
    what: What = "training",
    shards: int | None = None,
) -> StreamBatches:
    """Return the batches of a source, each checked as arrays are.

    Args:
        source: where they come from.
        expected: what the model takes.
        comm: the ranks.
        steps: of an epoch.
        rows: of the first batch, if anybody knows.
        what: as `StreamBatches`.
        shards: likewise.

    Raises:
        ConfigError: as `StreamBatches`.
    """

    def read(parts: tuple[Any, ...]) -> Samples:
        x, y, weights = [*parts, None, None][:3]
        if what == "prediction":
            return Samples(check_inputs(x, expected), dtype=expected.dtype)
        if source.class_weight is not None and y is not None:
            weights = weights_of_classes(y, source.class_weight)
        return check_samples(x, y, weights, expected)

    return StreamBatches(source, lambda parts: read(parts).stored(), comm, steps, rows=rows, what=what, shards=shards)


def _is_torch_loader(x: Any) -> bool:
    """Return whether x is a PyTorch DataLoader, which need not be imported for that."""
    return any(one.__name__ == "DataLoader" and "torch.utils.data" in one.__module__ for one in type(x).__mro__)


def _warn_of_shuffle(what: str) -> None:
    warn(f"`shuffle=True` was passed, but will be ignored since the data `x` was provided as {what}")
