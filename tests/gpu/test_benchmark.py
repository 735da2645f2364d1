"""The benchmark of matrix products runs: on the emulator, where its times mean nothing."""

import re
import sys

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
SCRIPT = str(ROOT / "benchmarks" / "gemm.py")


def test_products_of_our_kernels(tmp_path):
    out = tmp_path / "results" / "gemm.md"
    done = emulated(
        sys.executable, SCRIPT, "--quick", "--providers", "dptrain", "--output", str(out), PYTHONWARNINGS=""
    )
    assert (done.code, done.err) == (0, "")
    assert out.read_text() == done.out
    assert "On an emulated GPU" in done.out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.out.splitlines() if "20-16-10" in line]
    assert [(row[2].rstrip(" *"), row[3]) for row in rows] == [
        ("y1", "8 x 16 x 20"),
        ("dkernel1", "20 x 16 x 8"),
        ("y2", "8 x 10 x 16"),
        ("dkernel2", "16 x 10 x 8"),
        ("dx2", "8 x 16 x 10"),
    ]
    for row in rows:
        assert len(row) == 5 + 2 * 2, "time and TFLOP/s of both precisions"
        assert all(re.match(r"[\d,.]+ \([\d,.]+ to [\d,.]+\)$", row[place]) for place in (5, 7))


def test_a_provider_that_is_not_installed_is_left_out(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['nvmath'] = None")
    done = emulated(sys.executable, SCRIPT, "--quick", PYTHONPATH=f"{tmp_path}:{ROOT}", PYTHONWARNINGS="")
    assert (done.code, done.err) == (0, "")
    assert done.out.count("pip install 'dptrain[cublaslt]'") == 2
    assert "dptrain tf32" in done.out
