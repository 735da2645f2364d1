"""Texts of models on `--device cuda`, on the emulated driver: the CPU's tokens."""

import json

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
SCRIPT = str(ROOT / "tests/mpi/scripts/generation.py")


@pytest.mark.long
def test_the_tokens_of_the_cpu(tmp_path):
    texts = []
    for device in ("cpu", "cuda"):
        done = emulated_ranks(0, SCRIPT, str(tmp_path / device), device, EMULATOR_SANITIZE="all")
        assert (done.code, done.err) == (0, "")
        texts.append(json.loads((tmp_path / device).read_text()))
    assert texts[0] == texts[1]
