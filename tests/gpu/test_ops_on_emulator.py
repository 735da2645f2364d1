"""The op tests of the CUDA backend, on the emulated driver and under its checks."""

import re
import sys

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="tests/ops run here directly")
# Tests of users' ops, all of which are CUDA's though their names do not say it, but for those of other backends.
USERS = "cuda or (test_custom_ops and not numpy and not numba)"
# mode -> (which tests, environment). A checked run of what is large takes minutes, and its kernels are those of the
# small; planted mistakes of users' ops would be found there by the checks, not by what is compared. Checks ask which
# accesses a barrier orders, in whatever order they run: one run of them is enough, in shuffled order.
MODES = {
    "in order": (USERS, {"DPTRAIN_OPS_EXAMPLES": "10"}),
    "reverse order, random streams": (
        "cuda",
        {"DPTRAIN_OPS_EXAMPLES": "5", "EMULATOR_ORDER": "reverse", "EMULATOR_STREAMS": "random"},
    ),
    "shuffled order": (
        "cuda",
        {"DPTRAIN_OPS_EXAMPLES": "5", "EMULATOR_ORDER": "shuffled", "EMULATOR_STREAMS": "random"},
    ),
    "every access checked, shuffled order": (
        "(cuda and not large_batches and not more_than_one_grid) or right_kernel or launch or examples",
        {
            "DPTRAIN_OPS_EXAMPLES": "5",
            "EMULATOR_SANITIZE": "all",
            "EMULATOR_ORDER": "shuffled",
            "EMULATOR_STREAMS": "random",
        },
    ),
}

# Prints what the ops that sum and gather leave behind, in hexadecimal.
BITS = """
import numpy as np
from dptrain.backend.base import RowSum
from dptrain.backend.cuda.backend import CudaBackend
ops, rng = CudaBackend(), np.random.default_rng(0)
logits = ops.upload(rng.standard_normal((1025, 37)).astype(np.float32) * 30)
labels = ops.upload(rng.integers(0, 37, 1025))
dlogits, sums, totals = ops.empty((1025, 37)), ops.zeros((4,)), ops.zeros((3,), np.float64)
values, correct, weights = ops.empty((1025,)), ops.empty((1025,)), ops.upload(rng.random(1025).astype(np.float32))
ops.softmax_cross_entropy(logits, labels, weights, 3, dlogits, values, correct)
ops.sum_rows(RowSum(values, weights, sums[:1], sums[1:2]), RowSum(correct, None, sums[2:3], sums[3:]))
flat = ops.upload(rng.standard_normal(70_001).astype(np.float32) * np.float32(1e6))
for place, op in enumerate((ops.sum, ops.squared_norm, ops.count_nonfinite)):
    op(flat, totals[place : place + 1])
batch = ops.empty((1025, 24))
ops.gather(ops.upload(rng.integers(0, 256, (50, 24), np.uint8)), labels, 1 / 255, -0.5, batch)
print(*(ops.download(one).tobytes().hex() for one in (dlogits, sums, totals, batch)))
"""


def test_sums_and_gathers_have_the_same_bits_in_any_order():
    orders = [{}, {"EMULATOR_ORDER": "reverse"}]
    orders += [{"EMULATOR_ORDER": "shuffled", "EMULATOR_SEED": seed, "EMULATOR_STREAMS": "random"} for seed in "12"]
    found = set()
    for options in orders:
        done = emulated(sys.executable, "-c", BITS, **options)
        assert (done.code, done.err) == (0, "")
        found.add(done.out)
    assert len(found) == 1
    assert len(found.pop()) > 2 * 4 * 1025 * 37


@pytest.mark.parametrize("mode", MODES)
def test_ops(mode):
    chosen, options = MODES[mode]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops", "-k", chosen]
    done = emulated(*command, cwd=ROOT, PYTHONWARNINGS="", **options)
    assert done.code == 0, done.out + done.err
    passed = re.search(r"(\d+) passed", done.out)
    assert passed is not None
    assert int(passed[1]) > 400
    assert "skipped" not in done.out
    assert "race" not in done.err
