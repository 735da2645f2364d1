"""Batches from a script's own code on `--device cuda`, on the emulated driver: the CPU's numbers."""

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "batches.py")


def train(ranks: int, out, device: str, **options: str) -> dict[str, np.ndarray]:
    done = emulated_ranks(ranks, SCRIPT, str(out), device, EMULATOR_DEVICES="2", **options)
    assert (done.code, done.err) == (0, "")
    with np.load(out) as saved:
        return dict(saved)


@pytest.mark.long
def test_the_losses_of_the_cpu(tmp_path):
    cpu = train(0, tmp_path / "cpu.npz", "cpu")
    assert cpu["loss"][-1] < cpu["loss"][0]
    assert cpu["prediction"].shape == (24, 3)
    random = {"EMULATOR_ORDER": "shuffled", "EMULATOR_STREAMS": "random"}
    cuda = train(2, tmp_path / "cuda.npz", "cuda", **random)
    for name, values in cpu.items():
        np.testing.assert_allclose(cuda[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
