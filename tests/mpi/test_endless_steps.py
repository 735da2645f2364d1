"""A step that never ends does not keep a signal from saving the steps before it."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import Finished, python

SCRIPT = str(ROOT / "tests/mpi/scripts/endless.py")
long = pytest.mark.long
CASES = [
    (0, "many", "SIGTERM", 5),
    pytest.param(0, "steps", "SIGINT", 5, marks=long),
    pytest.param(0, "eager", "SIGUSR1", 5, marks=long),
    pytest.param(0, "numpy", "SIGTERM", 5, marks=long),
    pytest.param(0, "validation", "SIGTERM", 8, marks=long),
    pytest.param(3, "one", "SIGTERM", 5, marks=long),
    pytest.param(3, "many", "SIGTERM", 5, marks=long),
    pytest.param(2, "steps", "SIGINT", 5, marks=long),
    pytest.param(3, "validation", "SIGUSR1", 8, marks=long),
]


def train(ranks: int, folder: Path, way: str, signal: str) -> Finished:
    off = {"DPTRAIN_JIT_COMPILE": "off"} if way == "numpy" else {}
    folder.mkdir(exist_ok=True)
    return python(ranks, SCRIPT, str(folder), way, signal, fresh=True, timeout=110, **off)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.parametrize(("ranks", "way", "signal", "steps"), CASES)
def test_a_signal_saves_the_steps_before_one_that_does_not_end(tmp_path, ranks, way, signal, steps):
    ended = train(ranks, tmp_path / "ended", way, signal)
    # Python ends a script alone by the signal itself.
    assert ended.code in ((130, -2) if signal == "SIGINT" else (75,)), ended.err
    began = "interrupted" if signal == "SIGINT" else signal
    saved = rf"{began} after {steps} steps, saved as \S+/000001-step-{steps}; the step that followed did not end"
    assert re.search(saved, ended.err), ended.err
    assert train(ranks, tmp_path / "ended", way, "none").code == 0
    assert train(ranks, tmp_path / "whole", way, "none").code == 0
    ours, theirs = (np.load(tmp_path / name / "weights.npz") for name in ("ended", "whole"))
    assert len(theirs.files) == 8
    for name in theirs.files:
        np.testing.assert_array_equal(ours[name], theirs[name])
