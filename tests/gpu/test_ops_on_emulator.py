"""The tests of the CUDA backend, on the emulated driver and under its checks."""

import re
import sys

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, inside_emulator, skip_without_emulator
from tests.launching import run
from tests.sample import taken

pytestmark = pytest.mark.skipif(inside_emulator(), reason="tests/ops run here directly")
# The largest kernels, a library's that are measured, and what is not about kernels, run in order; others in an unusual
# one, under all checks, which ask what a barrier orders, in whatever order it runs: one run is enough.
LARGE = "(1100 or of_every_tile or every_layer or never_chosen)"
RANDOM = "random_programs"
PRODUCTS = "(products or convolutions or libraries or wgmma)"
CHECKED = {"EMULATOR_SANITIZE": "all", "EMULATOR_ORDER": "shuffled", "EMULATOR_STREAMS": "random"}
# mode -> (which tests, how many at least of those that are in every run and of the long ones, environment)
MODES = {
    "in order": (f"not on_cuda and not {RANDOM} or {LARGE}", {"not long": 45, "long": 10}, {}),
    "checked: programs": (f"on_cuda and not {PRODUCTS} and not {LARGE}", {"not long": 250, "long": 370}, CHECKED),
    "checked: products and convolutions": (
        f"on_cuda and {PRODUCTS} and not {LARGE}",
        {"not long": 40, "long": 45},
        CHECKED,
    ),
    "checked: random programs": (RANDOM, {"not long": 13, "long": 38}, CHECKED),
}
# In every run; products are also in tests/gpu and tests/e2e then.
OFTEN = ("checked: programs",)

# Prints what sums, products and a training leave behind, in hexadecimal.
BITS = """
import numpy as np
from dptrain.backend.cuda.backend import CudaBackend
from tests.ops.test_programs_on_cuda import mlp, shapes_program
backend, rng = CudaBackend(), np.random.default_rng(0)
program, values = shapes_program(rng, 700)
executable = backend.executable(program, values)
executable.run()
print(*(value.tobytes().hex() for value in executable.outputs.values()))
program, data = mlp(rng)
backend.executable(program, data | {"rows": rng.integers(0, 50, 60)}).run([0, 12, 24, 36])
print(*(variable.numpy().tobytes().hex() for variable in program.state))
"""


def test_results_have_the_same_bits_in_any_order():
    orders = [{}, {"EMULATOR_ORDER": "reverse"}]
    orders += [{"EMULATOR_ORDER": "shuffled", "EMULATOR_SEED": seed, "EMULATOR_STREAMS": "random"} for seed in "12"]
    results = set()
    for options in taken(orders, 2):
        finished = emulated(sys.executable, "-c", BITS, **options)
        assert (finished.code, finished.err) == (0, "")
        results.add(finished.out)
    assert len(results) == 1
    assert len(results.pop()) > 10_000


def test_chosen_files_start_the_emulator():
    skip_without_emulator()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_custom_ops.py"]
    finished = run(
        [*command, "-k", "right_kernel"], cwd=ROOT, timeout=600, PYTHONWARNINGS="", CUDA_VISIBLE_DEVICES=None
    )
    assert finished.code == 0, finished.out + finished.err
    assert re.search(r"\b5 passed\b", finished.out)
    assert "skipped" not in finished.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "marked"),
    [
        pytest.param(mode, marked, marks=[] if mode in OFTEN and marked == "not long" else pytest.mark.long)
        for mode in MODES
        for marked in ("not long", "long")
    ],
)
def test_ops(mode, marked):
    chosen, least, options = MODES[mode]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops", "-k", chosen, "-m", marked]
    finished = emulated(*command, cwd=ROOT, timeout=1800, PYTHONWARNINGS="", **options)
    assert finished.code == 0, finished.out + finished.err
    passed = re.search(r"(\d+) passed", finished.out)
    assert passed is not None
    assert int(passed[1]) >= least[marked]
    assert "skipped" not in finished.out
    assert "race" not in finished.err
