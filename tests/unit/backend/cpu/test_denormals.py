"""Flush-to-zero inside steps, and only there."""

import platform

import numpy as np
import pytest

from dptrain.backend.cpu import denormals
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.program.program import trace
from dptrain.program.tensor import Variable

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="the floating-point environment is switched on Linux on x86-64 and AArch64 only",
)
SMALLEST_NORMAL = np.float32(1.17549435e-38)


def half_of_smallest() -> np.float32:
    return np.multiply(np.full(64, SMALLEST_NORMAL), np.float32(0.5))[33]


def test_denormals_are_zero_inside_and_survive_outside():
    assert half_of_smallest() > 0
    with denormals.flush_to_zero():
        assert half_of_smallest() == 0
        assert np.multiply(np.full(64, SMALLEST_NORMAL), np.float32(2))[1] == np.float32(2.3509887e-38)
    assert half_of_smallest() > 0


def test_restored_after_an_exception():
    with pytest.raises(RuntimeError), denormals.flush_to_zero():
        raise RuntimeError
    assert half_of_smallest() > 0


@pytest.mark.parametrize("jit_compile", [False, True])
def test_decayed_moments_are_zero_in_a_step(jit_compile):
    moment = Variable(np.full(1000, SMALLEST_NORMAL), "moment")
    program = trace(lambda: moment.assign(moment * 0.5) or {}, {})
    CpuBackend(jit_compile=jit_compile).executable(program, {}).run()
    assert not moment.numpy().any()
