"""How much each field matters."""

import sys

import numpy as np
import pytest

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")

from dptrain.sweeps.analysis import importance
from dptrain.sweeps.analysis.importance import importances
from dptrain.sweeps.analysis.statistics import summarize
from dptrain.sweeps.records import Trial
from dptrain.sweeps.reporting.fields import swept_fields
from dptrain.sweeps.space import Space
from tests.unit.sweeps.samples import endings

SPACE = Space(
    grid={"kind": ["relu", "tanh", None]}, random={"rate": "log:1e-4..1e-1", "units": "16..256"}, samples=20, seed=2
)


def importance_of(value, space=SPACE, names=None):
    trials = [Trial(number, setting) for number, setting in enumerate(space.settings())]
    ended = endings({trial.number: [value(trial.setting), value(trial.setting)] for trial in trials})
    fields = swept_fields((names or space).to_dict(), trials, space.fields)
    return importances(trials, summarize(trials, ended, "val_accuracy", "max"), fields)


def test_what_decides_the_value_is_what_matters():
    pytest.importorskip("sklearn", reason="importances need the extra 'optuna'")
    pytest.importorskip("optuna", reason="importances need the extra 'optuna'")
    rate = importance_of(lambda setting: -((np.log10(setting["rate"]) + 2.5) ** 2))
    assert next(iter(rate)) == "rate"
    assert rate["rate"] > 0.9
    assert sum(rate.values()) == pytest.approx(1)
    kind = importance_of(lambda setting: 0.9 if setting["kind"] is None else 0.5)
    assert kind["kind"] > 0.9
    assert importance_of(lambda setting: 0.9 if setting["kind"] is None else 0.5) == kind
    grid = importance_of(lambda setting: setting["b"], Space(grid={"a": [1, 2, 3], "b": [0.1, 1, 10], "c": [7]}))
    assert grid["b"] > 0.9


def test_nothing_can_be_said_of_few_trials_or_equal_ones():
    pytest.importorskip("optuna", reason="importances need the extra 'optuna'")
    assert importance_of(lambda setting: 0.5) == {}
    assert importance_of(lambda setting: setting["a"], Space(grid={"a": [1, 2, 3]})) == {}
    # a grown sweep may hold values of an earlier range
    now = Space(random={"a": "5.0..9.0"}, samples=1)
    assert importance_of(lambda setting: setting["a"], Space(random={"a": "0.0..1.0"}, samples=9), names=now) == {}


@pytest.mark.parametrize("missing", ["optuna", "sklearn"])
def test_without_what_it_takes(monkeypatch, missing):
    for module in (missing, f"{missing}.ensemble"):
        monkeypatch.setitem(sys.modules, module, None)
    assert not importance.installed()
