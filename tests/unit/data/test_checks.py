"""Checks of labels and features: the first bad number is named where it stands in the whole set."""

import tracemalloc

import numpy as np
import pytest

from dptrain.data.checks import check_finite, check_labels, check_labels_integer, whole_labels
from dptrain.errors import DataError


@pytest.mark.parametrize("dtype", ["u1", "i1", "i4", "i8", "u8", ">i2"])
def test_labels_in_range_pass(dtype):
    check_labels(np.array([0, 9, 5]).astype(dtype), 10, "y")
    check_labels(np.array([[0], [9]]).astype(dtype), 10, "y")
    check_labels(np.array([], dtype), 10, "y")


@pytest.mark.parametrize("dtype", ["u1", "i1", "i4", "i8", "u8", ">i2"])
def test_first_label_out_of_range_is_named(dtype):
    labels = np.zeros(600_000, dtype)
    labels[[417, 300_000]] = 10
    with pytest.raises(DataError, match=r"^y: label 10 at index 417; 10 classes allow 0-9$"):
        check_labels(labels, 10, "y")
    with pytest.raises(DataError, match="label 10 at index 1417;"):
        check_labels(labels[:, None], 10, "y", first_index=1000)
    labels[417] = 0
    with pytest.raises(DataError, match="label 10 at index 300000;"):
        check_labels(labels, 10, "y")


def test_extreme_labels():
    with pytest.raises(DataError, match="label -1 at index 1"):
        check_labels(np.array([0, -1, 12]), 10, "y")
    with pytest.raises(DataError, match="label 18446744073709551615 at index 1"):
        check_labels(np.array([0, 2**64 - 1], np.uint64), 10, "y")
    # A bound that the dtype cannot hold.
    check_labels(np.array([255], np.uint8), 1000, "y")
    with pytest.raises(DataError, match="label -128 at index 0; 1000 classes allow 0-999"):
        check_labels(np.array([-128], np.int8), 1000, "y")


def test_labels_must_be_one_integer_a_sample():
    check_labels_integer(np.zeros((4, 1), np.uint16), "y")
    with pytest.raises(DataError, match="y: labels are float32, expected integers"):
        check_labels_integer(np.zeros(4, np.float32), "y")
    with pytest.raises(DataError, match=r"labels have shape \(4, 10\).*one-hot\?"):
        check_labels(np.zeros((4, 10), np.uint8), 10, "y")
    with pytest.raises(DataError, match=r"labels have shape \(4, 1, 1\)"):
        check_labels_integer(np.zeros((4, 1, 1), np.uint8), "y")


def test_labels_of_other_types_are_whole_numbers():
    for labels in (np.array([2.0, 0.0]), np.array([[2], [0]], "f2"), np.array([True, False])):
        numbers = whole_labels(labels, "y")
        assert numbers.dtype == np.int64
        np.testing.assert_array_equal(numbers, labels)
    for wrong in (0.5, np.nan, np.inf):
        with pytest.raises(DataError, match=rf"^y: label {wrong} at index 1; labels must be integers"):
            whole_labels(np.array([[0.0], [wrong]]), "y")
    with pytest.raises(DataError, match=r"label 0.5 at index \(0, 1\)"):
        whole_labels(np.array([[0.0, 0.5]]), "y")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_first_number_that_is_not_finite_is_named(dtype, order):
    x = np.zeros((2000, 4, 7), dtype, order)
    check_finite(x, "x")
    x[1203, 0, 5] = np.nan
    x[1300:1316, 2, 2] = np.inf
    with pytest.raises(DataError, match=r"^x: NaN at sample 1203, feature 5 \(17 in all\)"):
        check_finite(x, "x")
    x[7, 3, 6] = -np.inf
    with pytest.raises(DataError, match=r"x: Inf at sample 107, feature 27 \(18 in all\)"):
        check_finite(x, "x", first_index=100)


def test_what_cannot_be_infinite_passes():
    check_finite(np.full((3, 2), 255, np.uint8), "x")
    check_finite(np.empty((0, 2)), "x")
    check_finite(np.empty((2, 0)), "x")
    check_finite(np.zeros(5), "x")


@pytest.mark.parametrize("order", ["C", "F"])
def test_temporary_memory_is_bounded(order):
    x = np.zeros((1000, 8000), np.float32, order)
    x[::2] = np.nan
    tracemalloc.start()
    with pytest.raises(DataError, match=r"NaN at sample 0, feature 0 \(4000000 in all\)"):
        check_finite(x, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    assert x.nbytes == 32_000_000
