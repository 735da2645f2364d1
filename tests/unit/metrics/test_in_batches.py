"""Every metric: batches cut anywhere, empty ones too, are the whole; after `reset_state` it is as a new one.

The table below has arguments and data of metrics that need some; a new metric is tested without a line here if it can
be made without arguments and takes one-hot targets with probabilities.
"""

import numpy as np
import pytest

from dptrain import metrics
from dptrain.metrics import METRICS
from tests.sample import examples

ROWS, C = 23, 4
CLASSES = sorted(set(METRICS.values()), key=lambda kind: kind.__name__)
IDS = {"num_classes": C}
ARGUMENTS = {
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "IoU": IDS | {"target_class_ids": [0, 2]},
    "MeanIoU": IDS,
    "MeanMetricWrapper": {"fn": metrics.mean_squared_error},
    "MeanRelativeError": {"normalizer": np.array([1.0, 2, 0, 3])},
    "OneHotIoU": IDS | {"target_class_ids": [0, 2]},
    "OneHotMeanIoU": IDS,
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
OF_VALUES = {"Mean", "Sum", "MeanTensor"}
OF_LABELS = {"SparseCategoricalAccuracy", "SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy"}
OF_IDS = {"IoU", "MeanIoU"}
OF_NUMBERS = {"PearsonCorrelation", "ConcordanceCorrelation", "R2Score"}


def data(name, rng, rows):
    """Return the arguments of `update_state` for so many rows, weights last."""
    labels = rng.integers(0, C, rows)
    outputs = rng.random((rows, C)).astype(np.float32) + 0.05
    outputs /= outputs.sum(-1, keepdims=True)
    weights = np.where(rng.random(rows) < 0.3, 0, rng.random(rows)).astype(np.float32)
    if name in OF_VALUES:
        return [outputs[:, 0], weights]
    if name in OF_LABELS:
        return [labels, outputs, weights]
    if name in OF_IDS:
        return [labels, rng.integers(0, C, rows), weights]
    targets = np.eye(C, dtype=np.float32)[labels]
    if name in OF_NUMBERS:
        targets = targets + outputs * outputs
    return [targets, outputs, weights]


def made(kind):
    return kind(**ARGUMENTS.get(kind.__name__, {}), dtype="float64")


def updated(metric, arguments, cuts=()):
    for part in zip(*(np.split(argument, cuts) for argument in arguments), strict=True):
        metric.update_state(*part[:-1], sample_weight=part[-1])
    return np.asarray(metric.result())


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_batches_cut_anywhere_are_the_whole(kind):
    for seed in range(examples(6)):
        rng = np.random.default_rng(seed)
        arguments = data(kind.__name__, rng, ROWS)
        expected = updated(made(kind), arguments)
        assert expected.size
        assert np.isfinite(expected).all()
        for cuts in (np.sort(rng.integers(0, ROWS + 1, rng.integers(1, 4)), kind="stable"), [0], [ROWS], [7, 7, 7]):
            np.testing.assert_allclose(updated(made(kind), arguments, cuts), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_after_a_reset_other_data_are_as_for_a_new_metric(kind, rows):
    rng = np.random.default_rng(rows)
    metric, first, second = made(kind), data(kind.__name__, rng, 17), data(kind.__name__, rng, rows)
    updated(metric, first, [4, 9])
    metric.reset_state()
    np.testing.assert_array_equal(updated(metric, second), updated(made(kind), second))
