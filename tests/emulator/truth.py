"""Runs the CUDA sources of `cuda/` through PyCUDA and compares with NumPy: the same on the emulator and on a GPU.

    tests/emulator/run python tests/emulator/truth.py [CHECK ...]     on the emulator
    python tests/emulator/truth.py [CHECK ...]                        on the GPU of this machine (PyCUDA, nvcc)

Prints one line per check and ends with status 1 if any failed.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pycuda.compiler
import pycuda.driver as cuda

FOLDER = Path(__file__).resolve().parent / "cuda"
CHECKS: dict[str, Callable[[], None]] = {}
rng = np.random.default_rng(7)


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a check under its name."""
    CHECKS[function.__name__] = function
    return function


def cubin(name: str, arch: str | None = None) -> bytes:
    """Compiles one source."""
    return pycuda.compiler.compile(
        (FOLDER / f"{name}.cu").read_text(), no_extern_c=True, options=["-std=c++17"], include_dirs=[str(FOLDER)],
        arch=arch,
    )  # fmt: skip


def kernel(file: str, name: str) -> cuda.Function:
    """One kernel of one source."""
    return cuda.module_from_buffer(cubin(file)).get_function(name)


def uniform(*shape: int) -> np.ndarray:
    """Numbers around zero."""
    return rng.uniform(-1, 1, shape).astype(np.float32)


def near(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Asserts |got - expected| <= tolerance * (1 + |expected|)."""
    error = np.abs(actual - expected) / (1 + np.abs(expected))
    assert error.max() <= tolerance, f"off by {error.max():.3g}, allowed {tolerance:.3g}"


# ------------------------------------------------------------------ sums, scans, votes


@check
def partial_sums() -> None:
    x = uniform(10007)
    out = np.empty(5, np.float32)
    kernel("reduce", "partial_sums")(cuda.In(x), cuda.Out(out), np.int32(x.size), grid=(5, 1), block=(128, 1, 1))
    near(out.sum(dtype=np.float64), x.sum(dtype=np.float64), 1e-4)


@check
def last_block_sum() -> None:
    x = uniform(10007)
    out, finished = np.empty(1, np.float32), np.zeros(1, np.uint32)
    partial = cuda.mem_alloc(9 * 4)
    kernel("reduce", "last_block_sum")(
        cuda.In(x), partial, cuda.InOut(finished), cuda.Out(out), np.int32(x.size), grid=(9, 1), block=(96, 1, 1)
    )
    assert finished[0] == 9
    near(out[0], x.sum(dtype=np.float64), 1e-4)


@check
def tile_sums() -> None:
    x = rng.integers(-1000, 1000, 4 * 64).astype(np.int32)
    sums, maxima = np.empty(32, np.int32), np.empty(32, np.int32)
    kernel("reduce", "tile_sums")(cuda.In(x), cuda.Out(sums), cuda.Out(maxima), grid=(4, 1), block=(64, 1, 1))
    np.testing.assert_array_equal(sums, x.reshape(32, 8).sum(1))
    np.testing.assert_array_equal(maxima, x.reshape(32, 8).max(1))


@check
def votes() -> None:
    x = rng.integers(-3, 3, 96).astype(np.int32)
    x[:32], x[32:64] = 1, -1
    ballots, any_votes, all_votes = np.empty(3, np.uint32), np.empty(3, np.int32), np.empty(3, np.int32)
    count = np.empty(1, np.int32)
    kernel("reduce", "votes")(
        cuda.In(x),
        cuda.Out(ballots),
        cuda.Out(any_votes),
        cuda.Out(all_votes),
        cuda.Out(count),
        grid=(1, 1),
        block=(96, 1, 1),
    )
    yes = (x > 0).reshape(3, 32)
    np.testing.assert_array_equal(ballots, (yes * (1 << np.arange(32, dtype=np.uint64))).sum(1))
    np.testing.assert_array_equal(any_votes != 0, yes.any(1))
    np.testing.assert_array_equal(all_votes != 0, yes.all(1))
    assert count[0] == yes.sum()


@check
def block_scan() -> None:
    x = rng.integers(-100, 100, 300).astype(np.int32)
    out = np.empty_like(x)
    kernel("scan", "block_scan")(cuda.In(x), cuda.Out(out), np.int32(300), block=(512, 1, 1), shared=2 * 512 * 4)
    np.testing.assert_array_equal(out, x.cumsum())


@check
def warp_scans() -> None:
    x = rng.integers(-100, 100, 256).astype(np.int32)
    for name in ("warp_scan", "warp_scan_shared"):
        out = np.empty_like(x)
        kernel("scan", name)(cuda.In(x), cuda.Out(out), block=(256, 1, 1))
        np.testing.assert_array_equal(out.reshape(8, 32), x.reshape(8, 32).cumsum(1))


# ------------------------------------------------------------------ matrix products


def product(name: str, m: int, n: int, k: int, grid: tuple[int, int], block: tuple[int, int, int]) -> None:
    a, b = uniform(m, k), uniform(k, n)
    c = np.full((m, n), np.nan, np.float32)
    kernel("gemm", name)(
        cuda.In(a), cuda.In(b), cuda.Out(c), np.int32(m), np.int32(n), np.int32(k), grid=grid, block=block
    )
    near(c, a.astype(np.float64) @ b.astype(np.float64), 3e-5)  # float32 sums of up to 784 products


@check
def gemm_tiled() -> None:
    product("gemm_tiled", 33, 17, 50, (2, 3), (16, 16, 1))


@check
def gemm_vector() -> None:
    product("gemm_vector", 128, 64, 48, (1, 2), (256, 1, 1))


@check
def gemm_async() -> None:
    product("gemm_async", 32, 48, 64, (3, 2), (64, 1, 1))


def tf32(x: np.ndarray) -> np.ndarray:
    """Ten bits of mantissa, nearest, ties away from zero."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def bf16(x: np.ndarray) -> np.ndarray:
    """Seven bits of mantissa, nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )


def half(x: np.ndarray) -> np.ndarray:
    """IEEE half precision."""
    return x.astype(np.float16).astype(np.float32)


@check
def roundings() -> None:
    x = np.concatenate([uniform(1000), uniform(1000) * 1e4, np.float32([0, -0.0, 1, 1 + 2**-11, 1 + 2**-8, 3 + 2**-7])])
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf))]).astype(np.float32)
    outputs = [np.empty_like(x) for _ in range(3)]
    kernel("wmma", "roundings")(
        cuda.In(x), *map(cuda.Out, outputs), np.int32(x.size), grid=((x.size + 255) // 256, 1), block=(256, 1, 1)
    )
    for result, rounding in zip(outputs, (tf32, bf16, half), strict=True):
        np.testing.assert_array_equal(result.view(np.uint32), rounding(x).view(np.uint32), err_msg=rounding.__name__)


@check
def wmma_products() -> None:
    m, n, k = 32, 48, 64
    for name, rounding in (("wmma_tf32", tf32), ("wmma_bf16", bf16), ("wmma_half", half)):
        a, b = uniform(m, k), uniform(k, n)
        c = np.full((m, n), np.nan, np.float32)
        stored = b if name == "wmma_tf32" else np.ascontiguousarray(b.T)
        kernel("wmma", name)(
            cuda.In(a), cuda.In(stored), cuda.Out(c), np.int32(n), np.int32(k), grid=(3, 2), block=(32, 1, 1)
        )
        exact = a.astype(np.float64) @ b.astype(np.float64)
        rounded = rounding(a).astype(np.float64) @ rounding(b).astype(np.float64)
        near(c, rounded, 1e-5)  # tensor cores cut their sums off after every few products, where others round
        # The rounding of the inputs is there: without it the result would be much closer to the exact product.
        assert np.abs(c - exact).max() > 10 * np.abs(c - rounded).max(), name


@check
def mma_lanes() -> None:
    """Factors whose products tell every place of either apart; with two registers swapped, sums are others."""
    k_of = {"mma_bf16": 16, "mma_half": 16, "mma_tf32": 8}
    for name, k in k_of.items():
        a, b = np.zeros((16, k), np.float32), rng.permutation(k * 8).reshape(k, 8).astype(np.float32)
        a[np.arange(16), rng.permutation(16) % k] = np.arange(1, 17)
        a += rng.integers(0, 3, a.shape)
        c = np.arange(128, dtype=np.float32).reshape(16, 8)
        stored = [matrix.view(np.uint32) for matrix in (a, b)]
        if name == "mma_bf16":
            stored = [(bits >> np.uint32(16)).astype(np.uint16) for bits in stored]
        elif name == "mma_half":
            stored = [matrix.astype(np.float16).view(np.uint16) for matrix in (a, b)]
        else:
            stored[0] = stored[0] | np.uint32(0x1FFF)  # cut off, and below the bits of a small whole number
        for swapped in (0, 1):
            sums = c.copy()
            kernel("mma", name)(*map(cuda.In, stored), cuda.InOut(sums), np.int32(swapped), block=(32, 1, 1))
            assert (sums == a @ b + c).all() == (not swapped), name


@check
def mma_cuts_off() -> None:
    """What is far below the greatest term is cut off, where 16 times 2^-27 added to 1 would round to 1 + 2^-23."""
    shape = {"mma_bf16": 16, "mma_half": 16, "mma_tf32": 8}
    for name, k in shape.items():
        signs = np.resize(np.float32([1, -1]), (16, 1))
        c = np.broadcast_to(signs, (16, 8)).copy()
        for size, kept_sum in ((2.0**-13, 0), (2.0**-8, k * 2.0**-22)):
            a, b = signs * np.full((16, k), size, np.float32), np.full((k, 8), 2.0**-14, np.float32)
            a[3, 2] = np.inf
            a[4, 1:3] = np.inf, -np.inf
            stored = [matrix.view(np.uint32) for matrix in (a, b)]
            if name == "mma_bf16":
                stored = [(bits >> np.uint32(16)).astype(np.uint16) for bits in stored]
            elif name == "mma_half":
                stored = [matrix.astype(np.float16).view(np.uint16) for matrix in (a, b)]
            actual = c.copy()
            kernel("mma", name)(*map(cuda.In, stored), cuda.InOut(actual), np.int32(0), block=(32, 1, 1))
            expected = c + signs * np.float32(kept_sum)
            expected[3:5] = [[np.inf], [np.nan]]
            np.testing.assert_array_equal(actual, expected, err_msg=name)


@check
def wgmma_lanes() -> None:
    """Whole numbers, in both majors of both factors; its instructions are those of compute capability 9.0 alone."""
    if cuda.Context.get_device().compute_capability() != (9, 0):
        return
    module, steps, shared = cuda.module_from_buffer(cubin("wgmma", "sm_90a")), 3, 1024 + 2 * 192 * 128 + 64
    for name in ("wgmma_bf16_k_k", "wgmma_bf16_mn_mn", "wgmma_half_k_mn", "wgmma_half_mn_k"):
        a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((64, steps * 64), (steps * 64, 128)))
        stored = [
            (matrix.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if "bf16" in name else matrix.astype(np.float16)
            for matrix in (a, b)
        ]
        c, function = np.empty((64, 128), np.float32), module.get_function(name)
        function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        numbers = np.int32(steps), np.int32(0)
        function(*map(cuda.In, stored), cuda.Out(c), *numbers, block=(160, 1, 1), shared=shared)
        np.testing.assert_array_equal(c, a @ b, err_msg=name)


@check
def ldmatrix() -> None:
    x, actual = np.arange(256, dtype=np.uint16).reshape(4, 8, 8), np.zeros((32, 13), np.uint32)
    kernel("mma", "ldmatrix_all")(cuda.In(x), cuda.Out(actual), block=(32, 1, 1))
    straight, turned = (
        np.ascontiguousarray(matrices).reshape(4, 32, 2).view(np.uint32)[..., 0].T for matrices in (x, x.swapaxes(1, 2))
    )
    expected = np.concatenate([straight[:, :1], straight[:, :2], turned[:, :2], straight, turned], 1)
    np.testing.assert_array_equal(actual, expected)


@check
def cp_async() -> None:
    x, copied = uniform(4), np.empty(7, np.float32)
    for nbytes in (0, 4, 8, 12, 16):
        kernel("mma", "cp_async_sizes")(cuda.In(x), cuda.Out(copied), np.int32(nbytes), block=(1, 1, 1))
        masked = np.where(np.arange(4) < nbytes // 4, x, 0)
        np.testing.assert_array_equal(copied, [masked[0], *masked[:2], *masked])


# ------------------------------------------------------------------ atomics


@check
def histogram() -> None:
    x = rng.integers(0, 256, 50000).astype(np.uint8)
    bins = np.zeros(256, np.uint32)
    kernel("histogram", "histogram")(cuda.In(x), cuda.InOut(bins), np.int32(x.size), grid=(6, 1), block=(192, 1, 1))
    np.testing.assert_array_equal(bins, np.bincount(x, minlength=256))


@check
def atomics() -> None:
    n = 1000
    x = rng.integers(-(2**20), 2**20, n).astype(np.int32)
    results = np.array([0, 0, 2**31 - 1, -(2**31), -1, 0, 0, 0, 555], np.int32)
    single, double, tickets = np.zeros(1, np.float32), np.zeros(1, np.float64), np.zeros(1, np.uint64)
    x[:] = x // 1024 * 1024  # sums of these are exact in float32
    kernel("histogram", "atomics")(
        cuda.In(x), cuda.InOut(results), cuda.InOut(single), cuda.InOut(double), cuda.InOut(tickets), np.int32(n),
        grid=(4, 1), block=(256, 1, 1),
    )  # fmt: skip
    expected = [
        x.sum(), -x.sum(), x.min(), x.max(), np.bitwise_and.reduce(x), np.bitwise_or.reduce(x),
        np.bitwise_xor.reduce(x), n % 10, -1,
    ]  # fmt: skip
    np.testing.assert_array_equal(results, np.array(expected, np.int32))
    assert single[0] == double[0] == x.sum()
    assert tickets[0] == n << 33


# ------------------------------------------------------------------ clusters and grids


@check
def cluster_sum() -> None:
    x = uniform(8 * 64)
    out, ranks = np.empty(8, np.float32), np.empty(8, np.int32)
    kernel("barriers", "cluster_sum")(cuda.In(x), cuda.Out(out), cuda.Out(ranks), grid=(8, 1), block=(64, 1, 1))
    near(out, np.repeat(x.reshape(2, 256).sum(1, dtype=np.float64), 4), 1e-5)
    np.testing.assert_array_equal(ranks, np.tile(np.arange(4), 2))


@check
def cluster_histogram() -> None:
    x = rng.integers(0, 16, 5000).astype(np.int32)
    bins = np.zeros(16, np.int32)
    kernel("barriers", "cluster_histogram")(
        cuda.In(x), cuda.InOut(bins), np.int32(x.size), grid=(6, 1), block=(64, 1, 1), shared=64
    )
    np.testing.assert_array_equal(bins, np.bincount(x, minlength=16))


class Driver:
    """The driver's own entry points, for what PyCUDA lacks: a cooperative launch."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: error {code}"

    def cooperative(self, image: bytes, name: str, grid: int, block: int, *arguments: object) -> None:
        """Loads a module and launches one kernel of it cooperatively."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), image)
        self("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.byref(a), ctypes.c_void_p) for a in arguments)  # type: ignore[arg-type]
        )
        self("cuLaunchCooperativeKernel", function, grid, 1, 1, block, 1, 1, 0, None, pointers)
        self("cuCtxSynchronize")
        self("cuModuleUnload", module)


@check
def grid_smooth() -> None:
    n, steps = 1500, 6
    x = uniform(n)
    a, b = cuda.to_device(x), cuda.mem_alloc(x.nbytes)
    Driver().cooperative(
        cubin("barriers"), "grid_smooth", 12, 64, ctypes.c_uint64(int(a)), ctypes.c_uint64(int(b)), ctypes.c_int(n),
        ctypes.c_int(steps),
    )  # fmt: skip
    expected = x.astype(np.float64)
    for _ in range(steps):
        expected = 0.25 * np.roll(expected, 1) + 0.5 * expected + 0.25 * np.roll(expected, -1)
    near(cuda.from_device_like(a, x), expected, 1e-6)


@check
def counter_barrier() -> None:
    blocks = 16
    out, flags, counter = np.empty(blocks, np.int32), np.zeros(blocks, np.int32), np.zeros(1, np.uint32)
    kernel("barriers", "counter_barrier")(
        cuda.InOut(counter), cuda.InOut(flags), cuda.Out(out), grid=(blocks, 1), block=(32, 1, 1)
    )
    np.testing.assert_array_equal(out, np.full(blocks, blocks * (blocks + 1) // 2))


# ------------------------------------------------------------------ what a device refuses


def refused(action: Callable[[], object], kind: type[Exception] = cuda.LogicError) -> None:
    try:
        action()
    except kind:
        return
    raise AssertionError("accepted")


@check
def refusals() -> None:
    gemm = kernel("gemm", "gemm_vector")
    scan = kernel("scan", "block_scan")
    cluster = kernel("barriers", "cluster_sum")
    device = cuda.Context.get_device()
    data = cuda.mem_alloc(4096)
    n = np.int32(4)

    def launch(function: cuda.Function, block: int, *arguments: object, grid: int = 1, shared: int = 0) -> None:
        function(*arguments, grid=(grid, 1), block=(block, 1, 1), shared=shared)
        cuda.Context.synchronize()

    errors = (cuda.LogicError, cuda.LaunchError)
    refused(lambda: launch(scan, 2048, data, data, n), errors)  # type: ignore[arg-type]
    refused(lambda: launch(gemm, 512, data, data, data, n, n, n), errors)  # type: ignore[arg-type]
    refused(lambda: launch(scan, 32, data, data, n, shared=48 * 1024 + 16))
    refused(lambda: launch(scan, 32, data, data))
    refused(lambda: launch(cluster, 64, data, data, data, grid=6), errors)  # type: ignore[arg-type]
    most = device.get_attribute(cuda.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    attribute = cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
    refused(lambda: scan.set_attribute(attribute, most + 1024))
    # With the attribute raised, more than 48 KB is fine.
    scan.set_attribute(attribute, 64 * 1024)
    x = np.arange(32, dtype=np.int32)
    out = np.empty_like(x)
    scan(cuda.In(x), cuda.Out(out), np.int32(32), block=(32, 1, 1), shared=64 * 1024)
    np.testing.assert_array_equal(out, x.cumsum())
    data.free()


def main(names: list[str]) -> int:
    """Runs the named checks, or all."""
    cuda.init()
    context = cuda.Device(0).retain_primary_context()
    context.push()
    failures = 0
    try:
        print(f"device: {cuda.Device(0).name()}", flush=True)
        for name in names or CHECKS:
            start = time.perf_counter()
            try:
                CHECKS[name]()
            except (AssertionError, cuda.Error, cuda.CompileError) as error:
                failures += 1
                print(f"FAILED {name}: {' '.join(str(error).split())[:300]}", flush=True)
            else:
                print(f"ok {name} {time.perf_counter() - start:.2f} s", flush=True)
    finally:
        context.pop()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
