"""Stream capture and graphs, where the planted bugs and the basics do not reach: trace, threads, loading functions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
START = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import ctypes, threading
import capturing, numpy as np, pycuda.driver as cuda
from pycuda.compiler import SourceModule
cuda.init(); context = cuda.Device(0).retain_primary_context(); context.push()
stream, other = (cuda.Stream(capturing.NON_BLOCKING) for _ in range(2))
x = cuda.to_device(np.ones(32, np.float32)); y = cuda.to_device(np.zeros(32, np.float32))
code = SourceModule("__global__ void twice(float *x) {{ x[threadIdx.x] *= 2; }}")
twice = code.get_function("twice")
def double(memory, on): twice(memory, block=(32, 1, 1), stream=on)
def first(memory): out = np.empty(32, np.float32); cuda.memcpy_dtoh(out, memory); return float(out[0])
cuda.Context.synchronize()
"""
END = "\nx.free(); y.free(); del stream, other, code; context.pop()\n"


def output(emulator: Any, text: str, **options: str) -> str:
    finished = emulator.code(START + text + END, EMULATOR_LEAKS="fail", **options)
    assert finished.returncode == 0, finished.stderr
    return str(finished.stdout)


def test_the_trace_counts_launches_and_marks_what_they_run(emulator: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    text = """
with capturing.captured(stream) as replay:
    double(x, stream); cuda.memcpy_dtod_async(y, x, 128, stream); double(y, stream)
double(x, stream)
for _ in range(3): replay.launch(stream)
stream.synchronize(); replay.close(); print(first(x), first(y))
"""
    for streams in ("inorder", "random"):
        assert output(emulator, text, EMULATOR_TRACE=str(file), EMULATOR_STREAMS=streams) == "16.0 32.0\n"
        events = json.loads(file.read_text())["traceEvents"]
        launches = [event for event in events if event["cat"] == "graph"]
        assert [event["name"] for event in launches] == ["graph launch"] * 3
        assert [event["args"]["graph"] for event in launches] == [1, 2, 3]
        assert [(event["args"]["nodes"], event["args"]["kernels"]) for event in launches] == [(3, 2)] * 3
        kernels = [event["args"].get("graph") for event in events if event["cat"] == "kernel"]
        assert kernels == [None, 1, 1, 2, 2, 3, 3]
        for launch in launches:
            inside = [event for event in events if event["args"].get("graph") == launch["args"]["graph"]]
            assert len(inside) == 4
            assert min(event["ts"] for event in inside) == launch["ts"]


def test_launches_of_one_graph_follow_each_other_on_any_streams(emulator: Any) -> None:
    text = """
with capturing.captured(stream) as replay:
    cuda.memcpy_dtod_async(y, x, 128, stream); double(y, stream); cuda.memcpy_dtod_async(x, y, 128, stream)
for _ in range(3): replay.launch(stream); replay.launch(other)
cuda.Context.synchronize(); replay.close(); print(first(x))
"""
    for seed in range(4):
        assert output(emulator, text, EMULATOR_STREAMS="random", EMULATOR_SEED=str(seed)) == "64.0\n"


def test_a_graph_may_be_destroyed_while_its_launch_is_queued(emulator: Any) -> None:
    text = """
with capturing.captured(stream) as replay:
    double(x, stream)
replay.launch(stream); replay.close(); stream.synchronize(); print(first(x))
"""
    assert output(emulator, text, EMULATOR_STREAMS="random", EMULATOR_SEED="1") == "2.0\n"


def test_a_stream_works_again_after_an_invalid_capture(emulator: Any) -> None:
    text = """
capturing.begin(stream)
double(x, stream)
try: stream.synchronize()
except cuda.LogicError: print(capturing.status(stream))
graph = ctypes.c_void_p(5)
print(capturing.DRIVER.cuStreamEndCapture(capturing.handle(stream), ctypes.byref(graph)), graph.value)
print(capturing.status(stream), first(x))
double(x, stream); stream.synchronize(); print(first(x))
"""
    assert output(emulator, text) == "2\n901 None\n0 1.0\n2.0\n"


@pytest.mark.parametrize(
    ("mode", "thread_mode", "result"),
    [
        ("GLOBAL", "GLOBAL", (900, 901)),
        ("GLOBAL", "THREAD_LOCAL", (0, 0)),
        ("GLOBAL", "RELAXED", (0, 0)),
        ("THREAD_LOCAL", "GLOBAL", (0, 0)),
        ("RELAXED", "GLOBAL", (0, 0)),
    ],
)
def test_what_another_thread_may_do_meanwhile(
    emulator: Any, mode: str, thread_mode: str, result: tuple[int, int]
) -> None:
    """Allocation in a thread with a mode of its own, beside a capture."""
    text = f"""
def work():
    context.push()
    mode = ctypes.c_int(capturing.{thread_mode}); address = ctypes.c_uint64()
    capturing.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == capturing.GLOBAL  # what it was before
    print(capturing.DRIVER.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64)))
    if address.value: capturing.call("cuMemFree_v2", address)
    context.pop()
capturing.begin(stream, capturing.{mode})
thread = threading.Thread(target=work); thread.start(); thread.join()
graph = ctypes.c_void_p()
print(capturing.DRIVER.cuStreamEndCapture(capturing.handle(stream), ctypes.byref(graph)))
if graph: capturing.call("cuGraphDestroy", graph)
"""
    assert output(emulator, text) == "{}\n{}\n".format(*result)


def test_another_thread_may_copy_and_wait_beside_a_relaxed_capture(emulator: Any) -> None:
    text = """
def work():
    context.push(); host = cuda.pagelocked_zeros(32, np.float32); event = cuda.Event()
    cuda.memcpy_htod_async(y, host, other); event.record(other); event.synchronize(); other.synchronize()
    del event, host; context.pop()
with capturing.captured(stream) as replay:
    thread = threading.Thread(target=work); thread.start(); thread.join()
    double(x, stream)
replay.launch(stream); stream.synchronize(); print(first(x)); replay.close()
"""
    assert output(emulator, text) == "2.0\n"


def test_only_the_thread_that_began_a_capture_ends_it_unless_it_is_relaxed(emulator: Any) -> None:
    text = """
def end():
    context.push(); graph = ctypes.c_void_p()
    print(capturing.DRIVER.cuStreamEndCapture(capturing.handle(stream), ctypes.byref(graph)))
    if graph: capturing.call("cuGraphDestroy", graph)
    context.pop()
for mode in (capturing.THREAD_LOCAL, capturing.RELAXED):
    capturing.begin(stream, mode)
    thread = threading.Thread(target=end); thread.start(); thread.join()
    if mode != capturing.RELAXED: capturing.call("cuGraphDestroy", capturing.end(stream))
"""
    assert output(emulator, text) == "908\n0\n"


def test_a_graph_of_the_same_shape_replaces_what_the_nodes_do(emulator: Any) -> None:
    text = """
class Result(ctypes.Structure):
    _fields_ = [("result", ctypes.c_int), ("node", ctypes.c_void_p), ("other", ctypes.c_void_p)]
def graph(*work):
    capturing.begin(stream)
    for memory in work: double(memory, stream) if memory is not None else cuda.memset_d32_async(x, 0, 32, stream)
    return capturing.end(stream)
one, same, longer, unlike = graph(x), graph(y), graph(x, x), graph(None)
replay, result = capturing.Replay(), Result()
capturing.call("cuGraphInstantiateWithFlags", ctypes.byref(replay.handle), one, ctypes.c_ulonglong(0))
cuda.memcpy_dtod(y, x, 128)
for other_graph in (longer, unlike, same):
    code = capturing.DRIVER.cuGraphExecUpdate_v2(replay.handle, other_graph, ctypes.byref(result))
    print(code, result.result)
replay.launch(stream); stream.synchronize(); print(first(x), first(y)); replay.close()
for each in (one, same, longer, unlike): capturing.call("cuGraphDestroy", each)
"""
    assert output(emulator, text) == "910 2\n910 3\n0 0\n1.0 2.0\n"


def test_nodes_edges_and_the_state_of_a_capture(emulator: Any) -> None:
    text = """
size, count = ctypes.c_size_t, ctypes.c_size_t()
capturing.begin(stream)
status, number, graph, last = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)()
double(x, stream); capturing.after(other, stream)
double(x, stream); cuda.memset_d32_async(y, 0, 32, other); capturing.after(stream, other)
capturing.call("cuStreamGetCaptureInfo_v2", capturing.handle(stream), ctypes.byref(status), ctypes.byref(number),
               ctypes.byref(graph), ctypes.byref(last), ctypes.byref(count))
print(status.value, number.value, count.value)
tail = [last[i] for i in range(2)]
double(y, stream); captured = capturing.end(stream); assert captured.value == graph.value
nodes = (ctypes.c_void_p * 6)(); count.value = 6
capturing.call("cuGraphGetNodes", captured, nodes, ctypes.byref(count))
kinds = []
for node in nodes[:count.value]:
    capturing.call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(status)); kinds.append(status.value)
starts, ends = (ctypes.c_void_p * 4)(), (ctypes.c_void_p * 4)(); count.value = 4
capturing.call("cuGraphGetEdges", captured, starts, ends, ctypes.byref(count))
place = list(nodes).index
print(kinds, nodes[4], [(place(a), place(b)) for a, b in zip(starts, ends)], [place(node) for node in tail])
capturing.call("cuGraphDestroy", captured)
"""
    assert output(emulator, text) == "1 1 2\n[0, 0, 2, 0] None [(0, 1), (0, 2), (1, 3), (2, 3)] [1, 2]\n"


def test_functions_are_found_by_name_and_version(emulator: Any) -> None:
    text = """
def found(name, version):
    function, status = ctypes.c_void_p(), ctypes.c_int(-1)
    code = capturing.DRIVER.cuGetProcAddress_v2(name.encode(), ctypes.byref(function), version, ctypes.c_uint64(0),
                                                ctypes.byref(status))
    assert (code == 0) == bool(function) == (status.value == 0), (name, code, status)
    names = (name + suffix for suffix in ("", "_v2", "_v3", "_v4", "WithFlags"))
    exported = [each for each in names if hasattr(capturing.DRIVER, each)]
    return [each for each in exported
            if ctypes.cast(getattr(capturing.DRIVER, each), ctypes.c_void_p).value == function.value]
for name, version in (("cuGraphLaunch", 10000), ("cuMemAlloc", 3020), ("cuStreamBeginCapture", 10010),
                      ("cuStreamGetCaptureInfo", 11030), ("cuStreamGetCaptureInfo", 12030),
                      ("cuGraphInstantiate", 11000), ("cuGraphInstantiate", 12000), ("cuDeviceGetUuid", 9020),
                      ("cuDeviceGetUuid", 11040), ("cuCtxCreate", 3020), ("cuCtxCreate", 12050),
                      ("cuCtxCreate", 11040), ("cuStreamGetCtx", 12050), ("cuNoSuchCall", 12000)):
    print(name, version, *found(name, version))
"""
    # cuGraphInstantiate_v2 of CUDA 11 has other arguments than cuGraphInstantiateWithFlags, which 12 means.
    assert (
        output(emulator, text)
        == """\
cuGraphLaunch 10000 cuGraphLaunch
cuMemAlloc 3020 cuMemAlloc_v2
cuStreamBeginCapture 10010 cuStreamBeginCapture_v2
cuStreamGetCaptureInfo 11030 cuStreamGetCaptureInfo_v2
cuStreamGetCaptureInfo 12030 cuStreamGetCaptureInfo_v3
cuGraphInstantiate 11000 cuGraphInstantiate_v2
cuGraphInstantiate 12000 cuGraphInstantiateWithFlags
cuDeviceGetUuid 9020 cuDeviceGetUuid
cuDeviceGetUuid 11040 cuDeviceGetUuid_v2
cuCtxCreate 3020 cuCtxCreate_v2
cuCtxCreate 12050 cuCtxCreate_v4
cuCtxCreate 11040
cuStreamGetCtx 12050
cuNoSuchCall 12000
"""
    )


@pytest.mark.skipif(
    not importlib.util.find_spec("cuda") or not importlib.util.find_spec("cuda.bindings"), reason="needs cuda-bindings"
)
def test_cuda_bindings(emulator: Any) -> None:
    """NVIDIA's own Python bindings load every function through cuGetProcAddress."""
    finished = emulator.code(
        """
import numpy as np
from cuda.bindings import driver
def call(name, *arguments):
    code, *values = getattr(driver, name)(*arguments)
    assert code == driver.CUresult.CUDA_SUCCESS, (name, code)
    return values[0] if len(values) == 1 else values
call("cuInit", 0); call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
stream, memory = call("cuStreamCreate", 1), call("cuMemAlloc", 64)
x, y = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
call("cuMemcpyHtoDAsync", memory, x.ctypes.data, 64, stream)
call("cuMemsetD32Async", memory, 0, 2, stream)
print(int(call("cuStreamGetCaptureInfo", stream)[0]), call("cuStreamGetCaptureInfo", stream)[-1])
call("cuMemcpyDtoHAsync", y.ctypes.data, memory, 64, stream)
graph = call("cuStreamEndCapture", stream)
print(call("cuGraphGetNodes", graph)[1], call("cuGraphGetEdges", graph)[-1], y.any())
replay = call("cuGraphInstantiate", graph, 0); call("cuGraphUpload", replay, stream)
call("cuGraphLaunch", replay, stream); call("cuStreamSynchronize", stream); print(y.tolist() == [0, 0, *x[2:]])
call("cuGraphExecDestroy", replay); call("cuGraphDestroy", graph); call("cuMemFree", memory)
call("cuStreamDestroy", stream)
""",
        EMULATOR_LEAKS="fail",
    )
    assert finished.stdout == "1 1\n3 2 False\nTrue\n", finished.stderr
