"""Numbers with the digits of their target."""

import math

import numpy as np
import pytest

from dptrain.cli.reporting.digits import Digits, digits_of, percent, ratio


@pytest.mark.parametrize(
    ("targets", "value", "shown"),
    [
        (np.array([25443, 1200000], np.float32), 25443.4, "25,443"),
        (np.array([25443, 199000]), 1234567.5, "1,234,568"),
        (np.array([1.5, 2.0, 3.25], np.float32), 2.0, "2.00"),
        (np.array([0.1, 0.7], np.float32), 0.30000001, "0.3"),
        (np.random.default_rng(0).normal(50, 1, 100).astype(np.float32), 51.23456, "51.23"),
        (np.random.default_rng(0).normal(0.005, 0.001, 100), 0.00512345, "0.005123"),
        (np.array([np.nan, np.inf, 3.5]), 4.25, "4.2"),
        (np.array([]), 4.25, "4"),
        (np.array([1.0, 2.0]), -0.3, "0"),
        (np.array([1.0, 2.0]), 1e20, "1e+20"),
        (np.array([1.0, 2.0]), math.nan, "not a number"),
        (np.array([1.0, 2.0]), -math.inf, "minus infinity"),
    ],
)
def test_values_have_the_targets_decimals(targets, value, shown):
    assert digits_of(targets).value(value) == shown


def test_errors_have_at_least_three_digits():
    assert Digits(0).measure(11729.4) == "11,729"
    assert Digits(0).measure(0.5312) == "0.531"
    assert Digits(2).measure(1234.5678) == "1,234.57"
    assert Digits(0).measure(0) == "0"


def test_parts_and_ratios():
    assert percent(0.9734) == "97.3 %"
    assert percent(math.nan) == "not a number"
    assert [ratio(value) for value in (0.98765, -0.000812, 12.3, math.inf)] == [
        "0.988",
        "-0.0008",
        "12.300",
        "infinite",
    ]
