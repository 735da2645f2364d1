"""Products of dense half-precision matrices by tensor maps (`kernels/product_tma.cuh`).

They have run only on the emulated driver. So programs use none, and keep `product_wgmma`, whose bits these have, while
`SCHEDULE` is None. `benchmarks/gpu_tma.py` sets, tests and times each.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.backend.cuda.products import ProductPlan
from dptrain.errors import DeviceError
from dptrain.program.tensor import Tensor
from dptrain.runtime.types import TYPES

# Of `TmaShape` (kernels/product_tma.cuh), and bytes of the two maps of a product.
COLUMNS, THREADS, _DEPTH, MAPS_BYTES = 256, 288, 64, 256
# CUDA's numbers (cuda.h): the 128-byte swizzle, and reads of 256 bytes into L2.
_SWIZZLE, _INTO_L2 = 3, 3
# CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION and CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_CLUSTER_DIMENSION, _MAX_DYNAMIC_SHARED = 4, 8


@dataclass(frozen=True)
class Schedule:
    """Warpgroups in `pingpong` or cooperative, blocks of a cluster, rows of a tile, and stages of the ring."""

    pingpong: bool
    cluster: int
    rows: int
    stages: int

    def blocks(self, M: int, N: int) -> int:
        """Return how many blocks have something to do, in whole clusters."""
        tiles_below, tiles_beside = -(-M // self.rows), -(-N // COLUMNS)
        return -(-tiles_below // self.cluster) * self.cluster * tiles_beside

    @property
    def shared(self) -> int:
        """Bytes of a block's shared memory."""
        stage, patch = (self.rows + COLUMNS) * 2 * _DEPTH, 4 * 16 * 40
        return 1024 + self.stages * stage + 8 * patch + 8 * (2 * self.stages + 2)


SCHEDULES = {
    **{f"cooperative, clusters of {cluster}": Schedule(False, cluster, 128, 4) for cluster in (1, 2)},
    **{f"pingpong, clusters of {cluster}": Schedule(True, cluster, 64, 5) for cluster in (1, 2, 4)},
}
# That of programs; None: they use no tensor maps.
SCHEDULE: Schedule | None = None
# Multiprocessors that a product leaves to messages between GPUs which travel meanwhile: its blocks stay until all tiles
# are done, and NCCL's would wait for them. On Hopper NCCL's in-switch sums take 16 (NVLS_NCHANNELS_SM90, nvls.cc).
_MARGIN = 16


@dataclass(frozen=True, eq=False)
class TensorMaps:
    """The factors of a product by tensor maps: a is stored as (M, K), or `transposed`, b as (K, N), or transposed."""

    schedule: Schedule
    factors: tuple[Tensor, Tensor]
    sizes: tuple[int, int, int]
    transposed: tuple[bool, bool]

    def encoded(self, addresses: Sequence[int]) -> bytes:
        """Return both maps for factors at these addresses; DeviceError if the driver refuses one."""
        (M, N, K), (transposed_a, transposed_b), schedule = self.sizes, self.transposed, self.schedule
        shapes = ((K, M) if transposed_a else (M, K), (N, K) if transposed_b else (K, N))
        boxes = _DEPTH if transposed_a else schedule.rows, COLUMNS // schedule.cluster if transposed_b else _DEPTH
        return b"".join(
            _encoded(address, *shape, box, factor.dtype.name)
            for address, shape, box, factor in zip(addresses, shapes, boxes, self.factors, strict=True)
        )


def schedule_of(plan: ProductPlan, sizes: tuple[int, int, int], transposed: tuple[bool, bool]) -> Schedule | None:
    """Return the schedule of a matrix product with this plan, or None if its kernel computes it.

    Tensor maps take rows that begin at multiples of 16 bytes, and the kernel 256 columns and whole sums.
    """
    M, N, K = sizes
    widths = (M if transposed[0] else K, K if transposed[1] else N)
    is_large = plan.tiling.kernel == "product_wgmma" and plan.tiling.columns == COLUMNS and plan.slices == 1
    return SCHEDULE if is_large and all(width % 8 == 0 for width in widths) else None


# The tensor map of a dense matrix, in boxes of 64 columns.
def _encoded(address: int, rows: int, columns: int, box_rows: int, dtype: str) -> bytes:
    try:
        encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        raise DeviceError("this driver has no cuTensorMapEncodeTiled (CUDA 12.0 or later)") from None
    memory = (ctypes.c_char * 192)()
    place = (ctypes.addressof(memory) + 63) // 64 * 64
    size, pitch = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(2 * columns)
    box, steps = (ctypes.c_uint32 * 2)(_DEPTH, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    code = encode(
        *(ctypes.c_void_p(place), TYPES[dtype].tensor_map, ctypes.c_uint32(2), ctypes.c_void_p(address)),
        *(size, pitch, box, steps, 0, _SWIZZLE, _INTO_L2, 0),
    )
    if code:
        raise DeviceError(
            f"the driver refuses a tensor map of {rows} x {columns} numbers at {address:#x}: error {code}"
        )
    return ctypes.string_at(place, 128)


def resident_blocks(image: bytes, kernel: str, schedule: Schedule) -> int:
    """Return how many blocks of a compiled kernel the GPU holds at once, in whole clusters; DeviceError if none."""
    # Parts of a GPU have processors that are no multiple of a cluster's blocks, and a cluster that is left over would
    # begin when all others have ended.
    driver, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    clusters = ctypes.c_int()
    # CUlaunchAttribute of a cluster's dimensions, and CUlaunchConfig.
    dimensions = ctypes.create_string_buffer(
        struct.pack("i4x16I", _CLUSTER_DIMENSION, schedule.cluster, 1, 1, *[0] * 13)
    )
    numbers = (schedule.cluster, 1, 1, THREADS, 1, 1, schedule.shared, 0, ctypes.addressof(dimensions), 1)
    config = ctypes.create_string_buffer(struct.pack("7I4xQQI4x", *numbers))
    if code := driver.cuModuleLoadData(ctypes.byref(module), image):
        raise DeviceError(f"the driver refuses to load a product: error {code}")
    try:
        code = (
            driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode())
            or driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, schedule.shared)
            or driver.cuOccupancyMaxActiveClusters(ctypes.byref(clusters), function, ctypes.byref(config))
        )
    finally:
        driver.cuModuleUnload(module)
    if code or clusters.value < 1:
        raise DeviceError(f"the GPU holds no cluster of {schedule.cluster} blocks of a product: error {code}")
    return clusters.value * schedule.cluster


def beside_messages(resident: int, schedule: Schedule) -> int:
    """Return how many of `resident_blocks` a product uses while messages travel, in whole clusters."""
    cluster = schedule.cluster
    return max((resident - _MARGIN) // cluster, 1) * cluster
