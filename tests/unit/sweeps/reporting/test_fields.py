"""Swept fields: what they were swept over, and on which axes they belong."""

import pytest

from dptrain.sweeps.records import Trial
from dptrain.sweeps.reporting.fields import swept_fields
from dptrain.sweeps.space import Space

SPACE = Space(
    grid={"units": [128, [256, 128]], "rate": [1e-4, 1e-3, 1e-2]},
    random={"dropout": "0.1..0.5", "decay": "log:1e-6..1e-2", "batch": "log:16..512", "kind": "relu,tanh", "n": "1..9"},
    samples=3,
)


def test_ranges_are_those_that_were_swept_not_the_values_that_were_drawn():
    trials = [Trial(number, setting) for number, setting in enumerate(SPACE.settings())]
    assert {field.name: field.range for field in swept_fields(SPACE.to_dict(), trials, SPACE.fields)} == {
        "units": "128 and [256, 128]",
        "rate": "0.0001, 0.001 and 0.01",
        "dropout": "0.1 to 0.5",
        "decay": "1e-06 to 0.01, evenly in the logarithm",
        "batch": "integers of 16 to 512, evenly in the logarithm",
        "kind": "relu and tanh",
        "n": "integers of 1 to 9",
    }


def test_fields_drawn_evenly_in_the_logarithm_have_logarithmic_axes():
    fields = swept_fields(SPACE.to_dict(), [], SPACE.fields)
    assert [field.name for field in fields if field.is_log] == ["rate", "decay", "batch"]


@pytest.mark.parametrize(
    ("values", "is_log"),
    [
        ([1e-5, 1e-3, 1e-1], True),
        ([1e-3, 1e-2, 1e-1], True),  # even steps of the logarithm
        ([0.1, 0.4, 0.7, 1.0], False),  # even steps
        ([32, 64, 128], False),  # less than a decade
        ([16, 32, 64, 128, 256], True),
        ([0.0, 1e-5, 1.0], False),
        ([-1.0, 1.0, 1000.0], False),
        ([0.01, 1.0], False),  # two values are no scale
        ([0.009, 0.9], False),  # more than 2 decades but for rounding
        ([1, 1000], True),
        ([7], False),
        ([1, "a"], False),
        ([True, False], False),
    ],
)
def test_grids_have_axes_by_their_steps(values, is_log):
    trials = [Trial(number, {"field": value}) for number, value in enumerate(values)]
    for space in (None, {"grid": {"field": values}}):
        [field] = swept_fields(space, trials, ["field"])
        assert field.is_log == is_log


def test_without_a_space_the_trials_values_stand_for_it():
    trials = [Trial(number, {"a": number, "b": [number % 2]}) for number in range(20)]
    assert [field.range for field in swept_fields(None, trials, ["a", "b"])] == [
        "20 values from 0 to 19",
        "[0] and [1]",
    ]
    assert [field.range for field in swept_fields({"unknown": 1}, trials, ["b"])] == ["[0] and [1]"]
