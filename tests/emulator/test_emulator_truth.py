"""Kernels with known answers and PyCUDA's basics, in every mode; and on a real GPU where DPTRAIN_REAL_GPU=1 says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sample import sample

HERE = Path(__file__).resolve().parent
MODES: dict[str, dict[str, str]] = {
    "forward": {},
    "reverse": {"EMULATOR_ORDER": "reverse"},
    "shuffled": {"EMULATOR_ORDER": "shuffled", "EMULATOR_SEED": "5"},
    "random streams": {"EMULATOR_STREAMS": "random", "EMULATOR_SEED": "3"},
    "checked": {"EMULATOR_SANITIZE": "all"},
    "checked reverse": {"EMULATOR_SANITIZE": "all", "EMULATOR_ORDER": "reverse"},
}


def names(script: str) -> list[str]:
    return re.findall(r"^@check\ndef (\w+)", (HERE / script).read_text(), re.MULTILINE)


def all_passed(script: str, finished: subprocess.CompletedProcess[str]) -> None:
    failed = [line for line in finished.stdout.splitlines() if line.startswith("FAILED")]
    assert not failed
    assert finished.returncode == 0, finished.stderr
    assert [line.split()[1] for line in finished.stdout.splitlines() if line.startswith("ok ")] == names(script)
    assert "race" not in finished.stderr
    assert "leak" not in finished.stderr


@pytest.mark.parametrize("script", ["truth.py", "basics.py"])
@pytest.mark.parametrize("mode", sample(MODES, 6, first=4))
def test_known_answers(emulator: Any, script: str, mode: str) -> None:
    all_passed(script, emulator.python(script, EMULATOR_DEVICES="2", **MODES[mode]))


@pytest.mark.skipif(os.environ.get("DPTRAIN_REAL_GPU") != "1", reason="DPTRAIN_REAL_GPU=1 runs these on a real GPU")
@pytest.mark.parametrize("script", ["truth.py", "basics.py"])
def test_known_answers_on_a_gpu(script: str) -> None:
    finished = subprocess.run(
        [sys.executable, str(HERE / script)], capture_output=True, text=True, timeout=600, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    all_passed(script, finished)
