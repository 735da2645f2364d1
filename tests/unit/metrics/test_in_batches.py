"""Every metric: batches cut anywhere, empty ones too, are the whole; after `reset_state` it is as a new one.

The table below has arguments and data of metrics that need some; a new metric is tested without a line here if it can
be made without arguments and takes one-hot targets with probabilities.
"""

import inspect

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
    ]
    + [
        {"num_thresholds": 9, "from_logits": True},
        {"num_thresholds": None, "thresholds": [0.2, 0.5], "label_weights": [1, 2, 0, 0.5]},
        {"num_thresholds": 9, "multi_label": True, "num_labels": C, "label_weights": [1, 2, 0, 0.5]},
    ],
    "BinaryAccuracy": [{"threshold": 0.3}],
    "BinaryCrossentropy": [{"from_logits": True, "label_smoothing": 0.2}],
    "BinaryIoU": [{"target_class_ids": [1], "threshold": 0.2}],
    "F1Score": OF_AVERAGES,
    "FBetaScore": [{"beta": 2.0, **options} for options in OF_AVERAGES],
    "CategoricalCrossentropy": [{"from_logits": True, "label_smoothing": 0.2}],
    "IoU": [{"ignore_class": 2}, {"sparse_y_true": False}, {"sparse_y_pred": False}],
    "MeanIoU": [{"ignore_class": 0}, {"sparse_y_pred": False}, {"sparse_y_true": False, "sparse_y_pred": False}],
    "OneHotIoU": [{"ignore_class": 2}, {"sparse_y_pred": True}],
    "OneHotMeanIoU": [{"ignore_class": 0}, {"sparse_y_pred": True}],
    "R2Score": [
        {"class_aggregation": aggregation, "num_regressors": number}
        for aggregation in (None, "variance_weighted_average")
        for number in (0, 3)
    ],
    "SparseCategoricalCrossentropy": [{"ignore_class": 1}, {"from_logits": True}],
    **{name: [*THRESHOLDS, {"top_k": 2}, {"top_k": 1, "class_id": 3}] for name in ("Precision", "Recall")},
    **dict.fromkeys(("FalseNegatives", "FalsePositives", "TrueNegatives", "TruePositives"), THRESHOLDS),
    "SparseTopKCategoricalAccuracy": [{"k": 2}, {"k": 2, "from_sorted_ids": True}],
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


def formed(metric, values, sparse):
    """Return a metric's targets or outputs as its argument says: ids of classes, or numbers for each."""
    are_ids, is_sparse = type(metric).__name__ in OF_IDS, getattr(metric, sparse)
    if are_ids and not is_sparse:
        return np.eye(C, dtype=np.float32)[values]
    return values.argmax(-1) if is_sparse and not are_ids else values


def updated(metric, arguments, cuts=()):
    if isinstance(metric, metrics.IoU) and not isinstance(metric, metrics.BinaryIoU):
        y_true, y_pred, weights = arguments
        arguments = [formed(metric, y_true, "sparse_y_true"), formed(metric, y_pred, "sparse_y_pred"), weights]
    if getattr(metric, "from_sorted_ids", False):
        arguments = [arguments[0], np.argsort(-arguments[1], -1, kind="stable"), arguments[2]]
    for part in zip(*(np.split(argument, cuts) for argument in arguments), strict=True):
        metric.update_state(*part[:-1], sample_weight=part[-1])
    return np.asarray(metric.result())


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_argument_is_tried(kind):
    """But along which axis classes or numbers are."""
    tried = {name for case in CASES if case.values[0] is kind for name in case.values[1]}
    own = inspect.signature(kind).parameters.keys() - {"name", "dtype", "kwargs", "axis"}
    assert own <= tried | ARGUMENTS.get(kind.__name__, {}).keys()


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


# What takes vectors of classes or of numbers alone, (rows, n).
OF_VECTORS = {"F1Score", "FBetaScore", "R2Score", "MeanTensor"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "options"), [case for case in CASES if case.values[0].__name__ not in OF_VECTORS])
def test_sequences_count_as_their_positions(kind, options):
    """Targets, outputs and weights (rows, times, ...), as of a model of tokens."""
    if options.get("multi_label"):
        pytest.skip("of (rows, labels)")
    flat = data(kind.__name__, np.random.default_rng(1), 24)
    together = [argument.reshape(6, 4, *argument.shape[1:]) for argument in flat]
    np.testing.assert_allclose(updated(made(kind, options), together), updated(made(kind, options), flat), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options"), [case for case in CASES if isinstance(case.values[1].get("thresholds"), list)]
)
def test_thresholds_may_come_in_any_order(kind, options):
    limits = [0.6, 0.2, 0.4]
    arguments = data(kind.__name__, np.random.default_rng(1), 24)
    rising, as_given = (
        updated(made(kind, options | {"thresholds": order}), arguments) for order in (sorted(limits), limits)
    )
    expected = rising[[2, 0, 1]] if rising.shape == (3,) else rising
    np.testing.assert_array_equal(as_given, expected)
