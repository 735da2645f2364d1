"""Which rows are held out: of every class its share, of every fold its rows, whatever the labels."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.data.holdout import fold_rows, require_classes, split_rows
from dptrain.errors import ConfigError, DataError

LABELS = st.lists(st.integers(0, 5), min_size=2, max_size=200).map(np.array)


def counts(y, rows):
    return np.bincount(y[rows], minlength=6)


@given(LABELS, st.floats(0.01, 0.99))
def test_a_split_holds_out_the_same_part_of_every_class(y, fraction):
    held_out = round(len(y) * fraction)
    if not 0 < held_out < len(y):
        with pytest.raises(ConfigError, match=f"holds out {held_out} of {len(y)} samples"):
            split_rows(y, fraction)
        return
    trained, validated = split_rows(y, fraction)
    assert len(validated) == held_out
    np.testing.assert_array_equal(np.sort(np.concatenate([trained, validated])), np.arange(len(y)))
    assert (np.diff(trained) > 0).all()
    rows = counts(y, np.arange(len(y)))
    shares = rows * held_out / len(y)
    if (rows - shares)[rows > 0].min() < 1:  # a class keeps its last row, and another gives one more
        return
    assert (np.abs(counts(y, validated) - shares) < 1 + 1e-9).all()
    np.testing.assert_array_equal(split_rows(y.copy(), fraction)[1], validated)


@given(LABELS, st.integers(2, 7), st.integers(0, 2**63 - 1))
def test_folds_share_out_all_rows_and_every_class(y, folds, seed):
    if folds > len(y):
        with pytest.raises(ConfigError, match="at most one fold per sample"):
            fold_rows(y, 0, folds, seed)
        return
    parts = [fold_rows(y, fold, folds, seed) for fold in range(folds)]
    held_out = [validated for _, validated in parts]
    np.testing.assert_array_equal(np.sort(np.concatenate(held_out)), np.arange(len(y)))
    for trained, validated in parts:
        np.testing.assert_array_equal(np.sort(np.concatenate([trained, validated])), np.arange(len(y)))
    assert np.ptp([len(rows) for rows in held_out]) <= 1
    assert (np.ptp([counts(y, rows) for rows in held_out], axis=0) <= 1).all()


def test_a_seed_cuts_folds_of_its_own_and_a_split_is_not_sorted_data():
    y = np.repeat([0, 1, 2], 40)
    assert not np.array_equal(fold_rows(y, 0, 5, 1)[1], fold_rows(y, 0, 5, 2)[1])
    assert not np.array_equal(split_rows(y, 0.5)[1] % 40, np.arange(60) % 40)


def test_targets_that_are_no_labels_are_drawn_from_as_they_are():
    y = np.random.default_rng(0).normal(size=(50, 2))
    assert len(split_rows(y, 0.3)[1]) == 15
    assert [len(fold_rows(y, fold, 4, 0)[1]) for fold in range(4)] == [13, 13, 12, 12]


@given(LABELS, st.floats(0.01, 0.99))
def test_a_split_keeps_a_row_of_each_class(y, fraction):
    held_out = round(len(y) * fraction)
    classes = len(np.unique(y))
    if 0 < held_out <= len(y) - classes:
        trained, validated = split_rows(y, fraction)
        assert set(y[trained]) == set(y)
        assert len(validated) == held_out


@pytest.mark.parametrize("most", [3, 4])
def test_a_split_keeps_a_row_of_each_class_of_few_rows(most):
    """All numbers of rows up to some, of three or four classes, and all parts that are held out."""
    for rows in itertools.product(range(1, most + 1), repeat=7 - most):
        y = np.repeat(np.arange(len(rows)), rows)
        for held_out in range(1, len(y) - len(rows) + 1):
            trained, validated = split_rows(y, held_out / len(y))
            assert len(validated) == held_out
            assert set(y[trained]) == set(y), (rows, held_out)


def test_a_class_without_a_training_row_is_named():
    require_classes(np.array([0, 1, 2, 1]), ("a", "b", "c"), "t.csv")
    with pytest.raises(DataError, match=r"t\.csv: no training sample of class 'b' \(2 such classes\)"):
        require_classes(np.array([0, 2, 2]), ("a", "b", "c", "d"), "t.csv")
