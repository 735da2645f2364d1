"""Gradients that float16 does not hold are infinite, and noticed as any others that are not finite."""

import json

import pytest

from tests.conftest import ROOT
from tests.launching import mpirun


@pytest.fixture(scope="module")
def outcomes():
    done = mpirun(3, str(ROOT / "tests/mpi/scripts/rounded.py"))
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def test_the_health_check_ends_the_training(outcomes):
    code, message = outcomes["large"]
    assert code == 76
    assert message.startswith("training diverged in step 1 of epoch 1: ")
    assert outcomes["large, exact"] == outcomes["large, bfloat16"] == ["done", True, None]


def test_a_loss_scale_falls_until_they_fit(outcomes):
    assert outcomes["scaled, exact"] == ["done", True, 2.0**24]
    end, finite, scale = outcomes["scaled"]
    assert (end, finite) == ("done", True)
    assert 2.0**9 <= scale <= 2.0**16
