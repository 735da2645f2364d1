"""Beside Keras on JAX, in a process of its own: JAX' threads do not go with tests that fork."""

import importlib.util
import re
import sys

import pytest

from tests.conftest import ROOT
from tests.launching import COMPILES_QUICKLY, run
from tests.unit.layers.cases import CASES

# What every run of the tests compares: whole trainings, and what costs little of every layer, loss and metric.
COMPARED = [
    "test_trajectories.py",
    "test_layers.py::test_configurations_of_every_layer",
    "test_losses_and_metrics.py::test_names",
    "test_losses_and_metrics.py::test_configurations_travel_both_ways",
]


@pytest.mark.long
def test_beside_keras():
    for package in ("keras", "jax"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    tests = [str(ROOT / "tests" / "against_keras" / name) for name in COMPARED]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    done = run(command, cwd=ROOT, timeout=300, KERAS_BACKEND="jax", XLA_FLAGS=COMPILES_QUICKLY)
    assert done.code == 0, done.out + done.err
    passed = re.search(r"(\d+) passed", done.out)
    assert passed is not None
    assert int(passed[1]) >= 4 + len(CASES)  # each layer once at least
    assert "skipped" not in done.out
