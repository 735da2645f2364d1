"""Choosing a backend, and finding the CUDA sources."""

import re
import sys

import pytest

from dptrain import backend
from dptrain.errors import ConfigError, DeviceError


def test_create(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycuda", None)
    assert backend.create("auto", "float32", 3, False).description == "CPU, 3 threads, float32, NumPy"
    assert backend.create("cpu", "float64", 1, False).description == "CPU, 1 thread, float64, NumPy"


def test_compiled_where_there_is_a_compiler(monkeypatch):
    compiled = backend.create("cpu", "float32", 1, True)
    assert re.fullmatch(r"CPU, 1 thread, float32, compiled by .*\d.*", compiled.description)
    assert compiled.numerics != backend.create("cpu", "float32", 1, False).numerics
    monkeypatch.setenv("DPTRAIN_JIT_COMPILE", "1")
    assert backend.create("cpu", "float32", 1).numerics == compiled.numerics
    with pytest.raises(ConfigError, match="jit_compile = 'always': expected True, False or 'auto'"):
        backend.create("cpu", "float32", 1, "always")


@pytest.mark.parametrize("can", [False, True])
def test_products_in_tiles_are_told(monkeypatch, can):
    """Only where a policy has such products, or ranks without tiles could not train in float32 beside others."""
    monkeypatch.setattr("dptrain.backend.cpu.backend.has_tiles", lambda: can)
    uses_tiles = {}
    for policy in ("float32", "mixed_bfloat16", "bfloat16", "mixed_float16"):
        cpu_backend = backend.create("cpu", policy, 1, True)
        uses_tiles[policy] = "products in AMX tiles" in cpu_backend.numerics
        assert ("products in AMX tiles" in cpu_backend.description) == uses_tiles[policy]
    assert uses_tiles == {"float32": False, "mixed_bfloat16": can, "bfloat16": can, "mixed_float16": False}
    assert "AMX" not in backend.create("cpu", "bfloat16", 1, False).numerics


def test_without_a_compiler_numpy_does_it(monkeypatch):
    monkeypatch.delenv("DPTRAIN_JIT_COMPILE", raising=False)
    monkeypatch.setattr("dptrain.backend.cpu.backend.compiler", lambda: None)
    cpu_backend = backend.create("cpu", "float32", 1)
    assert cpu_backend.description == "CPU, 1 thread, float32, NumPy: no C++ compiler on PATH"
    with pytest.raises(ConfigError, match=r"jit_compile=True needs a C\+\+ compiler"):
        backend.create("cpu", "float32", 1, True)


def without_cuda_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what imports PyCUDA be imported again, by this test alone."""
    ours = (f"dptrain.backend.cuda.{name}" for name in ("backend", "gpu.device", "memory", "transfers.host"))
    for name in (*ours, "pycuda", "pycuda.driver"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(backend, "cuda", raising=False)


def test_without_pycuda_only_the_cpu_is_left(monkeypatch):
    without_cuda_module(monkeypatch)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(DeviceError, match=r"PyCUDA is not installed: pip install 'pycuda>="):
        backend.create("cuda", "float32", 1)
    assert backend.create("auto", "float32", 1, False).description == "CPU, 1 thread, float32, NumPy"


def test_without_a_driver_auto_says_why_it_takes_the_cpu(monkeypatch, tmp_path):
    without_cuda_module(monkeypatch)
    (tmp_path / "pycuda").mkdir()
    (tmp_path / "pycuda" / "__init__.py").write_text("")
    missing = "libcuda.so.1: cannot open shared object file"
    (tmp_path / "pycuda" / "driver.py").write_text(f"raise ImportError({missing!r})")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver: .*libcuda\.so\.1.*install the driver"):
        backend.create("cuda", "float32", 1)
    description = backend.create("auto", "float32", 1, False).description
    assert description.startswith("CPU, 1 thread, float32, NumPy (no GPU: no NVIDIA driver")
    assert backend.create("auto", "float64", 1, False).description == "CPU, 1 thread, float64, NumPy"


def test_refused():
    with pytest.raises(ConfigError, match="device = 'gpu'"):
        backend.create("gpu", "float32", 1)
    with pytest.raises(ConfigError, match="gpu_select = 'first'"):
        backend.create("cpu", "float32", 1, gpu_select="first")
    with pytest.raises(ConfigError, match="dtype policy 'float8'"):
        backend.create("cpu", "float8", 1)
    with pytest.raises(ConfigError, match="precision = 'fp8': expected 'float32' or 'tf32'"):
        backend.create("cpu", "float32", 1, precision="fp8")
    with pytest.raises(ConfigError, match="gemm = 'mkl': expected 'dptrain', 'cublaslt' or 'auto'"):
        backend.create("cpu", "float32", 1, gemm="mkl")
    with pytest.raises(ConfigError, match="conv = 'cublaslt': expected 'dptrain', 'cudnn' or 'auto'"):
        backend.create("cpu", "float32", 1, conv="cublaslt")


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cpu"), ("float32", "auto"), ("float64", "auto")])
def test_what_only_a_gpu_does_is_not_left_out_in_silence(monkeypatch, dtype, device):
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(ConfigError, match=r"'tf32' needs a GPU, but this is the CPU; use --precision float32"):
        backend.create(device, dtype, 1, precision="tf32")
    with pytest.raises(ConfigError, match=r"'cublaslt' needs a GPU, but this is the CPU; use --gemm dptrain"):
        backend.create(device, dtype, 1, gemm="cublaslt")
    with pytest.raises(ConfigError, match=r"'cudnn' needs a GPU, but this is the CPU; use --conv dptrain"):
        backend.create(device, dtype, 1, conv="cudnn")
    assert backend.create(device, dtype, 1, gemm="auto", conv="auto").name == "cpu", "it takes what is there"
