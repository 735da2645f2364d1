"""What a GPU and its driver allow and what things cost, through plain PyCUDA: clusters, barriers, launches, graphs.

    python benchmarks/gpu_probe.py --out FOLDER
    tests/emulator/run python benchmarks/gpu_probe.py --quick --out FOLDER     # does the script work?

Writes gpu-probe.md and gpu-probe.json. Every question is asked in a process of its own with a time limit, so that what
one breaks (an error of a kernel poisons its context) does not touch the next: a failure is an answer. All waits in
kernels (gpu_probe.cu) end by the GPU's clock. Nothing of the GPU's settings is changed. Times are medians (smallest to
largest).
"""

import argparse
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Report, command_line, machine_line, nvidia_smi, one_line, spread, versions

HERE = Path(__file__).resolve().parent
THREADS = 256
# Dynamic shared memory of a block, beside which no second one fits on a multiprocessor.
LARGE_SHARED = 200 * 1024
# Cycles: that a cluster stays to be counted, and that a barrier waits at most (1 ms and 0.5 s at 2 GHz).
STAY, LIMIT = 2_000_000, 1_000_000_000
WARM_UP = 400_000_000
# CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, and two results.
NON_PORTABLE, CLUSTER_DIMENSION = 14, 4
NOT_SUPPORTED, NOT_FOUND = 801, 500


class NotHereError(Exception):
    """The driver, the GPU or a package cannot do what is asked; that is the answer."""


@dataclass
class Answer:
    """The answer to a question."""

    question: str
    status: str = "measured"  # "yes", "no", "measured", "not supported here" or "failed"
    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # numbers by name


@dataclass(frozen=True)
class Question:
    """A question: what it asks, and what answers it in the child process."""

    question: str
    answer: Callable[["Lab"], Answer]


QUESTIONS: dict[str, Question] = {}


def question(text: str) -> Callable[[Callable[["Lab"], Answer]], Callable[["Lab"], Answer]]:
    """Register a question under its function's name."""

    def register(function: Callable[["Lab"], Answer]) -> Callable[["Lab"], Answer]:
        QUESTIONS[function.__name__] = Question(text, function)
        return function

    return register


# In the child: PyCUDA, and the driver's own entry points for what PyCUDA lacks


class Lab:
    """A context, a non-blocking stream and the kernels; `quick` repeats little, for the emulator."""

    def __init__(self, folder: Path, quick: bool) -> None:
        import numpy as np
        import pycuda.driver as cuda

        from dptrain.backend.cuda.compile import command, find_nvcc

        self.np, self.cuda, self.quick = np, cuda, quick
        cuda.init()
        self.device = cuda.Device(0)
        self.context = self.device.retain_primary_context()
        self.context.push()
        self.stream = cuda.Stream(1)
        self.processors = self.device.get_attribute(cuda.device_attribute.MULTIPROCESSOR_COUNT)
        self.capability = self.device.compute_capability()
        architecture = "sm_{}{}".format(*self.capability)
        image = folder / f"gpu-probe-{architecture}.cubin"
        if not image.is_file():
            part = image.with_suffix(f".{os.getpid()}")
            clusters = [] if self.capability >= (9, 0) else ["-DNO_CLUSTERS"]
            process = subprocess.run(
                [*command(find_nvcc(), HERE / "gpu_probe.cu", part, architecture), *clusters],
                capture_output=True,
                text=True,
            )
            if process.returncode:
                raise RuntimeError(f"nvcc: {process.stderr}")
            part.replace(image)
        self.image = image.read_bytes()
        self.module = cuda.module_from_buffer(self.image)
        if not quick:  # an idle GPU's clock is low
            spin = self.kernel("spin", "q")
            for _ in range(10):
                self.launch(spin, self.processors, 32, WARM_UP // 10)
            self.stream.synchronize()

    def close(self) -> None:
        """Let go of everything, while the context lives."""
        del self.module, self.stream
        self.context.pop()
        self.context.detach()

    def kernel(self, name: str, types: str) -> Any:
        """Return a prepared kernel of gpu_probe.cu; of a cluster of 16 only after `allow_16`."""
        if "_" in name and name.rsplit("_", 1)[1] in ("8", "16") and self.capability < (9, 0):
            raise NotHereError(f"compute capability {self.capability[0]}.{self.capability[1]} has no clusters")
        function = self.module.get_function(name)
        function.prepare(types)
        if name.endswith("_16"):
            function.set_attribute(self.cuda.function_attribute(NON_PORTABLE), 1)
        return function

    def launch(self, function: Any, grid: int, block: int, *arguments: Any, shared: int = 0) -> None:
        """Launch on the stream."""
        function.prepared_async_call((grid, 1), (block, 1, 1), self.stream, *arguments, shared_size=shared)

    def upload(self, array: Any) -> Any:
        """Return device memory with an array's content."""
        memory = self.cuda.to_device(array)
        # The copy may still be on its way, and the stream waits for no other.
        self.cuda.Context.synchronize()
        return memory

    def zeros(self, size: int, dtype: str = "uint32") -> Any:
        """Return zeroed device memory."""
        return self.upload(self.np.zeros(size, dtype))

    def read(self, memory: Any, size: int, dtype: str = "uint32") -> Any:
        """Wait for the stream and return device memory's content."""
        self.stream.synchronize()
        host = self.np.empty(size, dtype)
        self.cuda.memcpy_dtoh(host, memory)
        return host

    def repeats(self, many: int) -> int:
        """Return how often to do something: seldom on the emulator."""
        return max(2, many // 50) if self.quick else many


class Driver:
    """The driver's entry points in PyCUDA's context; NotHereError where a call is missing."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        try:
            entry = getattr(self._library, name)
        except AttributeError:
            raise NotHereError(f"this driver has no {name}") from None
        code = entry(*arguments)
        if code == NOT_SUPPORTED:
            raise NotHereError(f"{name}: not supported")
        if code:
            raise RuntimeError(f"{name}: error {code}")

    def function(self, image: bytes, name: str) -> ctypes.c_void_p:
        """Load a module of its own and return a kernel's handle, which PyCUDA's Function does not tell."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), image)
        self("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with a cluster's dimensions as its value, in the union's 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


def microseconds(times: list[int]) -> str:
    """Return a median of nanoseconds as microseconds, with the range."""
    return spread([t / 1e3 for t in times], ".2f") + " us"


def timed(action: Callable[[], Any], times: int) -> list[int]:
    """Return the nanoseconds of each of some calls."""
    nanoseconds = []
    for _ in range(times):
        started = time.perf_counter_ns()
        action()
        nanoseconds.append(time.perf_counter_ns() - started)
    return nanoseconds


# The questions


@question("Which GPU, driver and compiler are these, and do the probe's kernels compile?")
def machine(lab: Lab) -> Answer:
    import pycuda

    from dptrain.backend.cuda.compile import find_nvcc

    attribute = lab.cuda.device_attribute
    version = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    values = {
        "name": lab.device.name(),
        "compute capability": "{}.{}".format(*lab.capability),
        "PyCUDA": pycuda.VERSION_TEXT,
        "driver API": lab.cuda.get_driver_version(),
        "nvcc": next((line.strip() for line in version.splitlines() if "release" in line), ""),
        "multiprocessors": lab.processors,
        "shared memory of a block, at most": lab.device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        "clock rate, kHz": lab.device.get_attribute(attribute.CLOCK_RATE),
        "memory, bytes": lab.device.total_memory(),
    }
    return Answer("", "yes", ", ".join(f"{name} {value}" for name, value in values.items()), values)


def exchange(lab: Lab, size: int, allow: bool) -> Answer:
    """Launch two clusters that exchange values through distributed shared memory, and check them."""
    np = lab.np
    if lab.capability < (9, 0):
        raise NotHereError("no clusters before compute capability 9.0")
    function = lab.module.get_function(f"exchange_{size}")
    function.prepare("PPP")
    if allow:
        function.set_attribute(lab.cuda.function_attribute(NON_PORTABLE), 1)
    blocks, threads = 2 * size, 64
    x = np.arange(blocks * threads, dtype=np.int32)
    memory, out, ranks = lab.upload(x), lab.zeros(x.size, "int32"), lab.zeros(blocks, "int32")
    lab.launch(function, blocks, threads, memory, out, ranks)
    actual, ranks_and_sizes = lab.read(out, x.size, "int32"), lab.read(ranks, blocks, "int32")
    opposite = x.reshape(2, size, threads)[:, ::-1].reshape(-1)
    values = {
        "ranks": (ranks_and_sizes % 256).tolist(),
        "sizes": sorted({int(size) for size in ranks_and_sizes // 256}),
    }
    right = values["ranks"] == list(range(size)) * 2 and values["sizes"] == [size]
    if not right or not (actual == x + 1000 * opposite).all():
        wrong = int((actual != x + 1000 * opposite).sum())
        return Answer("", "failed", f"ran, with wrong results: {values}, {wrong} wrong numbers", values)
    return Answer("", "yes", f"ranks 0 to {size - 1} twice, all {x.size} exchanged numbers right", values)


@question("Does an ordinary PyCUDA launch run a cluster of 8 blocks, with distributed shared memory?")
def cluster_8(lab: Lab) -> Answer:
    return exchange(lab, 8, False)


@question("Is a cluster of 16 blocks refused without CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED?")
def cluster_16_unset(lab: Lab) -> Answer:
    try:
        ran = exchange(lab, 16, False)
    except lab.cuda.Error as error:
        return Answer("", "yes", f"refused: {one_line(str(error))}")
    return Answer("", "no", f"it ran: {ran.text}")


@question("Does Function.set_attribute(function_attribute(14), 1) work, and does a cluster of 16 blocks then run?")
def cluster_16(lab: Lab) -> Answer:
    return exchange(lab, 16, True)


def residency(lab: Lab, size: int, shared: int) -> Answer:
    """Count the clusters on the GPU at the same time, and compare with what the driver foretells."""
    function = lab.kernel(f"resident_{size}", "PPq")
    dynamic = lab.cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
    function.set_attribute(dynamic, shared)
    driver, blocks = Driver(), ctypes.c_int(-1)
    foretold: int | str
    try:
        handle = driver.function(lab.image, f"resident_{size}")
        driver("cuFuncSetAttribute", handle, 8, shared)  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver("cuFuncSetAttribute", handle, NON_PORTABLE, 1)
        attribute = LaunchAttribute(CLUSTER_DIMENSION)
        attribute.value[0:3] = [size, 1, 1]
        config = LaunchConfig(shared=shared, attributes=ctypes.pointer(attribute), count=1)
        config.grid[:], config.block[:] = (64 * size, 1, 1), (THREADS, 1, 1)
        driver("cuOccupancyMaxActiveClusters", ctypes.byref(blocks), handle, ctypes.byref(config))
        foretold = blocks.value
    except (NotHereError, RuntimeError) as error:
        foretold = str(error)
    # More than can fit: eight blocks of 256 threads fill a multiprocessor.
    clusters = 8 if lab.quick else 10 * lab.processors // size
    stay = 2000 if lab.quick else STAY
    counts = []
    for _ in range(1 if lab.quick else 3):
        live, peak = lab.zeros(1), lab.zeros(1)
        lab.launch(function, clusters * size, THREADS, live, peak, stay, shared=shared)
        counts.append(int(lab.read(peak, 1)[0]))
    values = {"launched": clusters, "counted": counts, "cuOccupancyMaxActiveClusters": foretold}
    text = f"{max(counts)} of {clusters} launched ({counts}); cuOccupancyMaxActiveClusters: {foretold}"
    if isinstance(foretold, int) and max(counts) > foretold:
        text += "; more than foretold"
    return Answer("", "measured", text, values)


@question(f"How many clusters of 8 blocks of {THREADS} threads are resident at once, with 1 KB of shared memory?")
def resident_8_small(lab: Lab) -> Answer:
    return residency(lab, 8, 1024)


@question(f"How many clusters of 8 blocks of {THREADS} threads are resident at once, with 200 KB of shared memory?")
def resident_8_large(lab: Lab) -> Answer:
    return residency(lab, 8, LARGE_SHARED)


@question(f"How many clusters of 16 blocks of {THREADS} threads are resident at once, with 1 KB of shared memory?")
def resident_16_small(lab: Lab) -> Answer:
    return residency(lab, 16, 1024)


@question(f"How many clusters of 16 blocks of {THREADS} threads are resident at once, with 200 KB of shared memory?")
def resident_16_large(lab: Lab) -> Answer:
    return residency(lab, 16, LARGE_SHARED)


def in_kernel(lab: Lab, repeats: int, run: Callable[[Any, Any], None]) -> Answer:
    """Run a kernel that writes its cycles and nanoseconds, several times; the cost of one of its repeats."""
    cycles, ns = [], []
    for _ in range(1 if lab.quick else 7):
        clock, timer = lab.zeros(1, "int64"), lab.zeros(1, "uint64")
        run(clock, timer)
        cycles.append(float(lab.read(clock, 1, "int64")[0]) / repeats)
        ns.append(float(lab.read(timer, 1, "uint64")[0]) / repeats)
    text = f"{spread(cycles, '.0f')} cycles, {spread(ns, '.0f')} ns, over {repeats} repeats"
    return Answer("", "measured", text, {"cycles": cycles, "ns": ns, "repeats": repeats})


def sync_cost(lab: Lab, size: int) -> Answer:
    repeats = lab.repeats(10000)
    function = lab.kernel(f"sync_cost_{size}", "iPP")
    return in_kernel(lab, repeats, lambda clock, timer: lab.launch(function, size, THREADS, repeats, clock, timer))


@question(f"What does cluster.sync() cost, 8 blocks of {THREADS} threads?")
def sync_8(lab: Lab) -> Answer:
    return sync_cost(lab, 8)


@question(f"What does cluster.sync() cost, 16 blocks of {THREADS} threads?")
def sync_16(lab: Lab) -> Answer:
    return sync_cost(lab, 16)


def exchange_cost(lab: Lab, size: int) -> Answer:
    np, repeats = lab.np, lab.repeats(10000)
    function = lab.kernel(f"exchange_cost_{size}", "iPPP")
    out = lab.zeros(size * THREADS, "int32")
    answer = in_kernel(
        lab, repeats, lambda clock, timer: lab.launch(function, size, THREADS, repeats, out, clock, timer)
    )
    ranks, threads = np.arange(size)[:, None], np.arange(THREADS)[None]
    expected = ((ranks - repeats) % size * THREADS + threads + repeats).reshape(-1)
    wrong = int((lab.read(out, size * THREADS, "int32") != expected).sum())
    if wrong:
        answer.status, answer.text = "failed", f"{wrong} of {expected.size} numbers are wrong; {answer.text}"
    return answer


@question(
    f"What does an exchange cost (a remote write of {THREADS} numbers a block, cluster.sync(), a read), 8 blocks?"
)
def exchange_8(lab: Lab) -> Answer:
    return exchange_cost(lab, 8)


@question(
    f"What does an exchange cost (a remote write of {THREADS} numbers a block, cluster.sync(), a read), 16 blocks?"
)
def exchange_16(lab: Lab) -> Answer:
    return exchange_cost(lab, 16)


@question("What is the latency of a load from another block's shared memory, in a cluster of 8?")
def load_8(lab: Lab) -> Answer:
    repeats = lab.repeats(10000)
    function = lab.kernel("load_cost_8", "iPPP")
    out = lab.zeros(1, "int32")
    answer = in_kernel(lab, repeats, lambda clock, timer: lab.launch(function, 8, THREADS, repeats, out, clock, timer))
    actual, expected = int(lab.read(out, 1, "int32")[0]), 33 * repeats % THREADS
    if actual != expected:
        answer.status, answer.text = "failed", f"the chain ended at {actual}, not {expected}; {answer.text}"
    return answer


def grid_barrier(lab: Lab, blocks: int) -> Answer:
    function = lab.kernel("grid_barrier", "PPPiiqPP")
    broken: list[str] = []

    def run(repeats: int, check: int, clock: Any, timer: Any) -> None:
        counter, failed, values = lab.zeros(1), lab.zeros(1), lab.zeros(blocks)
        lab.launch(function, blocks, THREADS, counter, failed, values, repeats, check, LIMIT, clock, timer)
        code = int(lab.read(failed, 1)[0])
        if code:
            broken.append({1: "a wait ran into its limit", 2: "a neighbour's value was old"}[code])

    run(lab.repeats(500), 1, lab.zeros(1, "int64"), lab.zeros(1, "uint64"))
    repeats = lab.repeats(5000)
    answer = in_kernel(lab, repeats, lambda clock, timer: run(repeats, 0, clock, timer))
    if broken:
        answer.status, answer.text = "failed", f"{broken[0]} ({len(broken)} launches)"
    return answer


@question("What does a barrier of 8 blocks in global memory cost (one atomic a block, volatile polling)?")
def grid_barrier_8(lab: Lab) -> Answer:
    return grid_barrier(lab, 8)


@question("What does a barrier of the whole grid cost, one block a multiprocessor?")
def grid_barrier_all(lab: Lab) -> Answer:
    return grid_barrier(lab, 8 if lab.quick else lab.processors)


def launch_cost(lab: Lab, launch: Callable[[], None]) -> Answer:
    """The host's time of a launch, launch to end alone, and a launch's share of a long queue."""
    burst = lab.repeats(200)
    host: list[int] = []
    for _ in range(lab.repeats(50)):
        lab.stream.synchronize()
        host.append(timed(lambda: [launch() for _ in range(burst)], 1)[0] // burst)
    lab.stream.synchronize()

    def alone() -> None:
        launch()
        lab.stream.synchronize()

    def queue() -> None:
        for _ in range(1000 // (100 if lab.quick else 1)):
            launch()
        lab.stream.synchronize()

    single = timed(alone, lab.repeats(1000))
    queued = [t // (1000 // (100 if lab.quick else 1)) for t in timed(queue, 3)]
    text = (
        f"host {microseconds(host)} a call; launch and wait {microseconds(single)}; each of 1000 queued"
        f" {microseconds(queued)}"
    )
    return Answer("", "measured", text, {"host ns": host, "alone ns": single, "queued ns": queued})


@question("What does prepared_async_call of an empty kernel cost?")
def launch_empty(lab: Lab) -> Answer:
    function = lab.kernel("empty", "")
    return launch_cost(lab, lambda: function.prepared_async_call((1, 1), (32, 1, 1), lab.stream))


@question("What do events cost on the host, and a wait between two streams end to end?")
def events(lab: Lab) -> Answer:
    cuda, times = lab.cuda, lab.repeats(2000)
    event, other = cuda.Event(), cuda.Stream(1)
    quiet = cuda.Event(cuda.event_flags.DISABLE_TIMING)
    function = lab.kernel("empty", "")
    make = timed(cuda.Event, times)
    record = timed(lambda: event.record(lab.stream), times)
    record_quiet = timed(lambda: quiet.record(lab.stream), times)
    wait = timed(lambda: other.wait_for_event(quiet), times)
    lab.stream.synchronize()
    other.synchronize()
    hops = 4 if lab.quick else 100

    def chain(cross: bool) -> None:
        for hop in range(hops):
            here, there = (lab.stream, other) if hop % 2 == 0 or not cross else (other, lab.stream)
            function.prepared_async_call((1, 1), (32, 1, 1), here)
            if cross:
                quiet.record(here)
                there.wait_for_event(quiet)
        lab.stream.synchronize()
        other.synchronize()

    same = [t // hops for t in timed(lambda: chain(False), 5 if lab.quick else 30)]
    crossing = [t // hops for t in timed(lambda: chain(True), 5 if lab.quick else 30)]
    text = (
        f"host: make {microseconds(make)}, record {microseconds(record)}, record without timing"
        f" {microseconds(record_quiet)}, wait_for_event {microseconds(wait)}; a chain of {hops} empty kernels, each:"
        f" on one stream {microseconds(same)}, crossing streams {microseconds(crossing)}"
    )
    values = {"make": make, "record": record, "record without timing": record_quiet, "wait": wait}
    return Answer("", "measured", text, values | {"one stream": same, "crossing": crossing})


@question("What do copies of 4 B, 4 KB and 407 KB between pinned host memory and the GPU cost?")
def copies(lab: Lab) -> Answer:
    cuda = lab.cuda
    parts, values = [], {}
    for size in (1, 1024, 101_770):
        host = cuda.pagelocked_zeros(size, lab.np.float32)
        memory = lab.zeros(size, "float32")
        for name, copy in (
            ("to the GPU", lambda h=host, m=memory: cuda.memcpy_htod_async(m, h, lab.stream)),
            ("to the host", lambda h=host, m=memory: cuda.memcpy_dtoh_async(h, m, lab.stream)),
        ):

            def whole(copy: Callable[[], None] = copy) -> None:
                copy()
                lab.stream.synchronize()

            timed(whole, 3)
            seconds = timed(whole, lab.repeats(500))
            lab.stream.synchronize()
            queued = timed(copy, lab.repeats(100))
            lab.stream.synchronize()
            values[f"{4 * size} B {name}"] = {"whole ns": seconds, "host ns": queued}
            parts.append(f"{4 * size} B {name} {microseconds(seconds)} (the call alone {microseconds(queued)})")
    return Answer("", "measured", "; ".join(parts), values)


class CtypesGraphs:
    """Capture and replay through the driver's entry points."""

    def __init__(self) -> None:
        self.driver = Driver()

    def begin(self, stream: int) -> None:
        # CU_STREAM_CAPTURE_MODE_RELAXED: other calls of PyCUDA stay allowed.
        self.driver("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(2))

    def end(self, stream: int) -> Any:
        graph = ctypes.c_void_p()
        self.driver("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        return graph

    def nodes(self, graph: Any) -> int:
        count = ctypes.c_size_t()
        self.driver("cuGraphGetNodes", graph, None, ctypes.byref(count))
        return count.value

    def instantiate(self, graph: Any) -> Any:
        ready = ctypes.c_void_p()
        self.driver("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
        return ready

    def launcher(self, ready: Any, stream: int) -> Callable[[], None]:
        handle = ctypes.c_void_p(stream)
        return lambda: self.driver("cuGraphLaunch", ready, handle)


class BindingsGraphs:
    """The same through cuda.bindings."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise NotHereError(f"cuda.bindings is not installed ({error}): pip install cuda-bindings") from None
        self.driver = driver

    def _checked(self, answered: Any) -> Any:
        code, *values = answered
        if code == self.driver.CUresult.CUDA_ERROR_NOT_SUPPORTED:
            raise NotHereError("not supported by this driver")
        if code != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(str(code))
        return values[0] if values else None

    def begin(self, stream: int) -> None:
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._checked(self.driver.cuStreamBeginCapture(self.driver.CUstream(stream), mode))

    def end(self, stream: int) -> Any:
        return self._checked(self.driver.cuStreamEndCapture(self.driver.CUstream(stream)))

    def nodes(self, graph: Any) -> int:
        return CtypesGraphs().nodes(ctypes.c_void_p(int(graph)))  # the arguments of the bindings' own differ by version

    def instantiate(self, graph: Any) -> Any:
        return self._checked(self.driver.cuGraphInstantiate(graph, 0))

    def launcher(self, ready: Any, stream: int) -> Callable[[], None]:
        handle, launch, good = (
            self.driver.CUstream(stream),
            self.driver.cuGraphLaunch,
            self.driver.CUresult.CUDA_SUCCESS,
        )

        def replay() -> None:
            (code,) = launch(ready, handle)
            if code != good:
                raise RuntimeError(str(code))

        return replay


@contextmanager
def capturing(graphs: Any, stream: int) -> Iterator[list[Any]]:
    """Capture what is launched inside; the graph is in the list afterwards."""
    captured: list[Any] = []
    graphs.begin(stream)
    try:
        yield captured
    finally:
        captured.append(graphs.end(stream))


def graph_cost(lab: Lab, graphs: Any) -> Answer:
    """Capture PyCUDA's launches, check what replays compute, and time them beside the launches themselves."""
    function, handle = lab.kernel("add_one", "P"), lab.stream.handle
    parts, values = [], {}
    for nodes in (10, 20):
        x = lab.zeros(1)

        def launches(x: Any = x, nodes: int = nodes) -> None:
            for _ in range(nodes):
                lab.launch(function, 1, 32, x)

        lab.stream.synchronize()
        with capturing(graphs, handle) as captured:
            launches()
        if (ran := int(lab.read(x, 1)[0])) != 0:
            return Answer("", "no", f"{ran} launches ran while they were captured")
        replay = graphs.launcher(graphs.instantiate(captured[0]), handle)
        captured_nodes = graphs.nodes(captured[0])
        for _ in range(3):
            replay()
        if captured_nodes != nodes or (ran := int(lab.read(x, 1)[0])) != 3 * nodes:
            return Answer("", "no", f"{captured_nodes} nodes of {nodes}; 3 replays did {ran} of {3 * nodes} additions")

        def whole(action: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                action()
                lab.stream.synchronize()

            return run

        def burst(replay: Callable[[], None] = replay) -> None:
            for _ in range(100):
                replay()
            lab.stream.synchronize()

        alone = timed(whole(replay), lab.repeats(1000))
        host = timed(replay, lab.repeats(200))
        lab.stream.synchronize()
        queued = [t // 100 for t in timed(burst, lab.repeats(50))]
        direct = timed(whole(launches), lab.repeats(500))
        values[str(nodes)] = {"host ns": host, "alone ns": alone, "queued ns": queued, "launches ns": direct}
        parts.append(
            f"{nodes} nodes: host {microseconds(host)}, replay and wait {microseconds(alone)}, each of 100 queued"
            f" {microseconds(queued)}; as launches and wait {microseconds(direct)}"
        )
    return Answer("", "yes", "captured and right; " + "; ".join(parts), values)


@question("Does cuda.bindings capture PyCUDA's launches on Stream.handle, and what does a replay cost?")
def graphs_by_bindings(lab: Lab) -> Answer:
    return graph_cost(lab, BindingsGraphs())


@question("The same through ctypes?")
def graphs_by_ctypes(lab: Lab) -> Answer:
    return graph_cost(lab, CtypesGraphs())


# Asking


def child(name: str, folder: Path, quick: bool) -> Answer:
    """Answer one question in this process."""
    try:
        lab = Lab(folder, quick)
        try:
            answer = QUESTIONS[name].answer(lab)
        except NotHereError as error:
            answer = Answer("", "not supported here", str(error))
        lab.close()
    except Exception as error:
        answer = Answer("", "failed", one_line(f"{type(error).__name__}: {error}", 400))
    answer.question = QUESTIONS[name].question
    return answer


def ask(name: str, folder: Path, quick: bool, patience: float) -> Answer:
    """Answer one question in a process of its own."""
    question = QUESTIONS[name].question
    place = folder / f"answer-{name}.json"
    place.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--out", str(folder), "--child", name]
    try:
        process = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        return Answer(question, "failed", f"no answer within {patience:.0f} s")
    try:
        answer = Answer(**json.loads(place.read_text()))
    except (OSError, ValueError, TypeError):
        lines = [line for line in (process.stderr or process.stdout).splitlines() if line.strip()] or ["no message"]
        return Answer(
            question, "failed", one_line(f"the process ended with exit code {process.returncode}: {lines[-1]}", 400)
        )
    place.unlink()
    if process.returncode:  # the answer came, and then the process failed to end well
        answer.text += f" (the process ended with exit code {process.returncode})"
    return answer


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="questions after that are not asked")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--quick", action="store_true", help="few repeats: does everything work?")
    parser.add_argument("--child", choices=QUESTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(QUESTIONS)
    if unknown := [name for name in names if name not in QUESTIONS]:
        parser.error(f"--only: unknown {', '.join(unknown)}; choose from {', '.join(QUESTIONS)}")
    options.names = names
    return options


def main() -> int:
    """Return 1 where an answer is "failed"."""
    options = parse()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.child:
        answer = child(options.child, folder, options.quick)
        (folder / f"answer-{options.child}.json").write_text(json.dumps(vars(answer)))
        return 0
    until = time.monotonic() + 60 * options.minutes
    report = Report()
    report.add("# What this GPU allows, and what it costs", "")
    if "EMULATOR_HOME" in os.environ:
        report.add("- On the emulated driver: this shows that the script works; no number means anything")
    report.add(command_line(), machine_line(), f"- GPU: {nvidia_smi()}")
    report.add(f"- Versions: {versions(('dptrain', 'numpy', 'pycuda', 'cuda-bindings'))}", "")
    if importlib.util.find_spec("pycuda") is None:
        report.add("PyCUDA is not installed: nothing can be asked.")
        report.save(folder / "gpu-probe.md")
        return 1
    report.add("| question | answer | |", "|---|---|---|")
    answers = {}
    for name in options.names:
        left = until - time.monotonic()
        if left > 5:
            answers[name] = answer = ask(name, folder, options.quick, min(60.0, left))
        else:
            answers[name] = answer = Answer(QUESTIONS[name].question, "not asked", "out of time")
        report.add(f"| {answer.question} | {answer.status} | {one_line(answer.text, 900)} |")
        report.save(folder / "gpu-probe.md")
        content = {"head": report.lines[:7], "answers": {key: vars(value) for key, value in answers.items()}}
        (folder / "gpu-probe.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    report.add("", f"- GPU afterwards: {nvidia_smi()}")
    report.save(folder / "gpu-probe.md")
    return 1 if any(answer.status == "failed" for answer in answers.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
