"""Whole trainings beside Keras' own, on JAX; in a process of their own: its threads do not go with tests that fork."""

import importlib.util
import re
import sys

import pytest

from tests.conftest import ROOT
from tests.launching import COMPILES_QUICKLY, run


def test_trajectories():
    for package in ("keras", "jax"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    tests = ROOT / "tests" / "against_keras" / "test_trajectories.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(tests)]
    done = run(command, cwd=ROOT, timeout=300, KERAS_BACKEND="jax", XLA_FLAGS=COMPILES_QUICKLY)
    assert done.code == 0, done.out + done.err
    passed = re.search(r"(\d+) passed", done.out)
    assert passed is not None
    assert int(passed[1]) >= 4
    assert "skipped" not in done.out
