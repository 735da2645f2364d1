"""Every metric with every kind of arguments: batches cut anywhere are the whole, and a second use that of a new one."""

import inspect

import numpy as np
import pytest

from dptrain import metrics
from dptrain.metrics.base import Metric

ROWS, CLASSES = 29, 4
RNG = np.random.default_rng(4)
# What metrics compare: targets and outputs of more rows than one use has.
VALUES = RNG.normal(size=(2, 60, CLASSES))
FRACTIONS = RNG.uniform(0.05, 0.95, (2, 60, CLASSES))
BINARY = (RNG.random((60, CLASSES)) < 0.4).astype(np.float64), FRACTIONS[0]
SOFTMAX = np.exp(VALUES[0]) / np.exp(VALUES[0]).sum(-1, keepdims=True)
LABELS = RNG.integers(0, CLASSES, 60)
SPARSE, ONE_HOT = (LABELS, SOFTMAX), (np.eye(CLASSES)[LABELS], SOFTMAX)
SIGNS = 2 * BINARY[0] - 1, VALUES[0]
IDS = LABELS, np.argsort(-SOFTMAX, -1, kind="stable")
BOTH_LABELS = LABELS, RNG.integers(0, CLASSES, 60)
WEIGHTS = RNG.uniform(0.1, 2.0, 60)
LIMITS = {"num_thresholds": 7}

# Arguments and data of each metric, for all that changes what it keeps.
TABLE = {
    "AUC": [
        ({**LIMITS, "curve": curve, "summation_method": method, "multi_label": several, "from_logits": logits}, data)
        for curve in ("ROC", "PR", "PRGAIN")
        for method in ("interpolation", "minoring", "majoring")
        for several in (False, True)
        for logits, data in ((False, BINARY), (True, (BINARY[0], VALUES[0])))
        if curve == "PR" or method != "interpolation" or not logits
    ],
    "Accuracy": [({}, BOTH_LABELS)],
    "BinaryAccuracy": [({"threshold": threshold}, BINARY) for threshold in (0.5, 0.3)],
    "BinaryCrossentropy": [({"from_logits": True, "label_smoothing": 0.2}, (BINARY[0], VALUES[0])), ({}, BINARY)],
    "BinaryIoU": [({"target_class_ids": ids, "threshold": 0.4}, BINARY) for ids in ([0], [1], [0, 1])],
    "CategoricalAccuracy": [({}, ONE_HOT)],
    "CategoricalCrossentropy": [({"label_smoothing": 0.1}, ONE_HOT), ({"from_logits": True}, (ONE_HOT[0], VALUES[0]))],
    "CategoricalHinge": [({}, ONE_HOT)],
    "ConcordanceCorrelation": [({}, VALUES)],
    "CosineSimilarity": [({}, VALUES)],
    "F1Score": [
        ({"average": average, "threshold": threshold}, BINARY)
        for average in (None, "micro", "macro", "weighted")
        for threshold in (None, 0.4)
    ],
    "FBetaScore": [({"average": average, "beta": 2.0}, BINARY) for average in (None, "weighted")],
    "FalseNegatives": [({"thresholds": thresholds}, BINARY) for thresholds in (None, [0.3, 0.6])],
    "FalsePositives": [({"thresholds": thresholds}, BINARY) for thresholds in (None, [0.3, 0.6])],
    "Hinge": [({}, SIGNS)],
    "IoU": [
        ({"num_classes": CLASSES, "target_class_ids": [1, 3], "ignore_class": ignored}, BOTH_LABELS)
        for ignored in (None, 2)
    ],
    "KLDivergence": [({}, FRACTIONS)],
    "LogCoshError": [({}, VALUES)],
    "MeanAbsoluteError": [({}, VALUES)],
    "MeanAbsolutePercentageError": [({}, VALUES)],
    "MeanIoU": [({"num_classes": CLASSES, "ignore_class": ignored}, BOTH_LABELS) for ignored in (None, 0)],
    "MeanMetricWrapper": [({"fn": lambda y_true, y_pred: abs(y_true - y_pred)}, VALUES)],
    "MeanSquaredError": [({}, VALUES)],
    "MeanSquaredLogarithmicError": [({}, FRACTIONS)],
    "OneHotIoU": [({"num_classes": CLASSES, "target_class_ids": [0, 2]}, ONE_HOT)],
    "OneHotMeanIoU": [({"num_classes": CLASSES}, ONE_HOT)],
    "PearsonCorrelation": [({}, VALUES)],
    "Poisson": [({}, FRACTIONS)],
    **{
        name: [
            ({"thresholds": [0.3, 0.6]}, BINARY),
            ({"top_k": 2}, BINARY),
            ({"class_id": 1, "thresholds": 0.4}, BINARY),
            ({"top_k": 1, "class_id": 3}, BINARY),
        ]
        for name in ("Precision", "Recall")
    },
    **{
        name: [({argument: 0.6, **LIMITS, "class_id": number}, BINARY) for number in (None, 2)]
        for name, argument in (
            ("PrecisionAtRecall", "recall"),
            ("RecallAtPrecision", "precision"),
            ("SensitivityAtSpecificity", "specificity"),
            ("SpecificityAtSensitivity", "sensitivity"),
        )
    },
    "R2Score": [
        ({"class_aggregation": aggregation, "num_regressors": number}, VALUES)
        for aggregation in (None, "uniform_average", "variance_weighted_average")
        for number in (0, 3)
    ],
    "RootMeanSquaredError": [({}, VALUES)],
    "SparseCategoricalAccuracy": [({}, SPARSE)],
    "SparseCategoricalCrossentropy": [({"ignore_class": ignored}, SPARSE) for ignored in (None, 1)],
    "SparseTopKCategoricalAccuracy": [({"k": 2}, SPARSE), ({"k": 2, "from_sorted_ids": True}, IDS)],
    "SquaredHinge": [({}, SIGNS)],
    "TopKCategoricalAccuracy": [({"k": 2}, ONE_HOT)],
    "TrueNegatives": [({"thresholds": thresholds}, BINARY) for thresholds in (None, [0.3, 0.6])],
    "TruePositives": [({"thresholds": thresholds}, BINARY) for thresholds in (None, [0.3, 0.6])],
}
# Means and sums of numbers, and what others are made of.
WITHOUT_TARGETS = {"Mean", "Sum", "Metric", "ByTargets"}
CASES = [(name, number) for name, cases in TABLE.items() for number in range(len(cases))]


def test_every_metric_is_in_the_table():
    classes = {name for name, value in vars(metrics).items() if inspect.isclass(value) and issubclass(value, Metric)}
    assert classes == {*TABLE, *WITHOUT_TARGETS}


def fed(metric, data, weights, cuts):
    """Return the result of a metric after batches of all rows, which are cut at these."""
    for part in np.split(np.arange(len(weights)), cuts):
        own_weights = None if weights[0] == 1 else weights[part]
        metric.update_state(data[0][part], data[1][part], own_weights)
    return np.asarray(metric.result())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("name", "number"), CASES)
def test_batches_cut_anywhere_and_a_second_use(name, number, weighted):
    options, (target, output) = TABLE[name][number]
    rng = np.random.default_rng(number)

    def make():
        return getattr(metrics, name)(**options)

    def use(metric, first, rows, cuts):
        part = slice(first, first + rows)
        return fed(metric, (target[part], output[part]), WEIGHTS[part] if weighted else np.ones(rows), cuts)

    whole, metric = use(make(), 0, ROWS, []), make()
    assert np.isfinite(whole).all()
    for cuts in (
        [1],
        [ROWS - 1],
        [0, 7, 7, ROWS],
        np.sort(rng.choice(np.arange(1, ROWS), 4, replace=False)),
        range(1, ROWS),
    ):
        metric.reset_state()
        np.testing.assert_allclose(use(metric, 0, ROWS, cuts), whole, rtol=1e-6, atol=1e-9)
    for rows in (60 - ROWS, 5):  # other data, more and fewer
        metric.reset_state()
        np.testing.assert_allclose(use(metric, ROWS, rows, [2]), use(make(), ROWS, rows, []), rtol=1e-6, atol=1e-9)
