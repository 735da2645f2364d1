"""The tests of the CUDA backend, on the emulated driver and under its checks."""

import re
import sys

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="tests/ops run here directly")
# mode -> (which tests, environment). Kernels are tested in an unusual order and under all checks, the others once, and
# so the largest kernels. Checks ask which accesses a barrier orders, in whatever order they run: one run is enough.
MODES = {
    "in order": ("not on_cuda or 1100 or of_every_tile or every_layer", {}),
    "every access checked, shuffled order": (
        "on_cuda and not 1100 and not of_every_tile and not every_layer",
        {"EMULATOR_SANITIZE": "all", "EMULATOR_ORDER": "shuffled", "EMULATOR_STREAMS": "random"},
    ),
}

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
    found = set()
    for options in orders:
        done = emulated(sys.executable, "-c", BITS, **options)
        assert (done.code, done.err) == (0, "")
        found.add(done.out)
    assert len(found) == 1
    assert len(found.pop()) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_ops(mode):
    chosen, options = MODES[mode]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops", "-k", chosen]
    done = emulated(*command, cwd=ROOT, timeout=900, PYTHONWARNINGS="", **options)
    assert done.code == 0, done.out + done.err
    passed = re.search(r"(\d+) passed", done.out)
    assert passed is not None
    assert int(passed[1]) > (60 if chosen.startswith("not") else 380)
    assert "skipped" not in done.out
    assert "race" not in done.err
