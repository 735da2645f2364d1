"""What users hand to `fit`, `evaluate` and `predict`, checked against the model and made into batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.backend.base import flat_features
from dptrain.comm import Communicator
from dptrain.data.checks import check_labels
from dptrain.data.sampling import GlobalSampler, LocalSampler, Sampler, cut
from dptrain.errors import ConfigError, DataError
from dptrain.losses import Loss
from dptrain.model import Architecture
from dptrain.train.batches import ArrayBatches, Batches
from dptrain.train.trainer import EVALUATION_ROWS

Array = npt.NDArray[Any]
# How the replica wants features, targets and weights: `Replica.as_stored`.
Store = Callable[..., Sequence[Array]]


@dataclass(frozen=True)
class Samples:
    """Arrays that belong together, checked.

    Attributes:
        x: (rows, *input_shape) features in their own dtype.
        y: (rows,) labels, or (rows, *output_shape) values.
        weights: (rows,) of the samples in the loss, or None for ones.
    """

    x: Array
    y: Array
    weights: Array | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.x)

    def part(self, start: int, stop: int) -> "Samples":
        """Return rows start to stop."""
        return Samples(
            self.x[start:stop], self.y[start:stop], None if self.weights is None else self.weights[start:stop]
        )

    def stored(self, store: Store) -> Sequence[Array]:
        """Return the arrays as the replica's feed takes them."""
        return store(self.x, self.y) if self.weights is None else store(self.x, self.y, self.weights)


def check_features(x: Any, architecture: Architecture) -> Array:
    """Return x as an array, (rows, *input_shape).

    Raises:
        DataError: no real numbers, or another shape.
    """
    features: Array = np.asarray(x)
    expected = architecture.input_shape
    if features.dtype.kind not in "uifb":
        raise DataError(f"x has dtype {features.dtype}: expected real numbers")
    if features.shape[1:] != expected:
        raise DataError(
            f"model expects {flat_features(expected)} features of shape {expected}, data has "
            f"{flat_features(features.shape[1:])} of shape {features.shape[1:]}"
        )
    return features


def check_samples(x: Any, y: Any, weights: Any, architecture: Architecture, loss: Loss) -> Samples:
    """Return features, targets and weights after checking them against the model and the loss.

    Args:
        x: (rows, *input_shape).
        y: labels (rows,) or (rows, 1), or values (rows, *output_shape), as the loss takes them.
        weights: (rows,) or (rows, 1), or None.
        architecture: the model.
        loss: the loss.

    Raises:
        DataError: they do not go together.
    """
    features = check_features(x, architecture)
    if y is None:
        raise DataError("y is missing: the loss compares the model's outputs with it")
    targets = np.asarray(y)
    if len(features) != len(targets):
        raise DataError(f"x has {len(features)} samples, y has {len(targets)}")
    output = architecture.output_shape
    if loss.takes_labels:
        check_labels(targets, output[-1], "y")
        targets = targets.reshape(len(targets))
    else:
        if targets.ndim == 1 and output == (1,):
            targets = targets[:, None]
        if targets.shape[1:] != output:
            raise DataError(f"y: expected targets of shape {output}, the model's output, found {targets.shape[1:]}")
    return Samples(features, targets, _check_weights(weights, len(features)))


def _check_weights(sample_weight: Any, rows: int) -> Array | None:
    if sample_weight is None:
        return None
    weights: Array = np.asarray(sample_weight)
    if weights.dtype.kind not in "uifb" or weights.shape not in ((rows,), (rows, 1)):
        raise DataError(
            f"sample_weight: expected ({rows},) real numbers, one a sample, found {weights.dtype} {weights.shape}"
        )
    weights = weights.reshape(rows)
    if not np.isfinite(weights).all():
        raise DataError(f"sample_weight: {int((~np.isfinite(weights)).sum())} values are not finite")
    return weights


def check_unspecified(x: Any, y: Any, weights: Any, architecture: Architecture) -> Samples:
    """Return features, targets and weights where the model's own steps alone know what the targets are.

    Raises:
        DataError: x does not fit the model, or targets or weights are not one a sample.
    """
    features = check_features(x, architecture)
    rows = len(features)
    targets = np.empty((rows, 0)) if y is None else np.asarray(y)
    if targets.dtype.kind not in "uifb" or targets.ndim < 1 or len(targets) != rows:
        raise DataError(f"y: expected real numbers, one row for each of {rows} samples, found {targets.shape}")
    return Samples(features, targets, _check_weights(weights, rows))


def weights_of_classes(y: Any, class_weight: Mapping[int, float]) -> Array:
    """Return each sample's weight from its class, 1 for classes that are not named, as Keras.

    Args:
        y: labels (rows,) or (rows, 1), or one-hot (rows, classes).
        class_weight: class -> weight.

    Raises:
        ConfigError: targets that name no class, or weights that are not finite.
    """
    labels = np.asarray(y)
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


def unpack(data: Any, name: str) -> tuple[Any, Any, Any]:
    """Return x, y and sample_weight of (x,), (x, y) or (x, y, sample_weight); what is missing is None.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(data, list | tuple):
        if 1 <= len(data) <= 3:
            x, y, weights = [*data, None, None][:3]
            return x, y, weights
        raise ConfigError(
            f"{name}: Data is expected to be in format `x`, `(x,)`, `(x, y)`, or `(x, y, sample_weight)`, found "
            f"{len(data)} parts"
        )
    return data, None, None


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


def evaluation_sampler(rows: int, comm: Communicator, batch_size: int | None) -> Sampler:
    """Return the order of an evaluation or prediction.

    Args:
        rows: of the arrays, which every rank holds.
        comm: the ranks.
        batch_size: of global batches; None lets each rank take a contiguous part, in pieces of its own.
    """
    if batch_size is None:
        return LocalSampler(*cut(0, rows, comm.size)[comm.rank], EVALUATION_ROWS)
    return GlobalSampler(rows, batch_size, comm.rank, comm.size, shuffle=False)


def evaluation_batches(
    samples: Samples, store: Store, comm: Communicator, batch_size: int | None, steps: int | None
) -> Batches:
    """Return the batches of an evaluation, see `evaluation_sampler`; `steps` ends it early."""
    if steps is not None and batch_size is None:
        batch_size = 32
    return ArrayBatches(samples.stored(store), evaluation_sampler(len(samples), comm, batch_size), steps)
