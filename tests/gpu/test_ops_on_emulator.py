"""The op tests of the CUDA backend, on the emulated driver and under its checks."""

import re
import sys

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="tests/ops run here directly")
MODES = {
    "in order": {"DPTRAIN_OPS_EXAMPLES": "10"},
    "reverse order, random streams": {
        "DPTRAIN_OPS_EXAMPLES": "5",
        "EMULATOR_ORDER": "reverse",
        "EMULATOR_STREAMS": "random",
    },
    "shuffled order": {"DPTRAIN_OPS_EXAMPLES": "5", "EMULATOR_ORDER": "shuffled", "EMULATOR_STREAMS": "random"},
    "every access checked": {"DPTRAIN_OPS_EXAMPLES": "3", "EMULATOR_SANITIZE": "all"},
    "every access checked, shuffled": {
        "DPTRAIN_OPS_EXAMPLES": "2",
        "EMULATOR_SANITIZE": "all",
        "EMULATOR_ORDER": "shuffled",
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_ops(mode):
    options = MODES[mode]
    # A checked run of the large batches takes minutes, and their kernels are those of the small ones.
    chosen = "cuda and not large_batches" if "EMULATOR_SANITIZE" in options else "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops", "-k", chosen]
    done = emulated(*command, cwd=ROOT, PYTHONWARNINGS="", **options)
    assert done.code == 0, done.out + done.err
    passed = re.search(r"(\d+) passed", done.out)
    assert passed is not None
    assert int(passed[1]) > 50
    assert "skipped" not in done.out
    assert "race" not in done.err
