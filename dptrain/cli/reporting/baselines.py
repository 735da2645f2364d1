"""What a network should beat: the mean or the most frequent class, and for tables gradient boosting by scikit-learn."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.cli.reporting.columns import columns_of
from dptrain.data.preprocessing import Preprocessing
from dptrain.random import Purpose, stream

Array = npt.NDArray[Any]

BOOSTING = "gradient boosting (scikit-learn's HistGradientBoosting, its defaults)"
# Rows that boosting learns from, classes, each of which has a tree in every round, and rows x features x trees of a
# round: at most some 4 s of a core.
_MOST_ROWS, _LEAST_ROWS, _MOST_CLASSES, _MOST_WORK = 20_000, 200, 10, 2_000_000
# scikit-learn's limit on categories that are told apart as such.
_MOST_CATEGORIES = 255


@dataclass(frozen=True)
class Baseline:
    """Another model's answers to the held-out samples.

    Attributes:
        name: for people.
        outputs: (rows,) numbers, or (rows, classes) probabilities, float64.
        rows: training samples that it learned from.
        remark: what differs from the network's input; empty if nothing.
    """

    name: str
    outputs: Array
    rows: int
    remark: str = ""


def constant(y: Array, held_out: int, classes: int) -> Baseline:
    """Return the mean of the training targets, or with `classes` the shares of the classes."""
    if not classes:
        mean = float(np.mean(y, dtype=np.float64))
        return Baseline("always the mean of the training targets", np.full(held_out, mean), len(y))
    shares = np.bincount(y.astype(np.int64), minlength=classes)[:classes] / len(y)
    return Baseline("always the most frequent class", np.tile(shares, (held_out, 1)), len(y))


def boosting(preprocessing: Preprocessing, x: Array, y: Array, held_out: Array, classes: int) -> Baseline | str:
    """Return scikit-learn's histogram gradient boosting, trained on a table's rows; or why there is none.

    Args:
        preprocessing: of the table.
        x, y: training rows, of which at most 20,000 are drawn, always the same.
        held_out: rows to answer.
        classes: their number; 0 for a regression.
    """
    used = [(column, part) for column, part in columns_of(preprocessing) if column.role != "words"]
    if not used:
        return "the table has texts alone"
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    except ImportError:
        return "scikit-learn is not installed: pip install scikit-learn"
    features = np.concatenate([np.arange(part.start, part.stop) for _, part in used])
    is_category = [
        column.role == "embedding" and len(column.values) <= _MOST_CATEGORIES
        for column, part in used
        for _ in range(part.start, part.stop)
    ]
    rows = sampled(len(x), min(_MOST_ROWS, _MOST_WORK // (len(features) * max(classes - (classes == 2), 1))))
    if classes > _MOST_CLASSES or len(rows) < min(_LEAST_ROWS, len(x)):
        return f"it would take too long with {len(features):,} features and {classes:,} classes"
    if classes and len(np.unique(y[rows])) < 2:
        return "the training samples that it would learn from are of one class"
    model = (HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor)(
        categorical_features=is_category, early_stopping=False, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own insides
        model.fit(x[rows][:, features], y[rows])
        asked = held_out[:, features]
        outputs = model.predict(asked) if not classes else _all_classes(model, asked, classes)
    without = [column.name for column in preprocessing.word_columns]
    return Baseline(BOOSTING, outputs, len(rows), f"without {', '.join(without)}" if without else "")


def sampled(count: int, most: int) -> Array:
    """Return at most so many row numbers, rising, always the same of the same count."""
    if count <= most:
        return np.arange(count)
    return np.sort(stream(0, Purpose.REPORT, count).permutation(count)[: max(most, 0)], kind="stable")


def _all_classes(model: Any, x: Array, classes: int) -> Array:
    """Return probabilities of all classes, also of those that its training rows lack."""
    outputs = np.zeros((len(x), classes))
    outputs[:, model.classes_.astype(np.int64)] = model.predict_proba(x)
    return outputs


def difference(network: Array, baseline: Array) -> tuple[float, float]:
    """Return the mean of the network's errors minus the baseline's, and half of its 95 % interval.

    Both are (rows,) on the same samples; the interval is over samples, by the normal distribution.
    """
    if not np.isfinite(network).all():
        return float("nan"), float("inf")
    differences = network - baseline
    error = float(differences.std(ddof=1)) / len(differences) ** 0.5 if len(differences) > 1 else float("inf")
    return float(differences.mean()), 1.96 * error


def verdict(network: Array, baseline: Array, names: Sequence[str]) -> str:
    """Return whether the network's errors are lower than the baseline's, in words; `names` of error and baseline."""
    mean, half = difference(network, baseline)
    what, whose = names
    if not np.isfinite(mean):
        return f"The network's {what} is not finite, so it cannot be compared with {whose}."
    if abs(mean) <= half:
        return f"The network and {whose} cannot be told apart by their {what} on so many samples."
    base = float(baseline.mean())
    worth = "" if mean < 0 else ": the network is not worth its effort here"
    if base and mean >= base:  # "by 1,035 %" is hard to read
        return f"The network's {what} is {(base + mean) / base:.1f} times that of {whose}{worth}."
    by = f" by {100 * abs(mean) / base:.0f} %" if base else ""
    return f"The network's {what} is {'lower' if mean < 0 else 'higher'} than that of {whose}{by}{worth}."
