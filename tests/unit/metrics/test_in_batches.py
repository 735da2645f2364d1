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
THRESHOLDS = [{"thresholds": [0.3, 0.6]}, {"thresholds": 0.4}]
OF_AVERAGES = [{"average": average, "threshold": limit} for average in ("micro", "weighted") for limit in (None, 0.4)]
AT_LIMITS = [{"num_thresholds": 7, "class_id": 2}]
# Further arguments, for all that changes what metrics keep, beside the first of all.
VARIANTS = {
    "AUC": [
        {"num_thresholds": 9, "curve": curve, "summation_method": method, "multi_label": several}
        for curve in ("ROC", "PR")
        for method in ("interpolation", "majoring")
        for several in (False, True)
    ],
    "BinaryCrossentropy": [{"from_logits": True, "label_smoothing": 0.2}],
    "BinaryIoU": [{"target_class_ids": [1], "threshold": 0.2}],
    "F1Score": OF_AVERAGES,
    "FBetaScore": [{"beta": 2.0, **options} for options in OF_AVERAGES],
    "IoU": [{"ignore_class": 2}],
    "MeanIoU": [{"ignore_class": 0}],
    "R2Score": [
        {"class_aggregation": aggregation, "num_regressors": number}
        for aggregation in (None, "variance_weighted_average")
        for number in (0, 3)
    ],
    "SparseCategoricalCrossentropy": [{"ignore_class": 1}, {"from_logits": True}],
    **{name: [*THRESHOLDS, {"top_k": 2}, {"top_k": 1, "class_id": 3}] for name in ("Precision", "Recall")},
    **dict.fromkeys(("FalseNegatives", "FalsePositives", "TrueNegatives", "TruePositives"), THRESHOLDS),
    "SparseTopKCategoricalAccuracy": [{"k": 2}],
    "TopKCategoricalAccuracy": [{"k": 2}],
    **dict.fromkeys(("PrecisionAtRecall", "RecallAtPrecision", "SensitivityAtSpecificity"), AT_LIMITS),
    "SpecificityAtSensitivity": AT_LIMITS,
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


# Each kind with each of its arguments.
CASES = [
    pytest.param(kind, options, id=", ".join([kind.__name__, *(f"{name}={value}" for name, value in options.items())]))
    for kind in CLASSES
    for options in ({}, *VARIANTS.get(kind.__name__, []))
]


def made(kind, options):
    return kind(**ARGUMENTS.get(kind.__name__, {}) | options, dtype="float64")


def updated(metric, arguments, cuts=()):
    for part in zip(*(np.split(argument, cuts) for argument in arguments), strict=True):
        metric.update_state(*part[:-1], sample_weight=part[-1])
    return np.asarray(metric.result())


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_batches_cut_anywhere_are_the_whole(kind, options):
    for seed in range(examples(6)):
        rng = np.random.default_rng(seed)
        arguments = data(kind.__name__, rng, ROWS)
        expected = updated(made(kind, options), arguments)
        assert expected.size
        assert np.isfinite(expected).all()
        for cuts in (np.sort(rng.integers(0, ROWS + 1, rng.integers(1, 4)), kind="stable"), [0], [ROWS], [7, 7, 7]):
            np.testing.assert_allclose(updated(made(kind, options), arguments, cuts), expected, rtol=1e-6)


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_after_a_reset_other_data_are_as_for_a_new_metric(kind, options, rows):
    rng = np.random.default_rng(rows)
    metric, first, second = made(kind, options), data(kind.__name__, rng, 17), data(kind.__name__, rng, rows)
    updated(metric, first, [4, 9])
    metric.reset_state()
    np.testing.assert_array_equal(updated(metric, second), updated(made(kind, options), second))
