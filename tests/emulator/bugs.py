"""Kernels and host programs with one planted bug each; `test_bugs.py` says which mode must report it, and how.

    tests/emulator/run python tests/emulator/bugs.py NAME [SEED...]

Ends with status 3 and a line `error: ...` when CUDA raised an exception, with status 0 and `result: ...` otherwise.
With seeds it runs once for each seed of the random orders. `serve` as the name takes names, and what goes with them,
from standard input (`served`).
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import capturing
import numpy as np
import pycuda.compiler
import pycuda.driver as cuda

BUGS: dict[str, Callable[[], object]] = {}

SOURCE = r"""
#include <cooperative_groups.h>
#include <cuda_pipeline.h>
#include <assert.h>
namespace cg = cooperative_groups;
extern "C" {
__constant__ float table[4];

__global__ void copy(const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}
__global__ void fill(float *y, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = value;
}
__global__ void static_overrun(float *y) {
    __shared__ float a[8];
    float *p = a;
    for (int i = 0; i <= 8; ++i) p[i] = i;
    y[0] = p[0];
}
__global__ void dynamic_overrun(float *y) {
    extern __shared__ float s[];
    s[threadIdx.x] = 1.0f;
    y[threadIdx.x] = s[threadIdx.x];
}
__global__ void unwritten_shared(float *y) {
    __shared__ float a[32];
    if (threadIdx.x != 7) a[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = a[threadIdx.x];
}
__global__ void mirror(const float *x, float *y) {
    __shared__ float a[64];
    a[threadIdx.x] = x[threadIdx.x];
    // here a __syncthreads is missing
    y[threadIdx.x] = a[63 - threadIdx.x];
}
__global__ void mirror_global(float *x, float *y) {
    x[threadIdx.x] += 1.0f;
    // here a __syncthreads is missing
    y[threadIdx.x] = x[63 - threadIdx.x];
}
__global__ void mirror_warp(const float *x, float *y) {
    __shared__ float a[32];
    a[threadIdx.x] = x[threadIdx.x];
    // here a __syncwarp is missing
    y[threadIdx.x] = a[31 - threadIdx.x];
}
__global__ void neighbours(float *x) {
    if (threadIdx.x == 0) x[blockIdx.x + 1] = x[blockIdx.x] + 1.0f;
}
__global__ void lost_updates(int *counter) { *counter += 1; }
__global__ void zero_and_add(int *counter) {
    if (threadIdx.x == 0) *counter = 0;
    // here a __syncthreads is missing
    atomicAdd(counter, 1);
}
__global__ void two_barriers(float *y) {
    if (threadIdx.x < 16) {
        y[threadIdx.x] = 1.0f;
        __syncthreads();
    } else {
        __syncthreads();
    }
}
__global__ void early_exit(float *y) {
    if (threadIdx.x >= 24) return;
    __syncthreads();
    y[threadIdx.x] = 1.0f;
}
__global__ void lonely_shuffle(float *y) {
    float v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_down_sync(0xffffffffu, v, 1);
    else __syncthreads();
    y[threadIdx.x] = v;
}
__global__ void misaligned(const float *x, float *y) {
    float4 v = *reinterpret_cast<const float4 *>(x + 1);
    y[0] = v.x + v.w;
}
__global__ void no_wait(const float *x, float *y) {
    __shared__ __align__(16) float a[32 * 4];
    __pipeline_memcpy_async(&a[4 * threadIdx.x], &x[4 * threadIdx.x], 16);
    __pipeline_commit();
    // here __pipeline_wait_prior(0) is missing
    y[threadIdx.x] = a[4 * threadIdx.x];
}
__global__ void write_constant(float value) { const_cast<volatile float *>(table)[0] = value; }
__global__ void __cluster_dims__(2, 1, 1) early_leaver(float *y) {
    __shared__ float value;
    cg::cluster_group cluster = cg::this_cluster();
    value = 1.0f;
    cluster.sync();
    if (cluster.block_rank() == 1) return;
    // here a last cluster.sync() is missing: block 1 may be gone
    for (int i = 0; i < 100; ++i) __nanosleep(1);
    y[0] = *cluster.map_shared_rank(&value, 1);
}
__global__ void ordinary_grid_sync(float *y) {
    y[blockIdx.x] = 1.0f;
    cg::this_grid().sync();
}
__global__ void wait_forever(int *flag) { while (atomicAdd(flag, 0) == 0) __nanosleep(10); }
__global__ void failing_assert(const int *x) { assert(x[threadIdx.x] >= 0); }
__global__ void add_one(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1.0f;
}
__global__ void misaligned_store(float *y) { *reinterpret_cast<float4 *>(y + 1) = make_float4(1, 2, 3, 4); }
__global__ void lockstep_sum(const float *x, float *y) {
    __shared__ float a[64];
    a[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 32) {
        volatile float *lane = a;
        for (int distance = 32; distance > 0; distance /= 2) lane[threadIdx.x] += lane[threadIdx.x + distance];
    }
    if (threadIdx.x == 0) y[0] = a[0];
}
__global__ void far_row(const float *x, float *y, long long row) { y[0] = x[row * 1024]; }
}
#include <mma.h>
extern "C" __global__ void fragment(const float *x, float *y, int pitch) {
    using namespace nvcuda::wmma;
    __shared__ __align__(16) float a[16 * 16];  // a fragment needs 32
    for (int i = threadIdx.x; i < 16 * 16; i += 32) a[i] = x[i];
    __syncwarp();
    nvcuda::wmma::fragment<matrix_a, 16, 16, 8, precision::tf32, row_major> in;
    load_matrix_sync(in, pitch == 16 ? a : x, pitch);
    y[threadIdx.x] = in.x[0];
}
enum Fence { NONE, OF_BLOCK, OF_DEVICE };
template <Fence FENCE> __device__ void fence() {
    if (FENCE == OF_BLOCK) __threadfence_block();
    if (FENCE == OF_DEVICE) __threadfence();
}
template <Fence RELEASE, Fence ACQUIRE> __device__ void sum_parts(float *parts, int *arrived, float *y, int *before) {
    parts[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        fence<RELEASE>();
        *before = atomicAdd(arrived, 1);
        fence<ACQUIRE>();
    }
    __syncthreads();
    if (*before != gridDim.x - 1) return;
    float sum = 0;
    for (int b = 0; b < gridDim.x; ++b) sum += parts[b * blockDim.x + threadIdx.x];
    y[threadIdx.x] = sum;
}
extern "C" {
__global__ void last_block(float *parts, int *arrived, float *y) {
    __shared__ int before;
    sum_parts<OF_DEVICE, OF_DEVICE>(parts, arrived, y, &before);
}
__global__ void last_block_without_release(float *parts, int *arrived, float *y) {
    __shared__ int before;
    sum_parts<NONE, OF_DEVICE>(parts, arrived, y, &before);
}
__global__ void last_block_without_acquire(float *parts, int *arrived, float *y) {
    __shared__ int before;
    sum_parts<OF_DEVICE, NONE>(parts, arrived, y, &before);
}
__global__ void last_block_with_narrow_release(float *parts, int *arrived, float *y) {
    __shared__ int before;
    sum_parts<OF_BLOCK, OF_DEVICE>(parts, arrived, y, &before);
}
__global__ void in_turns(float *value, int *turn, volatile int *flag) {  // every second block only passes the turn on
    if (threadIdx.x > 0) return;
    while (atomicAdd(turn, 0) != blockIdx.x) __nanosleep(10);
    __threadfence();
    if (blockIdx.x % 2 == 0) *value += 1.0f;
    __threadfence();
    atomicAdd(turn, 1);
    if (blockIdx.x == 0) {
        while (*flag == 0) __nanosleep(10);
        __threadfence();
        *value += 1.0f;
    } else if (blockIdx.x == gridDim.x - 1) {
        *flag = 1;
    }
}
__global__ void row_of_matrix(const float *x, float *y, int step, int first) {
    __shared__ __align__(16) float a[32 * 4];
    for (int i = threadIdx.x; i < 32 * 4; i += 32) a[i] = x[i];
    __syncwarp();
    unsigned found, at = (unsigned)__cvta_generic_to_shared(a) + threadIdx.x * step;
    if (threadIdx.x >= first)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(found) : "r"(at));
    y[threadIdx.x] = found;
}
}
template <int LEFT, bool MEETS> __device__ void sum_stages(const float *x, float *y, int stages) {
    __shared__ __align__(16) float a[2][64 * 4];
    float sum = 0;
    for (int stage = 0; stage <= stages; ++stage) {
        unsigned at = (unsigned)__cvta_generic_to_shared(&a[stage % 2][4 * threadIdx.x]);
        if (stage < stages)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(x + 256 * stage + 4 * threadIdx.x));
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (stage == 0) continue;
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
        __syncthreads();
        sum += a[(stage + 1) % 2][4 * (63 - threadIdx.x)];
        if (MEETS) __syncthreads();  // or the next stage but one overwrites what others still read
    }
    y[threadIdx.x] = sum;
}
extern "C" {
__global__ void stages_waited_for(const float *x, float *y, int stages) { sum_stages<1, true>(x, y, stages); }
__global__ void stages_not_waited_for(const float *x, float *y, int stages) { sum_stages<2, true>(x, y, stages); }
__global__ void stages_overwritten(const float *x, float *y, int stages) { sum_stages<1, false>(x, y, stages); }
}
"""


def bug(function: Callable[[], object]) -> Callable[[], object]:
    """Registers a planted bug under its name."""
    BUGS[function.__name__] = function
    return function


@functools.cache
def image() -> bytes:
    """SOURCE, compiled for the emulated device; its first line counts as line 1 of bugs.cu."""
    return pycuda.compiler.compile('#line 1 "bugs.cu"\n' + SOURCE, no_extern_c=True, arch="sm_90")


def kernel(name: str) -> cuda.Function:
    """One kernel of SOURCE."""
    return cuda.module_from_buffer(image()).get_function(name)


def run(name: str, *arguments: object, block: int = 32, grid: int = 1, shared: int = 0) -> None:
    """Launches and waits."""
    kernel(name)(*arguments, block=(block, 1, 1), grid=(grid, 1), shared=shared)
    cuda.Context.synchronize()


def zeros(n: int) -> cuda.DeviceAllocation:
    """n floats of device memory, written."""
    return cuda.to_device(np.zeros(n, np.float32))


def floats(memory: cuda.DeviceAllocation, n: int) -> list[float]:
    """The first n floats."""
    out = np.empty(n, np.float32)
    cuda.memcpy_dtoh(out, memory)
    return out.tolist()


@bug
def read_past_end() -> None:
    run("copy", zeros(100), zeros(128), np.int32(101), block=128)


@bug
def write_past_end() -> None:
    run("fill", zeros(100), np.float32(1), np.int32(101), block=128)


@bug
def write_far_past_end() -> None:
    run("fill", zeros(1024), np.float32(1), np.int32(1025), block=1024, grid=2)


@bug
def write_past_end_found_at_free() -> None:
    memory = zeros(100)
    run("fill", memory, np.float32(1), np.int32(101), block=128)
    memory.free()


@bug
def copy_past_end() -> None:
    cuda.memcpy_dtoh(np.empty(101, np.float32), zeros(100))


@bug
def static_shared_past_end() -> None:
    run("static_overrun", zeros(1), block=1)


@bug
def dynamic_shared_past_end() -> None:
    run("dynamic_overrun", zeros(64), block=64, shared=63 * 4)


@bug
def null_pointer() -> None:
    run("fill", np.uintp(0), np.float32(1), np.int32(1))


@bug
def host_pointer() -> None:
    host = np.zeros(32, np.float32)
    run("fill", np.uintp(host.ctypes.data), np.float32(1), np.int32(32))


@bug
def constant_written() -> None:
    run("write_constant", np.float32(1), block=1)


@bug
def use_after_free() -> None:
    memory = zeros(32)
    address = np.uintp(int(memory))
    memory.free()
    run("fill", address, np.float32(1), np.int32(32))


@bug
def memset_after_free() -> None:
    memory = cuda.mem_alloc(64)
    other = int(memory)
    memory.free()
    cuda.memset_d8(other, 0, 64)


@bug
def unwritten_global() -> None:
    run("copy", cuda.mem_alloc(128), zeros(32), np.int32(32))


@bug
def unwritten_shared() -> None:
    run("unwritten_shared", zeros(32))


@bug
def missing_syncthreads() -> list[float]:
    x, y = np.arange(64, dtype=np.float32), zeros(64)
    run("mirror", cuda.In(x), y, block=64)
    return (np.array(floats(y, 64)) - x[::-1]).nonzero()[0].tolist()


@bug
def missing_syncthreads_global() -> None:
    run("mirror_global", zeros(64), zeros(64), block=64)


@bug
def missing_syncwarp() -> None:
    run("mirror_warp", zeros(32), zeros(32))


@bug
def lockstep() -> list[float]:
    y = zeros(1)
    run("lockstep_sum", cuda.to_device(np.ones(64, np.float32)), y, block=64)
    return floats(y, 1)


@bug
def race_between_blocks() -> None:
    run("neighbours", zeros(5), grid=4)


def by_the_last_block(name: str) -> list[float]:
    y = zeros(2)
    run(name, zeros(8), zeros(1), y, grid=4, block=2)
    return floats(y, 2)


@bug
def fences_between_blocks() -> list[float]:
    value = zeros(1)
    run("in_turns", value, zeros(1), zeros(1), grid=5, block=2)
    return by_the_last_block("last_block") + floats(value, 1)


@bug
def missing_release_between_blocks() -> None:
    by_the_last_block("last_block_without_release")


@bug
def missing_acquire_between_blocks() -> None:
    by_the_last_block("last_block_without_acquire")


@bug
def narrow_release_between_blocks() -> None:
    by_the_last_block("last_block_with_narrow_release")


@bug
def lost_updates() -> None:
    run("lost_updates", zeros(1), grid=2, block=1)


@bug
def atomic_beside_store() -> None:
    run("zero_and_add", zeros(1))


@bug
def barrier_in_both_branches() -> None:
    run("two_barriers", zeros(32))


@bug
def barrier_after_exit() -> None:
    run("early_exit", zeros(32))


@bug
def shuffle_without_all() -> None:
    run("lonely_shuffle", zeros(32))


@bug
def misaligned_vector() -> None:
    run("misaligned", zeros(8), zeros(1), block=1)


@bug
def misaligned_vector_store() -> None:
    run("misaligned_store", zeros(8), block=1)


@bug
def address_beyond_all() -> None:
    run("far_row", zeros(8), zeros(1), np.int64(2**51), block=1)


@bug
def misaligned_fragment() -> None:
    run("fragment", zeros(16 * 16), zeros(32), np.int32(16))


@bug
def misaligned_fragment_rows() -> None:
    run("fragment", zeros(16 * 18), zeros(32), np.int32(18))


@bug
def misaligned_ldmatrix() -> None:
    run("row_of_matrix", zeros(128), zeros(32), np.int32(8), np.int32(0))


@bug
def ldmatrix_past_end() -> None:
    run("row_of_matrix", zeros(128), zeros(32), np.int32(2048), np.int32(0))


@bug
def ldmatrix_without_all() -> None:
    run("row_of_matrix", zeros(128), zeros(32), np.int32(16), np.int32(16))


def sum_of_stages(name: str) -> list[float]:
    x, y = cuda.to_device(np.ones(3 * 256, np.float32)), zeros(64)
    run(name, x, y, np.int32(3), block=64)
    return sorted(set(floats(y, 64)))


@bug
def stages_waited_for() -> list[float]:
    return sum_of_stages("stages_waited_for")


@bug
def missing_cp_async_wait() -> list[float]:
    return sum_of_stages("stages_not_waited_for")


@bug
def missing_syncthreads_between_stages() -> list[float]:
    return sum_of_stages("stages_overwritten")


# Those of cuda/wgmma.cu, by their numbers.
# fmt: off
WARPGROUP_BUGS = (
    "wgmma_without_bugs", "other_swizzle", "not_swizzled", "wrong_stride", "wrong_leading_stride", "within_a_pattern",
    "missing_proxy_fence", "missing_wgmma_wait", "missing_wgmma_commit", "stage_released_early", "wrong_phase",
    "wrong_phase_of_copiers", "too_many_arrivals", "too_few_arrivals", "mbarrier_overwritten", "missing_wgmma_fence",
    "sums_used_early", "misaligned_mbarrier", "wgmma_past_end", "missing_mbarrier", "descriptor_of_reserved_bits",
    "leading_stride_within_a_pattern",
)
# fmt: on


@functools.cache
def image_of_warpgroups() -> bytes:
    """cuda/wgmma.cu, compiled."""
    source = (Path(__file__).parent / "cuda" / "wgmma.cu").read_text()
    return pycuda.compiler.compile('#line 1 "wgmma.cu"\n' + source, no_extern_c=True, arch="sm_90a")


def of_warpgroup(number: int) -> float:
    """How far the product is off that one of the bugs is planted in; NaN where one of its numbers is."""
    module = cuda.module_from_buffer(image_of_warpgroups())
    multiply, shared = module.get_function("wgmma_half_k_mn"), 1024 + 2 * 192 * 128 + 64
    multiply.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, shape).astype(np.float16) for shape in ((64, 256), (256, 128)))
    c = cuda.to_device(np.zeros((64, 128), np.float32))
    numbers = np.int32(4), np.int32(number)
    multiply(cuda.to_device(a), cuda.to_device(b), c, *numbers, block=(160, 1, 1), shared=shared)
    cuda.Context.synchronize()
    return float(np.abs(np.reshape(floats(c, 64 * 128), (64, 128)) - a.astype(np.float32) @ b.astype(np.float32)).max())


BUGS |= {name: functools.partial(of_warpgroup, number) for number, name in enumerate(WARPGROUP_BUGS)}


# Those of cuda/tma.cu, by their numbers.
# fmt: off
TENSOR_MAP_BUGS = (
    "tensor_map_without_bugs", "fewer_bytes_expected", "more_bytes_expected", "no_bytes_expected",
    "missing_wait_for_tile", "other_phase_of_tile", "tile_misplaced", "missing_tensor_map", "block_outside_cluster",
    "block_leaves_before_tile", "tile_without_mbarrier", "block_leaves_before_arrivals", "tile_over_what_is_read",
    "tensor_map_not_acquired",
)
# fmt: on


@functools.cache
def image_of_tensor_maps() -> bytes:
    """cuda/tma.cu, compiled."""
    source = (Path(__file__).parent / "cuda" / "tma.cu").read_text()
    return pycuda.compiler.compile('#line 1 "tma.cu"\n' + source, no_extern_c=True, arch="sm_90a")


def encoded(address: int, columns: int = 64, pitch: int = 128, box: int = 64) -> tuple[int, bytes]:
    """Returns the driver's answer and its tensor map of 12 rows of halves, in boxes of 8."""
    memory = (ctypes.c_char * 192)()
    place = (ctypes.addressof(memory) + 63) // 64 * 64
    words, ints = ctypes.c_uint64, ctypes.c_uint32
    code = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(place), 6, 2, ctypes.c_void_p(address), (words * 2)(columns, 12), (words * 1)(pitch)),
        *((ints * 2)(box, 8), (ints * 2)(1, 1), 0, 3, 0, 0),
    )
    return code, ctypes.string_at(place, 128)


def of_tensor_map(number: int) -> int:
    """How many numbers are not those of the matrix, where one of the bugs is planted."""
    function = cuda.module_from_buffer(image_of_tensor_maps()).get_function("tiles")
    x = np.arange(1, 12 * 64 + 1, dtype=np.uint16).reshape(12, 64)
    places = cuda.to_device(x), cuda.to_device(np.zeros((2, 16, 64), np.uint16))
    code, tile = encoded(int(places[0]))
    assert code == 0
    function.prepare("128sPPi")
    stored = cuda.to_device(np.frombuffer(tile, np.uint8))
    function.prepared_call((2, 1), (64, 1, 1), tile, stored, places[1], number, shared_size=1024 + 2048 + 16)
    cuda.Context.synchronize()
    result = cuda.from_device(places[1], (2, 16, 64), np.uint16)
    return int((result != np.concatenate([x, np.zeros((4, 64), np.uint16)])).sum())


BUGS |= {name: functools.partial(of_tensor_map, number) for number, name in enumerate(TENSOR_MAP_BUGS)}


@bug
def tensor_maps_refused() -> list[int]:
    place = int(cuda.to_device(np.zeros((12, 72), np.uint16)))
    return [
        encoded(place)[0], encoded(place, 72, 144)[0], encoded(place + 8)[0], encoded(place, 64, 136)[0],
        encoded(place, 72, 128)[0], encoded(place, box=32)[0],
    ]  # fmt: skip


@bug
def wgmma_of_sm_90() -> None:
    source = 'extern "C" __global__ void k() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }'
    pycuda.compiler.compile(source, no_extern_c=True, arch="sm_90")


@bug
def sm_90a_on_8_0() -> None:
    source = 'extern "C" __global__ void k() {}'
    cuda.module_from_buffer(pycuda.compiler.compile(source, no_extern_c=True, arch="sm_90a"))


@bug
def unknown_assembly() -> None:
    source = 'extern "C" __global__ void k(int *x) { asm volatile("prefetch.global.L2 [%0];" ::"l"(x)); }'
    pycuda.compiler.compile(source, no_extern_c=True, arch="sm_90")


@bug
def missing_pipeline_wait() -> list[float]:
    y = zeros(32)
    run("no_wait", zeros(128), y)
    return floats(y, 2)


@bug
def cluster_block_left() -> None:
    run("early_leaver", zeros(1), grid=2, block=1)


@bug
def grid_sync_without_cooperation() -> None:
    run("ordinary_grid_sync", zeros(2), grid=2)


@bug
def endless_wait() -> None:
    run("wait_forever", zeros(1), block=1)


@bug
def device_assert() -> None:
    run("failing_assert", cuda.In(np.array([0, 1, -1, 2], np.int32)), block=4)


def streams_program(with_event: bool) -> list[float]:
    """Fill on one stream, add on another, read on the second; only the event orders them."""
    first = cuda.Stream()
    second = cuda.Stream()
    memory, host = zeros(64), cuda.pagelocked_zeros(64, np.float32)
    fill, add_one = kernel("fill").prepare("Pfi"), kernel("add_one").prepare("Pi")
    cuda.Context.synchronize()
    fill.prepared_async_call((2, 1), (32, 1, 1), first, memory, 5.0, 64)
    if with_event:
        event = cuda.Event()
        event.record(first)
        second.wait_for_event(event)
    add_one.prepared_async_call((2, 1), (32, 1, 1), second, memory, 64)
    cuda.memcpy_dtoh_async(host, memory, second)
    second.synchronize()
    first.synchronize()
    return sorted(set(host.tolist()))


@bug
def missing_event() -> list[float]:
    return streams_program(False)


@bug
def event_present() -> list[float]:
    return streams_program(True)


@bug
def missing_event_before_copy() -> None:
    first, second = cuda.Stream(), cuda.Stream()
    memory, host = zeros(64), cuda.pagelocked_zeros(64, np.float32)
    fill = kernel("fill").prepare("Pfi")
    fill.prepared_async_call((2, 1), (32, 1, 1), first, memory, 5.0, 64)
    cuda.memcpy_dtoh_async(host, memory, second)
    cuda.Context.synchronize()


@bug
def host_between_streams() -> list[float]:
    """What the host waits for, and the default stream, order streams as well."""
    streams = [cuda.Stream() for _ in range(3)]
    memory, host = zeros(64), cuda.pagelocked_zeros(64, np.float32)
    add_one = kernel("add_one").prepare("Pi")
    event = cuda.Event()
    for stream in streams:
        add_one.prepared_async_call((2, 1), (32, 1, 1), stream, memory, 64)
        if stream is streams[0]:
            stream.synchronize()
        else:
            event.record(stream)
            event.synchronize()
    cuda.memset_d32(int(memory), 0x3F800000, 32)  # 1.0f
    add_one.prepared_async_call((2, 1), (32, 1, 1), streams[2], memory, 64)
    cuda.memcpy_dtoh_async(host, memory, streams[2])
    streams[2].synchronize()
    return sorted(set(host.tolist()))


@bug
def missing_synchronize() -> list[float]:
    """Reads pinned memory before the stream has reached the copy."""
    stream = cuda.Stream()
    host = cuda.pagelocked_zeros(4, np.float32)
    memory = cuda.to_device(np.ones(4, np.float32))
    cuda.memcpy_dtoh_async(host, memory, stream)
    values = host.tolist()
    stream.synchronize()
    return values


@bug
def too_many_threads() -> None:
    run("fill", zeros(1), np.float32(0), np.int32(1), block=1025)


@bug
def too_much_shared_memory() -> None:
    run("dynamic_overrun", zeros(64), shared=48 * 1024 + 4)


@bug
def grid_too_large() -> None:
    kernel("fill")(zeros(1), np.float32(0), np.int32(1), block=(1, 1, 1), grid=(1, 65536))


@bug
def wrong_argument_size() -> None:
    run("fill", zeros(1), np.float64(0), np.int32(1))


@bug
def out_of_memory() -> None:
    cuda.mem_alloc(600 << 20)
    first = cuda.mem_alloc(600 << 20)
    cuda.mem_alloc(600 << 20)
    first.free()


@bug
def modules_linked() -> None:
    """No bug: PyCUDA's linker, which reads the error from the log."""
    cuda.Linker()


@bug
def leak() -> None:
    import ctypes

    address = ctypes.c_uint64()
    ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(12345))


def capture_stream() -> cuda.Stream:
    """A stream for captures, with everything before them done."""
    cuda.Context.synchronize()
    return cuda.Stream(capturing.NON_BLOCKING)


def finish(stream: cuda.Stream, replay: capturing.Replay) -> None:
    """Launches a graph once."""
    replay.launch(stream)
    stream.synchronize()
    replay.close()


@bug
def capture_synchronized() -> None:
    stream = capture_stream()
    with capturing.captured(stream):
        stream.synchronize()


@bug
def capture_continued_after_error() -> None:
    x, stream = zeros(32), capture_stream()
    with capturing.captured(stream):
        try:
            stream.synchronize()
        except cuda.Error:
            cuda.memset_d32_async(x, 0, 32, stream)


@bug
def capture_waits_for_context() -> None:
    with capturing.captured(capture_stream()):
        cuda.Context.synchronize()


@bug
def capture_beside_default_stream() -> None:
    x, stream = zeros(32), cuda.Stream()
    cuda.Context.synchronize()
    with capturing.captured(stream):
        cuda.memset_d32(x, 0, 32)


@bug
def capture_allocates() -> None:
    with capturing.captured(capture_stream(), capturing.GLOBAL):
        cuda.mem_alloc(64)


@bug
def capture_copies_at_once() -> None:
    x, host = zeros(32), np.zeros(32, np.float32)
    with capturing.captured(capture_stream(), capturing.THREAD_LOCAL):
        cuda.memcpy_dtoh(host, x)


@bug
def captured_event_asked() -> None:
    stream, event = capture_stream(), cuda.Event()
    with capturing.captured(stream):
        event.record(stream)
        event.query()


@bug
def capture_waits_for_outside() -> None:
    stream, event = capture_stream(), cuda.Event()
    event.record(cuda.Stream())
    with capturing.captured(stream):
        stream.wait_for_event(event)


@bug
def captures_merged() -> None:
    first, second = capture_stream(), capture_stream()
    capturing.begin(second)
    with capturing.captured(first):
        capturing.after(first, second)


@bug
def capture_unjoined() -> None:
    x, stream, other = zeros(32), capture_stream(), capture_stream()
    with capturing.captured(stream):
        capturing.after(other, stream)
        cuda.memset_d32_async(x, 0, 32, other)


@bug
def capture_ended_elsewhere() -> None:
    stream, other = capture_stream(), capture_stream()
    capturing.begin(stream)
    capturing.after(other, stream)
    capturing.end(other)


@bug
def capture_of_default_stream() -> None:
    capturing.call("cuStreamBeginCapture_v2", None, capturing.RELAXED)


@bug
def capture_never_begun() -> None:
    capturing.end(capture_stream())


@bug
def graph_writes_past_end() -> None:
    x, fill = zeros(100), kernel("fill")
    stream = capture_stream()
    with capturing.captured(stream) as replay:
        fill(x, np.float32(1), np.int32(101), block=(128, 1, 1), stream=stream)
    print("recorded", flush=True)
    finish(stream, replay)


@bug
def graph_race() -> None:
    x, neighbours = zeros(5), kernel("neighbours")
    stream = capture_stream()
    with capturing.captured(stream) as replay:
        neighbours(x, block=(32, 1, 1), grid=(4, 1), stream=stream)
    finish(stream, replay)


@bug
def graph_copies_freed_memory() -> None:
    x, y = zeros(32), zeros(32)
    stream = capture_stream()
    with capturing.captured(stream) as replay:
        cuda.memcpy_dtod_async(y, x, 128, stream)
    x.free()
    finish(stream, replay)


@bug
def graph_kernel_on_freed_memory() -> None:
    x, fill = zeros(32), kernel("fill")
    stream = capture_stream()
    with capturing.captured(stream) as replay:
        fill(x, np.float32(1), np.int32(32), block=(32, 1, 1), stream=stream)
    x.free()
    finish(stream, replay)


@bug
def graph_of_unloaded_module() -> None:
    x, stream = zeros(32), capture_stream()
    with capturing.captured(stream) as replay:
        kernel("fill")(x, np.float32(1), np.int32(32), block=(32, 1, 1), stream=stream)
    finish(stream, replay)


@bug
def graph_leak() -> None:
    x, stream = zeros(32), capture_stream()
    with capturing.captured(stream):
        cuda.memset_d32_async(x, 0, 32, stream)


def graph_branches(ordered: bool) -> list[float]:
    """Two branches of a graph that write the same number."""
    x, fill = zeros(1), kernel("fill")
    first, second = capture_stream(), capture_stream()
    with capturing.captured(first) as replay:
        capturing.after(second, first)
        fill(x, np.float32(1), np.int32(1), block=(1, 1, 1), stream=first)
        if ordered:
            capturing.after(second, first)
        fill(x, np.float32(2), np.int32(1), block=(1, 1, 1), stream=second)
        capturing.after(first, second)
    finish(first, replay)
    return floats(x, 1)


@bug
def graph_branches_unordered() -> list[float]:
    return graph_branches(ordered=False)


@bug
def graph_branches_ordered() -> list[float]:
    return graph_branches(ordered=True)


def main(name: str) -> int:
    """Runs one bug."""
    cuda.init()
    context = cuda.Device(0).retain_primary_context()
    context.push()
    try:
        print(f"result: {BUGS[name]()}", flush=True)
        return 0
    except (cuda.Error, cuda.CompileError) as error:
        print(f"error: {type(error).__name__}: {error}", flush=True)
        return 3
    finally:
        context.pop()


def prepare(name: str) -> None:
    """Compiles what a bug needs, which takes longer than what it runs."""
    if name in WARPGROUP_BUGS:
        image_of_warpgroups()
    elif name in TENSOR_MAP_BUGS:
        image_of_tensor_maps()
    else:
        image()


def in_orders(name: str, seeds: list[str]) -> None:
    """Runs one bug for each seed, in forks: importing and compiling takes longer than what they run."""
    prepare(name)
    for seed in seeds:
        if os.fork() == 0:
            os.environ["EMULATOR_SEED"] = seed
            sys.exit(main(name))
        os.wait()


def served() -> list[str]:
    """Returns a name and seeds in a fork, for each line of standard input; ends with that.

    A line is JSON: the name and seeds, environment variables, and the files that take standard output and error. The
    answer is the fork's exit code. What is compiled here serves all forks: either all of them are checked, or none is.
    """
    for line in sys.stdin:
        arguments, options, files = json.loads(line)
        prepare(arguments[0])
        process = os.fork()
        if process == 0:
            for number, file in enumerate([os.devnull, *files]):
                os.dup2(os.open(file, os.O_RDWR), number)
            os.environ.update(options)
            return arguments
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    sys.exit()


if __name__ == "__main__":
    name, *seeds = served() if sys.argv[1] == "serve" else sys.argv[1:]
    sys.exit(in_orders(name, seeds) if seeds else main(name))
