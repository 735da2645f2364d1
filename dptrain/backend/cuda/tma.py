"""Products of dense half-precision matrices by tensor maps: candidates, emulated only, that no program chooses."""

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

from dptrain.backend.cuda.compile import compiled_text
from dptrain.backend.cuda.products import product_plan
from dptrain.errors import DeviceError

# Of `TmaShape` (kernels/product_tma.cuh), which the source asserts.
COLUMNS, THREADS, _DEPTH = 256, 288, 64
# CUDA's numbers: types of elements (cuda.h, CUtensorMapDataType), the 128-byte swizzle, and reads of 256 bytes into L2.
_TYPES = {"float16": 6, "bfloat16": 9}
_SWIZZLE, _INTO_L2 = 3, 3
# CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION and CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_CLUSTER_DIMENSION, _MAX_DYNAMIC_SHARED = 4, 8


@dataclass(frozen=True)
class Candidate:
    """A schedule: warpgroups `in_turns` or together, blocks of a cluster, rows of a tile, and stages of the ring."""

    in_turns: bool
    cluster: int
    rows: int
    stages: int

    def blocks(self, M: int, N: int, processors: int) -> int:
        """Return the blocks of a launch: as many clusters as fit and have something to do."""
        tiles_below, tiles_beside = (M + self.rows - 1) // self.rows, (N + COLUMNS - 1) // COLUMNS
        items = (tiles_below + self.cluster - 1) // self.cluster * tiles_beside
        return self.cluster * max(1, min(processors // self.cluster, items))


CANDIDATES = {
    **{f"together, clusters of {cluster}": Candidate(False, cluster, 128, 4) for cluster in (1, 2)},
    **{f"in turns, clusters of {cluster}": Candidate(True, cluster, 64, 5) for cluster in (1, 2, 4)},
}


def suits(M: int, N: int, K: int, transposed: tuple[bool, bool] = (False, False)) -> bool:
    """Return whether candidates could replace a product's kernel: 256 columns, one slice, rows of 16-byte multiples."""
    plan = product_plan(M, N, K, "wgmma")
    widths = (M if transposed[0] else K, K if transposed[1] else N)
    wide = plan.tiling.kernel == "product_wgmma" and plan.tiling.columns == COLUMNS and plan.slices == 1
    return wide and all(width % 8 == 0 for width in widths)


def _shared(candidate: Candidate) -> int:
    stage, patch = (candidate.rows + COLUMNS) * 2 * _DEPTH, 4 * 16 * 40
    return 1024 + candidate.stages * stage + 8 * patch + 8 * (2 * candidate.stages + 2)


def source(candidate: Candidate, transposed: tuple[bool, bool], factor: str, result: str) -> str:
    """Return the kernel `product(a, b, c, M, N, K)` of two tensor maps; types are C++'s."""
    turned = [str(flag).lower() for flag in (candidate.in_turns, *transposed)]
    shape = f"{candidate.rows}, {COLUMNS}, {turned[0]}, {candidate.cluster}, {turned[1]}, {turned[2]}"
    return f"""#define INDEX int
#include "product_tma.cuh"

static_assert(TmaShape<{shape}>::SHARED == {_shared(candidate)}, "shared memory is what the host asks for");
static_assert(TmaShape<{shape}>::THREADS == {THREADS}, "threads are those of the launch");

extern "C" __global__ void __cluster_dims__({candidate.cluster}, 1, 1) __launch_bounds__({THREADS}, 1)
    product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, {result} *c, int M, int N,
            int K) {{
    extern __shared__ char shared[];
    product_tma<{factor}, {shape}>(shared, a, b, M, N, K,
                                   [&](long long m, int n, float sum) {{ c[m * N + n] = {result}(sum); }});
}}
"""


# The tensor map of a dense matrix, in boxes of 64 columns.
def _tensor_map(address: int, rows: int, columns: int, box_rows: int, dtype: str) -> bytes:
    try:
        encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        raise DeviceError("this driver has no cuTensorMapEncodeTiled (CUDA 12.0 or later)") from None
    memory = (ctypes.c_char * 192)()
    place = (ctypes.addressof(memory) + 63) // 64 * 64
    size, pitch = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(2 * columns)
    box, steps = (ctypes.c_uint32 * 2)(_DEPTH, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    code = encode(
        *(ctypes.c_void_p(place), _TYPES[dtype], ctypes.c_uint32(2), ctypes.c_void_p(address)),
        *(size, pitch, box, steps, 0, _SWIZZLE, _INTO_L2, 0),
    )
    if code:
        raise DeviceError(
            f"the driver refuses a tensor map of {rows} x {columns} numbers at {address:#x}: error {code}"
        )
    return ctypes.string_at(place, 128)


# How many blocks the GPU holds at once, in whole clusters: parts of it have processors that are no multiple of a
# cluster's blocks, and a cluster that is left over would begin when all others have ended.
def _resident(image: bytes, candidate: Candidate) -> int:
    driver, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    clusters, shared = ctypes.c_int(), _shared(candidate)
    # CUlaunchAttribute of a cluster's dimensions, and CUlaunchConfig.
    dimensions = ctypes.create_string_buffer(
        struct.pack("i4x16I", _CLUSTER_DIMENSION, candidate.cluster, 1, 1, *[0] * 13)
    )
    numbers = (candidate.cluster, 1, 1, THREADS, 1, 1, shared, 0, ctypes.addressof(dimensions), 1)
    config = ctypes.create_string_buffer(struct.pack("7I4xQQI4x", *numbers))
    if code := driver.cuModuleLoadData(ctypes.byref(module), image):
        raise DeviceError(f"the driver refuses to load a product: error {code}")
    try:
        code = (
            driver.cuModuleGetFunction(ctypes.byref(function), module, b"product")
            or driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared)
            or driver.cuOccupancyMaxActiveClusters(ctypes.byref(clusters), function, ctypes.byref(config))
        )
    finally:
        driver.cuModuleUnload(module)
    if code or clusters.value < 1:
        raise DeviceError(f"the GPU holds no cluster of {candidate.cluster} blocks of a product: error {code}")
    return clusters.value * candidate.cluster


@dataclass(frozen=True)
class TmaProduct:
    """A prepared product c = a b."""

    function: Any
    candidate: Candidate
    sizes: tuple[int, int, int]
    transposed: tuple[bool, bool]
    dtype: str
    grid: tuple[int, int]

    def maps(self, a: int, b: int) -> list[bytes]:
        """Return the tensor maps of matrices at two addresses; DeviceError if the driver refuses one."""
        (M, N, K), turned, kernel = self.sizes, self.transposed, self.candidate
        shapes = ((K, M) if turned[0] else (M, K), (N, K) if turned[1] else (K, N))
        boxes = (_DEPTH if turned[0] else kernel.rows, COLUMNS // kernel.cluster if turned[1] else _DEPTH)
        return [
            _tensor_map(address, *shape, box, self.dtype)
            for address, shape, box in zip((a, b), shapes, boxes, strict=True)
        ]

    def launch(self, maps: list[bytes], c: int, stream: Any) -> None:
        """Queue it on a stream."""
        arguments = (*maps, c, *self.sizes)
        shared = _shared(self.candidate)
        self.function.prepared_async_call(self.grid, (THREADS, 1, 1), stream, *arguments, shared_size=shared)


def prepared(
    gpu: Any,
    candidate: Candidate,
    sizes: tuple[int, int, int],
    transposed: tuple[bool, bool],
    dtype: str,
    processors: int = 0,
    result: str = "float32",
) -> TmaProduct:
    """Compile a product for a GPU; `processors` are its blocks at most, 0 for as many as the GPU holds."""
    of_result = "float" if result == "float32" else f"dp_{result}"
    text = source(candidate, transposed, f"dp_{dtype}", of_result)
    cubin = compiled_text("product_tma", text, gpu.architecture)
    function = gpu.module(cubin).get_function("product")
    if not gpu.allow_shared(function, _shared(candidate)):
        raise DeviceError(f"this GPU has less than {_shared(candidate)} bytes of shared memory a block")
    function.prepare("128s128sPiii")
    grid = (candidate.blocks(*sizes[:2], processors or _resident(cubin.content, candidate)), 1)
    return TmaProduct(function, candidate, sizes, transposed, dtype, grid)
