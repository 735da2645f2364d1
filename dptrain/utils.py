"""Small helpers with Keras' names."""

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dptrain.batches.py_dataset import PyDataset
from dptrain.batches.sampling import fix_shards
from dptrain.errors import ConfigError
from dptrain.random import default_seed, set_default_seed
from dptrain.registry.names import not_there
from dptrain.registry.serialization import (
    custom_object_scope,
    get_custom_objects,
    get_registered_name,
    get_registered_object,
    register_keras_serializable,
)
from dptrain.runtime.defaults import REPRODUCIBLE_SHARDS
from dptrain.runtime.launcher import detect_launch

# Its name in Keras 2.
Sequence = PyDataset

__all__ = [
    "CustomObjectScope",
    "PyDataset",
    "Sequence",
    "check_seed",
    "custom_object_scope",
    "default_seed",
    "deserialize_keras_object",
    "enable_op_determinism",
    "get_custom_objects",
    "get_registered_name",
    "get_registered_object",
    "rank",
    "register_keras_serializable",
    "serialize_keras_object",
    "set_random_seed",
    "to_categorical",
    "unpack_x_y_sample_weight",
    "world_size",
]

CustomObjectScope = custom_object_scope

if TYPE_CHECKING:
    from dptrain.saving import deserialize_keras_object, serialize_keras_object
else:  # for which any name would do
    _missing = not_there("utils", __all__)

    def __getattr__(name: str) -> Any:
        if name not in ("deserialize_keras_object", "serialize_keras_object"):
            return _missing(name)
        from dptrain import saving  # the room above

        return getattr(saving, name)


def set_random_seed(seed: int) -> None:
    """Set the seed of models made from now on (initial weights, shuffling, dropout), of NumPy's and Python's `random`.

    Call it with the same seed on every rank, before the script draws numbers.

    Args:
        seed: 0 to 2**63 - 1. NumPy's legacy generator takes its last 32 bits.

    Raises:
        ConfigError: the seed is out of range.

    Source: keras/src/utils/rng_utils.py, Keras 3.15.
    """
    set_default_seed(check_seed(seed))
    random.seed(seed)
    np.random.seed(seed % 2**32)


def enable_op_determinism(shards_per_batch: int = REPRODUCIBLE_SHARDS) -> None:
    """Let trainings and evaluations from now on have the same bits on any number of ranks, at the cost of speed.

    Call it on every rank before `fit`; `DPTRAIN_REPRODUCIBLE=1` in the environment does the same. Every global batch is
    cut into so many shards, whose sums are added in one fixed tree. Named after TensorFlow's, which promises the same
    bits on the same number of devices.

    Args:
        shards_per_batch: at least as many as there will be ranks; a smaller batch has as many as it has samples.

    Raises:
        ConfigError: it is less than 1.
    """
    if shards_per_batch < 1:
        raise ConfigError(f"shards_per_batch = {shards_per_batch}: expected an integer >= 1")
    fix_shards(shards_per_batch)


def unpack_x_y_sample_weight(data: Any) -> tuple[Any, Any, Any]:
    """Return x, y and sample_weight of what a step is given; what is missing is None.

    Raises:
        ConfigError: it is none of x, (x,), (x, y) and (x, y, sample_weight).
    """
    from dptrain.batches.inputs import unpack

    return unpack(data)


def to_categorical(x: npt.ArrayLike, num_classes: int | None = None) -> npt.NDArray[np.float64]:
    """Return labels as one-hot vectors, as `keras.utils.to_categorical`.

    Args:
        x: integer labels of any shape, of which a last dimension of 1 is left out; negative ones count from the end.
        num_classes: the length of the vectors; by default one more than the highest label.

    Returns:
        (*shape, num_classes) zeros and ones.

    Raises:
        ConfigError: a label has no class, or there are no labels to tell the number of classes.
    """
    labels = np.asarray(x).astype(np.int64)
    if labels.ndim > 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if not num_classes and not labels.size:
        raise ConfigError("to_categorical: no labels, so num_classes must be given")
    classes = int(num_classes or labels.max() + 1)
    if labels.size and not -classes <= labels.min() <= labels.max() < classes:
        raise ConfigError(f"to_categorical: labels {labels.min()} to {labels.max()}, {classes} classes")
    return np.eye(classes)[labels]


def rank() -> int:
    """Return this process's number among those that the launcher started, 0 to `world_size` - 1; starts no MPI."""
    launch = detect_launch()
    return 0 if launch is None else launch.rank


def world_size() -> int:
    """Return how many processes the launcher started; starts no MPI."""
    launch = detect_launch()
    return 1 if launch is None else launch.size


def check_seed(seed: int) -> int:
    """Return a seed that is in range.

    Raises:
        ConfigError: it is not.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed}: expected 0 to 2**63 - 1")
    return seed
