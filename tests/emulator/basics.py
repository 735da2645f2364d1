"""What programs do with PyCUDA, one check each: the same on the emulator and on a GPU.

    tests/emulator/run python tests/emulator/basics.py [CHECK ...]

Checks that need a second device pass over it when there is none.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

import capturing
import numpy as np
import pycuda.driver as cuda
from pycuda.compiler import SourceModule

CHECKS: dict[str, Callable[[], None]] = {}
SOURCE = r"""
__constant__ float weights[4];
__device__ int counter;
__device__ int total = 41;
struct Pair { char tag; double value; };
__global__ void scale(float *x, int n, float by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}
__global__ void weigh(float *x) { x[threadIdx.x] *= weights[threadIdx.x % 4]; }
__global__ void count() { atomicAdd(&counter, 1); if (threadIdx.x == 0) total += 1; }
__global__ void where(int *out) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
__global__ void mixed(double *out, char a, short b, float c, double d, Pair e, long long f) {
    out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e.tag; out[5] = e.value; out[6] = (double)f;
}
__global__ void shared_bytes(float *out) {
    __shared__ float a[100];
    __shared__ double b;
    a[threadIdx.x] = 1; b = 2;
    out[threadIdx.x] = a[threadIdx.x] + (float)b;
}
"""


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a check under its name."""
    CHECKS[function.__name__] = function
    return function


def module() -> SourceModule:
    """The kernels above."""
    return SourceModule(SOURCE)


def equal(memory: int | cuda.DeviceAllocation, expected: np.ndarray) -> None:
    """Asserts what device memory holds."""
    np.testing.assert_array_equal(cuda.from_device_like(memory, expected), expected)


@check
def copies() -> None:
    x = np.random.default_rng(0).integers(0, 2**31, 1001).astype(np.int32)
    a, b = cuda.to_device(x), cuda.mem_alloc(x.nbytes)
    cuda.memcpy_dtod(b, a, x.nbytes)
    equal(b, x)
    cuda.memcpy_htod(int(b) + 40, x[:3])
    equal(int(b) + 40, x[:3])
    equal(int(b) + 52, x[13:])


@check
def memsets() -> None:
    memory = cuda.mem_alloc(64)
    cuda.memset_d8(memory, 0xAB, 64)
    equal(memory, np.full(64, 0xAB, np.uint8))
    cuda.memset_d16(memory, 0x1234, 32)
    equal(memory, np.full(32, 0x1234, np.uint16))
    stream = cuda.Stream()
    cuda.memset_d32_async(memory, 0xDEADBEEF, 8, stream)
    stream.synchronize()
    equal(memory, np.array([0xDEADBEEF] * 8 + [0x12341234] * 8, np.uint32))


@check
def pitched() -> None:
    x = np.arange(7 * 5, dtype=np.float32).reshape(5, 7)
    memory, pitch = cuda.mem_alloc_pitch(7 * 4, 5, 4)
    copy = cuda.Memcpy2D()
    copy.set_src_host(x)
    copy.set_dst_device(memory)
    copy.dst_pitch, copy.src_pitch, copy.width_in_bytes, copy.height = pitch, 28, 28, 5
    copy(aligned=True)
    back = cuda.Memcpy2D()
    out = np.zeros_like(x)
    back.set_src_device(memory)
    back.set_dst_host(out)
    back.src_pitch, back.dst_pitch, back.width_in_bytes, back.height = pitch, 28, 28, 5
    back(aligned=False)
    np.testing.assert_array_equal(out, x)


@check
def boxes() -> None:
    """3-D copies: a box out of the middle to the device, on the device, and back into pinned memory."""
    x = np.arange(5 * 6 * 8, dtype=np.int32).reshape(5, 6, 8)
    first, second, stream = cuda.mem_alloc(3 * 4 * 16), cuda.mem_alloc(3 * 5 * 32), cuda.Stream()
    into = cuda.Memcpy3D()
    into.set_src_host(x)
    into.set_dst_device(first)
    into.src_x_in_bytes, into.src_y, into.src_z = 2 * 4, 1, 2
    into.src_pitch, into.src_height, into.dst_pitch, into.dst_height = 8 * 4, 6, 4 * 4, 4
    into.width_in_bytes, into.height, into.depth = 4 * 4, 4, 3
    into()
    across = cuda.Memcpy3D()
    across.set_src_device(first)
    across.set_dst_device(second)
    across.dst_x_in_bytes, across.dst_y = 3 * 4, 1
    across.src_pitch, across.src_height, across.dst_pitch, across.dst_height = 4 * 4, 4, 32, 5
    across.width_in_bytes, across.height, across.depth = 4 * 4, 4, 3
    across(stream)
    out = cuda.pagelocked_zeros((3, 4, 4), np.int32)
    back = cuda.Memcpy3D()
    back.set_src_device(second)
    back.set_dst_host(out)
    back.src_x_in_bytes, back.src_y = 3 * 4, 1
    back.src_pitch, back.src_height, back.dst_pitch, back.dst_height = 32, 5, 4 * 4, 4
    back.width_in_bytes, back.height, back.depth = 4 * 4, 4, 3
    back(stream)
    stream.synchronize()
    assert (out == x[2:5, 1:5, 2:6]).all()


@check
def pinned_and_async() -> None:
    host = cuda.pagelocked_empty(1000, np.float32)
    host[:] = np.arange(1000)
    out = cuda.pagelocked_zeros(1000, np.float32)
    stream, memory = cuda.Stream(), cuda.mem_alloc(host.nbytes)
    scale = module().get_function("scale").prepare("Pif")
    cuda.memcpy_htod_async(memory, host, stream)
    scale.prepared_async_call((8, 1), (128, 1, 1), stream, memory, 1000, 2.0)
    cuda.memcpy_dtoh_async(out, memory, stream)
    stream.synchronize()
    assert stream.is_done()
    np.testing.assert_array_equal(out, 2 * np.arange(1000))


@check
def registered_host_memory() -> None:
    # Through the driver: PyCUDA 2026.1's register_host_memory ends in a segmentation fault of its own.
    driver = ctypes.CDLL("libcuda.so.1")
    host = cuda.aligned_zeros(4096, np.uint8)
    host[:] = 7
    address = ctypes.c_void_p(host.ctypes.data)
    assert driver.cuMemHostRegister_v2(address, ctypes.c_size_t(4096), 0) == 0
    assert driver.cuMemHostRegister_v2(address, ctypes.c_size_t(4096), 0) == 712
    memory, stream = cuda.mem_alloc(4096), cuda.Stream()
    cuda.memcpy_htod_async(memory, host, stream)
    stream.synchronize()
    equal(memory, host)
    assert driver.cuMemHostUnregister(address) == 0
    assert driver.cuMemHostUnregister(address) == 713


@check
def mapped_host_memory() -> None:
    host = cuda.pagelocked_zeros(64, np.float32, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
    host[:] = 3
    pointer = np.uintp(host.base.get_device_pointer())
    module().get_function("scale")(pointer, np.int32(64), np.float32(3), block=(64, 1, 1))
    cuda.Context.synchronize()
    assert (host == 9).all()


@check
def managed_memory() -> None:
    x = cuda.managed_zeros(64, np.float32, mem_flags=cuda.mem_attach_flags.GLOBAL)
    x[:] = 2
    module().get_function("scale")(x, np.int32(64), np.float32(4), block=(64, 1, 1))
    cuda.Context.synchronize()
    assert (x == 8).all()


@check
def events() -> None:
    start, middle, end = (cuda.Event() for _ in range(3))
    memory, scale = cuda.to_device(np.ones(100000, np.float32)), module().get_function("scale")
    start.record()
    middle.record()
    scale(memory, np.int32(100000), np.float32(2), block=(256, 1, 1), grid=(391, 1))
    end.record()
    end.synchronize()
    assert start.query()
    assert end.query()
    assert 0 <= start.time_till(middle) <= start.time_till(end)
    assert end.time_since(middle) > 0
    seconds = scale.prepare("Pif").prepared_timed_call((391, 1), (256, 1, 1), memory, 100000, 0.5)()
    assert 0 < seconds < 10


@check
def stream_order() -> None:
    scale = module().get_function("scale").prepare("Pif")
    streams = [cuda.Stream() for _ in range(4)]
    memory = cuda.to_device(np.ones(32, np.float32))
    cuda.Context.synchronize()
    # A relay through all streams, each waiting for the one before.
    for step in range(12):
        stream = streams[step % 4]
        scale.prepared_async_call((1, 1), (32, 1, 1), stream, memory, 32, 2.0 if step % 3 else -3.0)
        event = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        event.record(stream)
        streams[(step + 1) % 4].wait_for_event(event)
    streams[0].synchronize()
    equal(memory, np.full(32, 3**4 * 2**8, np.float32))


@check
def default_stream_order() -> None:
    # The legacy default stream and a blocking stream order each other.
    scale = module().get_function("scale").prepare("Pif")
    stream, memory = cuda.Stream(), cuda.to_device(np.ones(32, np.float32))
    scale.prepared_async_call((1, 1), (32, 1, 1), stream, memory, 32, 3.0)
    cuda.memset_d32(int(memory), 0, 16)
    scale.prepared_async_call((1, 1), (32, 1, 1), stream, memory, 32, 5.0)
    equal(memory, np.array([0] * 16 + [15] * 16, np.float32))


@check
def captured_stream() -> None:
    """A graph computes nothing when it is recorded, and reads host memory and kernel arguments as it should later."""
    stream, other = cuda.Stream(capturing.NON_BLOCKING), cuda.Stream(capturing.NON_BLOCKING)
    host, out = cuda.pagelocked_zeros(64, np.float32), cuda.pagelocked_zeros(64, np.float32)
    memory, scale = cuda.to_device(np.ones(64, np.float32)), module().get_function("scale")
    cuda.Context.synchronize()
    with capturing.captured(stream) as replay:
        assert capturing.status(stream) == 1
        assert capturing.status(other) == 0
        cuda.memcpy_htod_async(memory, host, stream)
        for factor in (2, 3):
            scale(memory, np.int32(64), np.float32(factor), block=(64, 1, 1), stream=stream)
        cuda.memset_d32_async(memory, 0, 4, stream)
        cuda.memcpy_dtoh_async(out, memory, stream)
    assert capturing.status(stream) == 0
    equal(memory, np.ones(64, np.float32))
    for number, by in enumerate((stream, other, stream), 1):
        host[:] = number
        replay.launch(by)
        by.synchronize()
        np.testing.assert_array_equal(out, np.array([0] * 4 + [6 * number] * 60, np.float32))
    replay.close()


@check
def captured_fork() -> None:
    """Events take a second stream into the capture and back; what they do not order is independent."""
    first, second = cuda.Stream(capturing.NON_BLOCKING), cuda.Stream(capturing.NON_BLOCKING)
    x, y = cuda.to_device(np.ones(32, np.float32)), cuda.to_device(np.zeros(32, np.float32))
    scale = module().get_function("scale")

    def times(memory: int, by: float, stream: cuda.Stream) -> None:
        scale(np.uintp(memory), np.int32(16), np.float32(by), block=(32, 1, 1), stream=stream)

    cuda.Context.synchronize()
    with capturing.captured(first) as replay:
        times(int(x), 2, first)
        capturing.after(second, first)
        times(int(x), 3, first)
        cuda.memcpy_dtod_async(int(y) + 64, int(x) + 64, 64, second)
        times(int(y) + 64, 5, second)
        capturing.after(first, second)
        cuda.memcpy_dtod_async(y, x, 64, first)
    for _ in range(2):
        replay.launch(second)
    second.synchronize()
    replay.close()
    equal(x, np.array([36] * 16 + [1] * 16, np.float32))
    equal(y, np.array([36] * 16 + [5] * 16, np.float32))


@check
def module_variables() -> None:
    code = module()
    address, size = code.get_global("weights")
    assert size == 16
    cuda.memcpy_htod(address, np.array([1, 2, 3, 4], np.float32))
    x = cuda.to_device(np.ones(8, np.float32))
    code.get_function("weigh")(x, block=(8, 1, 1))
    equal(x, np.array([1, 2, 3, 4] * 2, np.float32))
    count = code.get_function("count")
    for _ in range(3):
        count(block=(10, 1, 1))
    equal(code.get_global("counter")[0], np.array([30], np.int32))
    equal(code.get_global("total")[0], np.array([44], np.int32))
    # Each module has variables of its own.
    other = module()
    equal(other.get_global("total")[0], np.array([41], np.int32))


@check
def geometry() -> None:
    out = np.empty(2 * 3 * 2 * 4 * 3 * 2, np.int32)
    module().get_function("where")(cuda.Out(out), grid=(2, 3, 2), block=(4, 3, 2))
    expected = np.add.outer(np.arange(12) * 1000, np.arange(24)).ravel()
    np.testing.assert_array_equal(out, expected)


@check
def argument_layout() -> None:
    out = cuda.mem_alloc(56)
    pair = np.zeros(1, np.dtype([("tag", "i1"), ("value", "f8")], align=True))
    pair["tag"], pair["value"] = 5, 6.5
    kernel = module().get_function("mixed")
    kernel(out, np.int8(1), np.int16(-2), np.float32(3.5), np.float64(4.25), pair[0], np.int64(7), block=(1, 1, 1))
    equal(out, np.array([1, -2, 3.5, 4.25, 5, 6.5, 7]))


@check
def function_attributes() -> None:
    kernel = module().get_function("shared_bytes")
    assert kernel.shared_size_bytes in range(408, 433)
    assert module().get_function("scale").shared_size_bytes == 0
    assert kernel.max_threads_per_block == 1024
    attribute = cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
    kernel.set_attribute(attribute, 100 * 1024)
    assert kernel.get_attribute(attribute) == 100 * 1024


@check
def device_facts() -> None:
    device = cuda.Context.get_device()
    facts = device.get_attributes()
    assert facts[cuda.device_attribute.WARP_SIZE] == 32
    assert facts[cuda.device_attribute.MAX_THREADS_PER_BLOCK] == 1024
    assert facts[cuda.device_attribute.MULTIPROCESSOR_COUNT] > 0
    assert facts[cuda.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK] == 48 * 1024
    free, total = cuda.mem_get_info()
    assert 0 < free <= total == device.total_memory()
    memory = cuda.mem_alloc(64 << 20)
    assert cuda.mem_get_info()[0] < free
    memory.free()
    assert cuda.Device(device.pci_bus_id()) == device
    assert len(device.compute_capability()) == 2


@check
def address_range() -> None:
    memory = cuda.mem_alloc(1000)
    base, size = cuda.mem_get_address_range(int(memory) + 500)
    assert (base, size) == (int(memory), 1000)


@check
def contexts() -> None:
    device = cuda.Context.get_device()
    first, second = device.retain_primary_context(), device.retain_primary_context()
    assert first.handle == second.handle
    other = device.make_context()
    assert other.handle != first.handle
    memory = cuda.to_device(np.arange(4, dtype=np.int32))
    equal(memory, np.arange(4, dtype=np.int32))
    memory.free()
    other.pop()
    other.detach()


@check
def array_library() -> None:
    from pycuda import gpuarray
    from pycuda.elementwise import ElementwiseKernel

    x, y = np.random.default_rng(1).standard_normal((2, 5000)).astype(np.float32)
    a, b = gpuarray.to_gpu(x), gpuarray.to_gpu(y)
    np.testing.assert_allclose((2 * a + b * a).get(), 2 * x + y * x, rtol=1e-5)
    kernel = ElementwiseKernel("float *z, const float *x, float c", "z[i] = fmaxf(x[i], c)", "relu")
    out = gpuarray.empty_like(a)
    kernel(out, a, np.float32(0))
    np.testing.assert_array_equal(out.get(), np.maximum(x, 0))


@check
def two_devices() -> None:
    if cuda.Device.count() < 2:
        return
    first = cuda.Context.get_device()
    second = cuda.Device(1)
    assert first.pci_bus_id() != second.pci_bus_id()
    x = np.arange(100, dtype=np.float32)
    source = cuda.to_device(x)
    context = second.retain_primary_context()
    context.push()
    try:
        free = cuda.mem_get_info()[0]
        target = cuda.mem_alloc(x.nbytes)
        assert free - cuda.mem_get_info()[0] >= x.nbytes
        cuda.memcpy_peer(target, source, x.nbytes, context, context)
        module().get_function("scale")(target, np.int32(100), np.float32(2), block=(128, 1, 1))
        equal(target, 2 * x)
        target.free()
    finally:
        context.pop()
    equal(source, x)


def main(names: list[str]) -> int:
    """Runs the named checks, or all."""
    cuda.init()
    context = cuda.Device(0).retain_primary_context()
    context.push()
    failures = 0
    try:
        for name in names or CHECKS:
            start = time.perf_counter()
            try:
                CHECKS[name]()
            except (AssertionError, TypeError, cuda.Error, cuda.CompileError) as error:
                failures += 1
                print(f"FAILED {name}: {type(error).__name__} {' '.join(str(error).split())[:300]}", flush=True)
            else:
                print(f"ok {name} {time.perf_counter() - start:.2f} s", flush=True)
    finally:
        context.pop()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
