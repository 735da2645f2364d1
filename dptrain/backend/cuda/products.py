"""Who computes the matrix products of the CUDA backend: one interface, our own kernels behind it.

The other provider is cuBLASLt, in dptrain/backend/cuda/cublaslt.py. A provider sees device addresses and sizes, no
buffers, and reaches the device through the functions that the backend hands it.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

PROVIDERS = ("dptrain", "cublaslt")
PRECISIONS = ("float32", "tf32")
# As `enum Activation` in kernels/common.cuh; softmax works on rows and has kernels of its own.
ACTIVATION_NUMBERS = {
    **{"linear": 0, "relu": 1, "sigmoid": 2, "tanh": 3, "leaky_relu": 4},
    **{"elu": 5, "selu": 6, "softplus": 7, "exponential": 8, "gelu": 9, "silu": 10},
}
# Those that a product computes at its end, with Keras' default arguments.
FUSED_ACTIVATIONS = ("linear", "relu", "sigmoid", "tanh", "leaky_relu")
LAYOUTS = ("nn", "tn", "nt")
TILES = (128, 64, 32)
# Threads of a block, by tile. A TF32 block of 32 x 32 has a warp for each fragment of 16 x 16.
THREADS = {"float32": {128: 256, 64: 256, 32: 64}, "tf32": {128: 256, 64: 128, 32: 128}}
# What `product_plan` aims at. Constants, not the GPU's number of processors, so that the order of sums, and with it the
# bits, depend on shapes alone.
_WANTED_BLOCKS, _WANTED_WARPS = 64, 1024
_LEAST_SPLIT, _LEAST_SLICE, _MOST_SLICES = 512, 64, 32

# kernel, grid, block, arguments: queue a launch.
LaunchKernel = Callable[..., None]
# kernel, elements, arguments: queue a launch of a kernel that loops over elements.
LaunchElementwise = Callable[..., None]
# bytes -> address of memory for one op's intermediate results.
AllocateScratch = Callable[[int], int]


class Gemm(ABC):
    """Matrix products on one device, queued on the backend's stream.

    Attributes:
        name: one of `PROVIDERS`.
        numerics: what the bits of products depend on, beyond the device.
    """

    name: str
    numerics: str

    @abstractmethod
    def product(
        self, layout: str, a: int, b: int, bias: int, c: int, sizes: tuple[int, int, int], activation: str
    ) -> None:
        """Queue c = activation(op(a) op(b) + bias); all arrays are float32, dense and row-major.

        Args:
            layout: "nn" for a (M, K) and b (K, N), "tn" for a (K, M) and b (K, N), "nt" for a (M, K) and b (N, K).
            a: device address, as those that follow.
            b: of the second factor.
            bias: of (N,) values, or 0 for none.
            c: of (M, N) results, overwritten.
            sizes: M, N and K, each 0 or more; with K = 0 the sums are 0.
            activation: one of `FUSED_ACTIVATIONS`.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the provider holds outside the backend's memory; all queued work has ended."""


class OwnGemm(Gemm):
    """Our own kernels: kernels/dense.cu, or kernels/dense_tf32.cu on tensor cores.

    Args:
        precision: "float32", or "tf32" for inputs rounded to ten bits of mantissa.
        launch: queues a kernel.
        elementwise: queues a kernel over elements.
        scratch: memory for parts of sums.
    """

    def __init__(
        self, precision: str, launch: LaunchKernel, elementwise: LaunchElementwise, scratch: AllocateScratch
    ) -> None:
        self.name = "dptrain"
        self.numerics = f"products by dptrain in {precision}"
        self._prefix = "gemm" if precision == "float32" else f"gemm_{precision}"
        self._threads = THREADS[precision]
        self._launch, self._elementwise, self._scratch = launch, elementwise, scratch

    def product(
        self, layout: str, a: int, b: int, bias: int, c: int, sizes: tuple[int, int, int], activation: str
    ) -> None:
        """See `Gemm`."""
        M, N, K = sizes
        if M == 0 or N == 0:
            return
        tile, slices, depth = product_plan(M, N, K)
        target = c if slices == 1 else self._scratch(slices * M * N * 4)
        # Four floats at once where every row begins at a multiple of 16 bytes.
        wide_a = a % 16 == 0 and (M if layout == "tn" else K) % 4 == 0
        wide_b = b % 16 == 0 and (K if layout == "nt" else N) % 4 == 0
        wide_c = target % 16 == 0 and N % 4 == 0
        number = ACTIVATION_NUMBERS[activation]
        grid = (-(-M // tile), -(-N // tile), slices)
        self._launch(
            f"{self._prefix}_{layout}_{tile}",
            grid,
            (self._threads[tile], 1, 1),
            *(a, b, bias, target, M, N, K, depth, number, wide_a, wide_b, wide_c),
        )
        if slices > 1:
            self._elementwise("gemm_finish", M * N, target, bias, c, M, N, slices, number)

    def close(self) -> None:
        """See `Gemm`."""


def product_kernels(precision: str) -> dict[str, dict[str, str]]:
    """Return the kernels of our own products by source file, with their argument types as `struct` letters."""
    source, prefix = ("dense", "gemm") if precision == "float32" else ("dense_tf32", f"gemm_{precision}")
    return {source: {f"{prefix}_{layout}_{tile}": "PPPPiiiiiiii" for layout in LAYOUTS for tile in TILES}}


@functools.lru_cache(maxsize=1024)  # a step asks for the same few shapes again and again
def product_plan(M: int, N: int, K: int) -> tuple[int, int, int]:
    """Return (tile, slices, terms a slice) for an M x N result of sums over K.

    The largest tile that gives enough blocks and is filled by more than half; a batch of 32 rows in tiles of 64 would
    compute zeros half of the time. Where the blocks hold too few warps to fill a GPU, long sums are cut into slices.
    Slices cost a second kernel over the result, as long as about 200 terms take a block: short sums stay whole.
    """

    def blocks(tile: int) -> int:
        return -(-M // tile) * -(-N // tile)

    fitting = (tile for tile in TILES if 2 * min(M, N) > tile and blocks(tile) >= _WANTED_BLOCKS)
    tile = next(fitting, TILES[-1])
    slices = 1
    if K >= _LEAST_SPLIT:
        warps = blocks(tile) * THREADS["float32"][tile] // 32
        slices = max(1, min(_WANTED_WARPS // warps, K // _LEAST_SLICE, _MOST_SLICES))
    depth = -(-K // (slices * 32)) * 32
    return tile, max(1, -(-K // depth)) if depth else 1, depth
