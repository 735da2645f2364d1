"""`keras.utils`."""

import gc
import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dptrain import ops
from dptrain.batches.packing import PackedSequences, pack_sequences
from dptrain.batches.picture_dataset import image_dataset_from_directory
from dptrain.batches.py_dataset import PyDataset
from dptrain.batches.sampling import fix_shards
from dptrain.batches.series import timeseries_dataset_from_array
from dptrain.batches.sharded_dataset import ShardedDataset
from dptrain.batches.text_dataset import audio_dataset_from_directory, text_dataset_from_directory
from dptrain.config import epsilon
from dptrain.data.cached_files import get_file
from dptrain.data.readers.images import array_to_img, img_to_array, load_img, save_img
from dptrain.errors import ConfigError
from dptrain.layers.node import KerasTensor, get_source_inputs
from dptrain.layers.preprocessing import bounding_boxes
from dptrain.mixed_precision import forget_dtype_policy
from dptrain.program import tree
from dptrain.program.tensor import Tensor, Variable
from dptrain.program.types import standardize_dtype
from dptrain.random import Purpose, default_seed, set_default_seed, stream
from dptrain.registry.arguments import checked_arguments
from dptrain.registry.names import not_there
from dptrain.registry.serialization import (
    custom_object_scope,
    get_custom_objects,
    get_registered_name,
    get_registered_object,
    register_keras_serializable,
)
from dptrain.runtime.defaults import REPRODUCIBLE_SHARDS
from dptrain.runtime.launch.launcher import detect_launch
from dptrain.runtime.output.progbar import Progbar
from dptrain.tree import map_structure

# Its name in Keras 2.
Sequence = PyDataset

__all__ = [
    "CustomObjectScope",
    "FeatureSpace",
    "PackedSequences",
    "Progbar",
    "PyDataset",
    "Sequence",
    "ShardedDataset",
    "array_to_img",
    "audio_dataset_from_directory",
    "bounding_boxes",
    "check_seed",
    "clear_session",
    "custom_object_scope",
    "default_seed",
    "deserialize_keras_object",
    "disable_interactive_logging",
    "enable_interactive_logging",
    "enable_op_determinism",
    "get_custom_objects",
    "get_file",
    "get_registered_name",
    "get_registered_object",
    "get_source_inputs",
    "image_dataset_from_directory",
    "img_to_array",
    "is_interactive_logging_enabled",
    "is_keras_tensor",
    "load_img",
    "model_to_dot",
    "normalize",
    "pack_sequences",
    "pack_x_y_sample_weight",
    "pad_sequences",
    "plot_model",
    "rank",
    "register_keras_serializable",
    "save_img",
    "serialize_keras_object",
    "set_random_seed",
    "split_dataset",
    "standardize_dtype",
    "text_dataset_from_directory",
    "timeseries_dataset_from_array",
    "to_categorical",
    "unpack_x_y_sample_weight",
    "world_size",
]

CustomObjectScope = custom_object_scope

# Names that Keras has here, of the rooms above.
_ABOVE = {
    **dict.fromkeys(
        ("disable_interactive_logging", "enable_interactive_logging", "is_interactive_logging_enabled"), "config"
    ),
    "FeatureSpace": "models.feature_space",
    "deserialize_keras_object": "saving",
    "model_to_dot": "models.plotting",
    "plot_model": "models.plotting",
    "serialize_keras_object": "saving",
}

if TYPE_CHECKING:
    from dptrain.config import (
        disable_interactive_logging,
        enable_interactive_logging,
        is_interactive_logging_enabled,
    )
    from dptrain.models.feature_space import FeatureSpace
    from dptrain.models.plotting import model_to_dot, plot_model
    from dptrain.saving import deserialize_keras_object, serialize_keras_object
else:  # type checkers would accept any name
    _missing = not_there("utils", __all__)

    def __getattr__(name: str) -> Any:
        if name not in _ABOVE:
            return _missing(name)
        return getattr(import_module(f"dptrain.{_ABOVE[name]}"), name)


@checked_arguments
def set_random_seed(seed: int) -> None:
    """Set the seed of models made from now on (initial weights, shuffling, dropout), of NumPy's and Python's `random`.

    The first model without a seed of its own takes this one, each later one another that follows from it. Call it with
    the same seed on every rank, before the script draws numbers.

    Args:
        seed: 0 to 2**63 - 1 (else ConfigError). NumPy's legacy generator takes its last 32 bits.

    Source: keras/src/utils/rng_utils.py, Keras 3.15.
    """
    set_default_seed(check_seed(seed))
    random.seed(seed)
    np.random.seed(seed % 2**32)


@checked_arguments
def enable_op_determinism(shards_per_batch: int = REPRODUCIBLE_SHARDS) -> None:
    """Make trainings and evaluations give the same bits on any number of ranks from now on, at the cost of speed.

    Call it on every rank before `fit`; `DPTRAIN_REPRODUCIBLE=1` in the environment does the same. Every global batch is
    cut into `shards_per_batch` shards, at least as many as ranks, some of them perhaps empty, whose sums are added in a
    fixed tree. Named after TensorFlow's, which promises the same bits on the same number of devices.
    """
    if shards_per_batch < 1:
        raise ConfigError(f"shards_per_batch = {shards_per_batch}: expected an integer >= 1")
    fix_shards(shards_per_batch)


def clear_session(free_memory: bool = True) -> None:
    """Forget the global policy and, with `free_memory`, free unreferenced models; random streams go on, as in Keras."""
    forget_dtype_policy()
    if free_memory:
        gc.collect()


def is_keras_tensor(x: Any) -> bool:
    """Whether it is a symbolic tensor: an `Input`, or computed from one."""
    return isinstance(x, KerasTensor)


@checked_arguments
def normalize(x: Any, axis: int = -1, order: Any = 2) -> Any:
    """Return an array with vectors of length 1 (or still 0) along an axis; `order` is that of `numpy.linalg.norm`.

    For a tensor, also inside a step, a tensor; `order` is then an integer of at least 1, else ConfigError.
    """
    if isinstance(x, Tensor | Variable):
        if not isinstance(order, int) or order < 1:
            raise ConfigError(f"Argument `order` must be an int >= 1. Received: order={order}")
        return ops.divide(x, ops.maximum(ops.norm(x, order, axis, keepdims=True), epsilon()))
    array = np.asarray(x)
    lengths = np.linalg.norm(array, order, axis, keepdims=True)
    return np.asarray(array / np.where(lengths == 0, 1, lengths))


@checked_arguments
def pad_sequences(
    sequences: Any,
    maxlen: int | None = None,
    dtype: npt.DTypeLike = "int32",
    padding: str = "pre",
    truncating: str = "pre",
    value: Any = 0.0,
) -> npt.NDArray[Any]:
    """Return sequences of different lengths as an array (sequences, maxlen, *shape of an element).

    Like `keras.utils.pad_sequences`. ConfigError for no sequences, or elements of different shapes.

    Args:
        sequences: lists, whose elements may be arrays of one shape.
        maxlen: the length of all; by default that of the longest.
        dtype: of the array.
        padding: "pre" or "post": where short ones are padded.
        truncating: "pre" or "post": where long ones lose elements.
        value: of the padding.
    """
    for name, word in (("Padding", padding), ("Truncating", truncating)):
        if word not in ("pre", "post"):
            raise ConfigError(f'{name} type "{word}" not understood')
    if not hasattr(sequences, "__len__"):
        raise ConfigError("`sequences` must be iterable.")
    for sequence in sequences:
        if not hasattr(sequence, "__len__"):
            raise ConfigError(f"`sequences` must be a list of iterables. Found non-iterable: {sequence}")
    longest = max(map(len, sequences), default=0) if maxlen is None else maxlen
    shape = next((np.asarray(sequence).shape[1:] for sequence in sequences if len(sequence)), ())
    padded = np.full((len(sequences), longest, *shape), value, dtype)
    for number, sequence in enumerate(sequences):
        cut = np.asarray(sequence[-longest:] if truncating == "pre" else sequence[:longest], dtype)[:longest]
        if len(sequence) and cut.shape[1:] != shape:
            raise ConfigError(
                f"Shape of sample {cut.shape[1:]} of sequence at position {number} is different from expected shape "
                f"{shape}"
            )
        if len(cut):
            padded[number, slice(-len(cut), None) if padding == "pre" else slice(len(cut))] = cut
    return padded


@checked_arguments
def split_dataset(
    dataset: Any,
    left_size: float | None = None,
    right_size: float | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    preferred_backend: str | None = None,
) -> tuple[Any, Any]:
    """Split arrays into two parts; Keras returns data sets of TensorFlow instead.

    Args:
        dataset: an array, or arrays of equal length nested in tuples, lists and dictionaries; or an object with
            `__len__` and `__getitem__`, such as PyTorch's data sets, whose samples are read and stacked.
        left_size: of the first part, a number of samples or (a float) a fraction; by default the rest.
        right_size: of the second part, the last ones, likewise; at least one size must be passed.
        shuffle: whether samples are drawn at random.
        seed: of these draws; by default that of `set_random_seed`.
        preferred_backend: "tensorflow", "torch", "jax" or "numpy", as in Keras; the parts are NumPy arrays for each.

    Raises:
        ConfigError: an unknown backend, no size, a size out of range, or arrays of different lengths.
    """
    if preferred_backend not in (None, "tensorflow", "torch", "jax", "numpy"):
        raise ConfigError(
            "split_dataset: `preferred_backend` must be 'tensorflow', 'torch', 'jax' or 'numpy'. Received: "
            f"preferred_backend={preferred_backend}"
        )
    if _holds_samples(dataset):
        samples = [dataset[index] for index in range(len(dataset))]
        dataset = map_structure(lambda *parts: np.stack([np.asarray(part) for part in parts]), *samples)
    rows = {len(array) for array in tree.leaves(dataset)}
    if len(rows) != 1:
        raise ConfigError(f"split_dataset: expected arrays of one length, found {sorted(rows)}")
    (total,) = rows
    if left_size is None and right_size is None:
        raise ConfigError(
            "At least one of the `left_size` or `right_size` must be specified. Received: left_size=None and "
            "right_size=None"
        )
    first, last = _part("left_size", left_size, total), _part("right_size", right_size, total)
    left = total - (last or 0) if first is None else first
    right = total - left if last is None else last
    if left + right > total:
        raise ConfigError(f"The sum of `left_size` and `right_size` must be {total} at most. Received: {left}, {right}")
    order = np.arange(total)
    if shuffle:
        order = stream(default_seed() if seed is None else check_seed(seed), Purpose.HOLD_OUT).permutation(total)
    parts = order[:left], order[total - right :]
    datasets = [tree.map_leaves(lambda _, array, part=part: np.asarray(array)[part], dataset) for part in parts]
    return datasets[0], datasets[1]


def _holds_samples(dataset: Any) -> bool:
    """Whether it is a data set with samples by index, not an array of any library."""
    has_samples = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    is_array = any(hasattr(dataset, name) for name in ("__array__", "__dlpack__"))
    return has_samples and not is_array and not tree.is_nested(dataset)


def _part(name: str, size: float | None, total: int) -> int | None:
    if size is None:
        return None
    limit = 1 if isinstance(size, float) else total
    if isinstance(size, bool) or not 0 < size < limit:
        raise ConfigError(f"`{name}` must be between 0 and {limit}. Received: {name}={size}")
    return round(size * total) if isinstance(size, float) else int(size)


@checked_arguments
def pack_x_y_sample_weight(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
    """Return x, (x, y) or (x, y, sample_weight) for a step; a list, tuple or dictionary alone becomes (x,)."""
    if y is None:
        return (x,) if tree.is_nested(x) else x
    return (x, y) if sample_weight is None else (x, y, sample_weight)


@checked_arguments
def unpack_x_y_sample_weight(data: Any) -> tuple[Any, Any, Any]:
    """Return x, y and sample_weight of a step's data, None for missing ones; ConfigError for more parts."""
    from dptrain.batches.inputs import unpack

    return unpack(data)


@checked_arguments
def to_categorical(x: Any, num_classes: int | None = None) -> Any:
    """Return labels of any shape as one-hot vectors (*shape, num_classes), like `keras.utils.to_categorical`.

    A last dimension of 1 is dropped, negative labels count from the end. `num_classes` is by default the highest label
    plus one; ConfigError if a label has no class, or there are no labels.

    For a tensor, also inside a step, a tensor of the floatx, in which labels without a class are zeros; if its values
    are not known, ConfigError without `num_classes`.
    """
    if isinstance(x, Tensor | Variable):
        return _one_hot_labels(x, num_classes)
    labels = np.asarray(x).astype(np.int64)
    if labels.ndim > 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if not num_classes and not labels.size:
        raise ConfigError("to_categorical: no labels; pass num_classes")
    classes = int(num_classes or labels.max() + 1)
    if labels.size and not -classes <= labels.min() <= labels.max() < classes:
        raise ConfigError(f"to_categorical: labels {labels.min()} to {labels.max()} for {classes} classes")
    return np.eye(classes)[labels]


def _one_hot_labels(x: Any, num_classes: int | None) -> Tensor:
    labels = x if isinstance(x, Tensor) else x.value
    if labels.ndim > 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if num_classes is None and labels.value is None:
        raise ConfigError("to_categorical: pass num_classes: inside a step, the highest label is not known")
    return ops.one_hot(labels, int(labels.numpy().max()) + 1 if num_classes is None else num_classes)


def rank() -> int:
    """Return this process's rank, 0 to `world_size` - 1, as the launcher numbers it; starts no MPI."""
    launch = detect_launch()
    return 0 if launch is None else launch.rank


def world_size() -> int:
    """Return how many processes the launcher started; starts no MPI."""
    launch = detect_launch()
    return 1 if launch is None else launch.size


@checked_arguments
def check_seed(seed: int) -> int:
    """Return a seed, or raise ConfigError if it is out of range."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed}: expected 0 to 2**63 - 1")
    return seed
