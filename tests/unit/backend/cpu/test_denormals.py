"""Flush-to-zero inside steps, and only there."""

import ctypes
import platform

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu import denormals
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.backend.cpu.compile import compiler, library, shared
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
    program = trace(lambda: (moment.assign(ops.multiply(moment, 0.5)), {})[1], {})
    CpuBackend(jit_compile=jit_compile).executable(program, {}).run()
    assert not moment.numpy().any()


HALVES = """
#include <atomic>
#include <chrono>
#include <thread>
static std::thread::id caller;
static std::atomic<bool> is_shared;
extern "C" void begin() { caller = std::this_thread::get_id(), is_shared = false; }
extern "C" void halve(float *halves, int64_t part) {  // the caller waits until another thread has done a part
    volatile float smallest = 1.17549435e-38f;
    halves[part] = smallest * 0.5f;
    if (std::this_thread::get_id() != caller) is_shared = true;
    for (int n = 0; n < 2000 && !is_shared; ++n) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
"""


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_threads_take_the_callers_environment():
    """Also threads that began in another."""
    parallel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    native = library(HALVES, ("scalar.h",))
    halve = ctypes.cast(native.halve, ctypes.c_void_p)
    halves = np.empty(8, np.float32)

    def run():
        native.begin()
        parallel(shared("dp_parallel"))(3, len(halves), halve, halves.ctypes.data)
        return halves.copy()

    assert (run() > 0).all()
    with denormals.flush_to_zero():
        assert not run().any()
    assert (run() > 0).all()
