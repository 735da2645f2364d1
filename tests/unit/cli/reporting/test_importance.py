"""Permutation importance: of a known function, beside scikit-learn's, and bounded."""

import numpy as np
import pytest

from dptrain.cli.reporting.importance import MOST_ROWS, REPEATS, importances, shuffled_rows
from dptrain.data.preprocessing import Column, Preprocessing


def table(*columns):
    return Preprocessing("regression", columns, "y")


NUMBERS = table(Column("idle", "number"), Column("big", "number"), Column("city", "one-hot", ("a", "b")))


def mean_error(y, outputs):
    return float(np.abs(outputs - y).mean())


def function(x):
    return 10 * x[:, 1] + 3 * x[:, 3]


def data(rows=200):
    rng = np.random.default_rng(1)
    city = rng.integers(0, 2, rows)
    x = np.column_stack([rng.normal(size=(rows, 2)), city == 0, city == 1]).astype(np.float32)
    return x, function(x)


def test_columns_by_what_they_do():
    x, y = data()
    measured = importances(function, NUMBERS, x, y, mean_error)
    assert [part.name for part in measured] == ["big", "city", "idle"]
    assert measured[2].rise == measured[2].deviation == 0, "a column that the function does not read"
    assert measured[1].rise == pytest.approx(1.5, abs=0.3), "all columns of x of a category are shuffled together"
    assert measured == importances(function, NUMBERS, x, y, mean_error), "the same on every run"


def test_every_column_is_shuffled_anew_each_time():
    x, y = data()
    x[:, 0] = x[:, 1]  # so that orders of two columns can be compared
    asked = []

    def predict(x):
        asked.append(x)
        return function(x)

    measured = importances(predict, table(Column("one", "number"), Column("big", "number")), x, y, mean_error)
    parts = [part for column, shuffled in enumerate(asked[1:]) for part in np.split(shuffled[:, column], REPEATS)]
    assert len({part.tobytes() for part in parts}) == 2 * REPEATS
    assert all(sorted(part) == sorted(x[:, 0]) for part in parts)
    assert next(part.deviation for part in measured if part.name == "big") > 0


def test_as_scikit_learn_measures_it():
    inspection = pytest.importorskip("sklearn.inspection")

    class Model:
        def fit(self, x, y):
            return self

    def predict(x):
        return 10 * x[:, 1]

    x = data()[0][:, :2]
    y = predict(x)
    options = {"scoring": lambda model, x, y: -mean_error(y, predict(x)), "n_repeats": 50, "random_state": 0}
    reference = inspection.permutation_importance(Model(), x, y, **options).importances_mean
    columns = table(Column("idle", "number"), Column("big", "number"))
    by_name = {part.name: part.rise for part in importances(predict, columns, x, y, mean_error)}
    assert [by_name["idle"], by_name["big"]] == pytest.approx(reference, rel=0.1)


def test_predictions_are_bounded_in_rows():
    assert shuffled_rows(NUMBERS, 100_000) == MOST_ROWS
    assert shuffled_rows(NUMBERS, 50) == 50
    assert shuffled_rows(table(Column("alone", "number")), 500) == 0
    many = table(*(Column(f"c{n}", "number") for n in range(1000)))
    assert shuffled_rows(many, 100_000) == 200
    assert shuffled_rows(table(*(Column(f"c{n}", "number") for n in range(5000))), 100_000) == 0
    texts = table(Column("text", "words", ("a",), length=200), Column("n", "number"))
    assert shuffled_rows(texts, 100_000) == 2000
    x, y = data()
    asked = []

    def predict(x):
        asked.append(len(x))
        return function(x)

    importances(predict, NUMBERS, x, y, mean_error)
    assert asked == [1000] * 4
