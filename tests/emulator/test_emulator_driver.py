"""What only the emulator can be asked: its options, several devices, several processes, the trace, speed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sample import examples

HERE = Path(__file__).resolve().parent
DEVICES = """
import ctypes
import pycuda.driver as cuda
cuda.init()
for i in range(cuda.Device.count()):
    uuid = ctypes.create_string_buffer(16)
    assert ctypes.CDLL("libcuda.so.1").cuDeviceGetUuid_v2(uuid, i) == 0
    h = uuid.raw.hex()
    print(cuda.Device(i).pci_bus_id(), "-".join(("GPU", h[:8], h[8:12], h[12:16], h[16:20], h[20:])))
"""


def test_visible_devices(emulator: Any) -> None:
    def table(**options: str) -> list[str]:
        return emulator.code(DEVICES, EMULATOR_DEVICES="4", **options).stdout.splitlines()

    full = table()
    assert len(set(full)) == 4
    assert table(CUDA_VISIBLE_DEVICES="2,0") == [full[2], full[0]]
    uuid = full[3].split()[1]
    assert table(CUDA_VISIBLE_DEVICES=uuid) == [full[3]]
    assert table(CUDA_VISIBLE_DEVICES="1,9,0") == [full[1]]  # the list ends where no device is named
    none = emulator.code(DEVICES, CUDA_VISIBLE_DEVICES="")
    assert "no CUDA-capable device is detected" in none.stderr


def test_memory_limit_and_poison(emulator: Any) -> None:
    finished = emulator.code(
        """
import numpy as np, pycuda.driver as cuda
cuda.init(); context = cuda.Device(0).retain_primary_context(); context.push()
a = cuda.mem_alloc(3 << 20)
try:
    cuda.mem_alloc(2 << 20)
except cuda.MemoryError as error:
    print(error, cuda.mem_get_info())
a.free()
b = cuda.mem_alloc(4 << 20)
out = np.empty(1 << 20, np.float32); cuda.memcpy_dtoh(out, b)
print(np.isnan(out).all()); b.free(); context.pop()
""",
        EMULATOR_MEMORY="4M",
    )
    assert finished.stdout == f"cuMemAlloc failed: out of memory ({1 << 20}, {4 << 20})\nTrue\n", finished.stderr


def test_unmodelled_calls_say_so(emulator: Any) -> None:
    finished = emulator.code(
        """
import pycuda.driver as cuda
cuda.init(); context = cuda.Device(0).retain_primary_context(); context.push()
try:
    cuda.TextureReference()
except cuda.Error as error:
    print(error)
context.pop()
"""
    )
    assert "not supported" in finished.stdout
    assert "cuTexRefCreate is not modelled" in finished.stderr


def test_bad_options_are_refused(emulator: Any) -> None:
    finished = emulator.code(DEVICES, EMULATOR_MEMORY="lots")
    assert finished.returncode == 2
    assert "EMULATOR_MEMORY=lots: expected a whole number" in finished.stderr


def test_compile_errors_name_the_line(emulator: Any) -> None:
    finished = emulator.code(
        """
import pycuda.driver as cuda
from pycuda.compiler import compile
cuda.init(); context = cuda.Device(0).retain_primary_context(); context.push()
for source, options in (("__global__ void k(float *x) {\\n  x[0] = y;\\n}", []),
                        ("__global__ void k(float *x) { __shared__ float a[20000]; a[0] = 1; x[0] = a[0]; }", []),
                        ("__global__ void k() {}", ["--no-such-option"])):
    try:
        compile(source, options=options)
    except cuda.CompileError as error:
        print(error.stderr)
context.pop()
"""
    )
    assert "kernel.cu:3:" in finished.stdout  # PyCUDA's extern "C" is line 1
    assert "'k' uses too much shared data (0x13880 bytes, 0xc000 max)" in finished.stdout
    assert "Unknown option '--no-such-option'" in finished.stdout


def test_a_module_that_does_not_load_leaves_no_log(emulator: Any) -> None:
    """Callers read as much of the buffers as the sizes say, which nobody else has filled."""
    finished = emulator.code(
        """
import ctypes
import pycuda.driver as cuda
cuda.init(); context = cuda.Device(0).retain_primary_context(); context.push()
INFO, ERROR = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
options = (ctypes.c_int * 4)(3, 4, 5, 6)  # CU_JIT_INFO_LOG_BUFFER, _SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER, _SIZE_BYTES
values = (ctypes.c_void_p * 4)(ctypes.addressof(INFO), 64, ctypes.addressof(ERROR), 64)
module = ctypes.c_void_p()
code = ctypes.CDLL("libcuda.so.1").cuModuleLoadDataEx(ctypes.byref(module), b"no module", 4, options, values)
print(code != 0, values[1] or 0, values[3] or 0)
context.pop()
"""
    )
    assert finished.stdout == "True 0 0\n", finished.stderr


def test_trace(emulator: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert emulator.python("truth.py", "votes", EMULATOR_TRACE=str(file)).returncode == 0
    events = json.loads(file.read_text())["traceEvents"]
    (launch,) = (event for event in events if event["cat"] == "kernel")
    assert launch["name"] == "votes"
    assert launch["args"]["block"] == [96, 1, 1]
    assert launch["dur"] > 0
    assert sum(event["cat"] == "memcpy" for event in events) >= 5
    memory = [event["name"] for event in events if event["cat"] == "memory"]
    assert memory.count("cuMemAlloc") == memory.count("cuMemFree") > 0


OTHER_PROCESSES = """
import pycuda.driver as cuda
cuda.init(); context = cuda.Device(0).retain_primary_context(); context.push()
memory = cuda.mem_alloc(1000)
flags = cuda.event_flags
for call in (lambda: cuda.mem_get_ipc_handle(memory), lambda: cuda.Event(flags.INTERPROCESS | flags.DISABLE_TIMING)):
    try: call()
    except cuda.Error as error: print(error)
memory.free(); context.pop()
"""


def test_what_other_processes_would_map_is_refused(emulator: Any) -> None:
    finished = emulator.code(OTHER_PROCESSES)
    assert [line.rpartition(": ")[2] for line in finished.stdout.splitlines()] == ["operation not supported"] * 2
    assert "cuIpcGetMemHandle is not modelled" in finished.stderr
    assert "events between processes are not modelled" in finished.stderr


def test_run_command(emulator: Any) -> None:
    finished = emulator.run(sys.executable, str(HERE / "run"), sys.executable, str(HERE / "truth.py"), "votes")
    assert "ok votes" in finished.stdout
    wrong = emulator.run(sys.executable, str(HERE / "run"), "no-such-command")
    assert wrong.returncode == 1
    assert "cannot run no-such-command" in wrong.stderr


def test_products_as_large_as_a_training_has(emulator: Any) -> None:
    """Those of a 784-128-10 step at batch 32, each in many blocks with edges in every direction."""
    emulator.code(
        f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import truth, pycuda.driver as cuda
cuda.init(); context = cuda.Device(0).retain_primary_context(); context.push()
for m, n, k in ((32, 128, 784), (32, 10, 128), (128, 10, 32), (32, 128, 10), (784, 128, 32)):
    truth.product("gemm_tiled", m, n, k, ((n + 15) // 16, (m + 15) // 16), (16, 16, 1))
context.pop()
"""
    )


def test_the_header_is_precompiled_for_the_sources_that_it_fits(emulator: Any, tmp_path: Path) -> None:
    compiler = emulator.run("g++", "-dumpfullversion").stdout
    if int(compiler.split(".")[0]) < 12:
        pytest.skip("older ones may fail to load what they precompiled")
    plain = 'extern "C" __global__ void k(int *x) { x[threadIdx.x] = 1; }'
    for level, text, options, is_precompiled in (
        ("1", plain, ["-DOWN=1", "-arch=sm_75"], True),
        ("0", plain, ["-DEMU_INLINE=inline"], False),
        ("1", "#include <type_traits>\n" + plain, [], False),
        ("1", plain, ["-std=c++20"], False),
    ):
        source, preprocessed = tmp_path / "k.cu", tmp_path / "k.ii"
        source.write_text(text)
        command = ["nvcc", "--cubin", *options, "-o", str(tmp_path / "k.cubin"), str(source)]
        finished = emulator.run(*command, EMULATOR_KEEP=str(preprocessed), EMULATOR_OPTIMIZE=level)
        assert (finished.returncode, finished.stderr) == (0, "")
        matches = re.findall(
            r'^#pragma GCC pch_preprocess ".*/precompiled/(.*?)/', preprocessed.read_text(), re.MULTILINE
        )
        assert matches == [f"plain-O{level}"] * is_precompiled


# ------------------------------------------------------------------ the nvcc stand-in, without a compiler

specification = importlib.util.spec_from_file_location("dptrain_emulator_nvcc", HERE / "nvcc.py")
assert specification
assert specification.loader
nvcc = importlib.util.module_from_spec(specification)
sys.modules[specification.name] = nvcc  # dataclasses look their module up
specification.loader.exec_module(nvcc)


def rewrite(text: str) -> str:
    rewriter = nvcc.Rewriter(text, nvcc.Arguments())
    return str(rewriter.run() + rewriter.trampolines())


def test_shared_variables_become_references() -> None:
    out = rewrite('extern "C" __global__ void k(int *x) {\n  __shared__ float a[2][3], b;\n  b = a[1][2];\n}\n')
    assert "struct emu_shared_1 { float a[2][3], b; };" in out
    assert "auto &a = emu::StaticShared<emu_shared_1, 1>::get().a;" in out
    assert "auto &b = emu::StaticShared<emu_shared_1, 1>::get().b;" in out
    assert 'emu::Trampoline<&k>{}, "k"' in out
    dynamic = rewrite("__global__ void k() { extern __shared__ float4 s[]; s[0].x = 1; }")
    assert "float4 (&s)[] = *reinterpret_cast<float4 (*)[]>(emu_self->shared_dynamic);" in dynamic


def test_kernels_in_templates_and_namespaces() -> None:
    out = rewrite(
        "namespace n { template <int N> __global__ void t(float *x) { x[0] = N; } __global__ void g(int) {} }\n"
        "template __global__ void n::t<3>(float *);\n"
        "__global__ void __launch_bounds__(128, 2) __cluster_dims__(2, 1, 1) k(int) {}\n"
    )
    assert re.findall(r"Trampoline<&(.*?)>\{\}", out) == ["n::g", "n::t<3>", "k"]
    assert "emu::first(128, 2), emu_cluster(2, 1, 1)" in out


def test_inline_assembly_becomes_calls() -> None:
    out = rewrite(
        "__device__ void f(unsigned (&r)[2], unsigned at) {\n"
        '  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans"\n               ".shared.b16 {%0, %1}, [%2];"\n'
        '               : "=r"(r[0]), "=r"(r[at ? 1 : 0]) : "r"(at + 1) : "memory");\n'
        '  asm("cp.async.wait_group %0;" ::"n"(2));\n  asm volatile("" : "+f"(x) : : "memory");\n}\n'
    )
    assert "emu_ldmatrix(emu_r, 2, 1, (at + 1)," in out
    assert "(r[at ? 1 : 0]) = emu_r[1];" in out
    assert "emu_async_wait((2));" in out
    assert out[: out.index("emu_async_wait")].count("\n") == 4, "lines keep their numbers"
    for unknown in (
        '"bar.sync 0;"',
        '"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(p)',
        '"cp.async.cg.shared.global [%0], [%1], 8;" :: "r"(a), "l"(p)',
        '"cp.async.wait_group %1;" :: "n"(2)',
    ):
        with pytest.raises(nvcc.CompileError, match=r"^error: [^\n]*inline assembly '[^\n]*$"):
            rewrite(f"__device__ void f() {{ asm volatile({unknown}); }}\n")


def test_words_in_strings_stay() -> None:
    text = "const char *s = \"__shared__ {\";\nvoid f() { char c = '{'; }\n__global__ void k() {}\n"
    assert '"__shared__ {"' in rewrite(text)
    assert rewrite(text).count("Trampoline<&k>") == 1


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.sampled_from(["\n", "__shared__ int a{}[4]; ", "int b = 1; ", "{ int c; }\n"]), max_size=12))
def test_lines_keep_their_numbers(parts: list[str]) -> None:
    """Whatever is rewritten, the text has as many lines in front of a mark as before."""
    body = "".join(part.format(i) if "{}" in part else part for i, part in enumerate(parts))
    text = f"__global__ void k() {{\n{body}\nMARK;\n}}\n"
    before = text[: text.index("MARK")].count("\n")
    out = nvcc.Rewriter(text, nvcc.Arguments()).run()
    assert out[: out.index("MARK")].count("\n") == before
    assert "__shared__" not in out


def test_options() -> None:
    parsed = nvcc.parse(["--cubin", "-arch", "sm_80", "-I", "x", "-DA=1", "-Xptxas", "-v", "k.cu", "-O3"])
    assert (parsed.action, parsed.arch, parsed.inputs) == ("cubin", 800, ["k.cu"])
    assert parsed.preprocessor == ["-Ix", "-DA=1"]
    with pytest.raises(nvcc.CompileError, match="Unsupported gpu architecture"):
        nvcc.parse(["-arch=sm_120"])
    assert nvcc.gnu("c++14") == "gnu++17"
    assert nvcc.gnu("c++20") == "gnu++20"
