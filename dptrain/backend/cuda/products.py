"""Which of our kernels computes a matrix product, in which tiles and slices."""

import functools
from dataclasses import dataclass

TILES = (128, 64, 32)
# Targets of the plans. Constants, not the GPU's number of processors, so that the order of sums, and thus the bits,
# depend on shapes alone.
_WANTED_BLOCKS, _WANTED_WARPS = 64, 2048
_LEAST_SPLIT, _LEAST_SLICE, _MOST_SLICES = 512, 64, 256
# Slices, and tiles of rows, that a block joins: SLICE_FAN, and FAN of `TileColumns`, of `kernels/tiles.cuh`.
_SLICE_FAN, COLUMNS_FAN = 16, 32
# Up to so many terms results outnumber operands.
_FEW_TERMS = 64
# Terms of a slice from which a larger tile in slices beats a smaller one with enough blocks.
_LONG_SLICE = 1024
# A product by warpgroups: rows and columns of a tile, terms a stage, and stages (`WgmmaShape`). A block has a
# multiprocessor for itself; `_WANTED_WGMMA` blocks fill a GPU.
_WGMMA_ROWS, _WGMMA_COLUMNS, _WGMMA_DEPTH, _WGMMA_STAGES = 128, (256, 128), 64, 4
_WANTED_WGMMA = 128


@dataclass(frozen=True)
class Tiling:
    """A kernel (function and header) and its tiles of `rows` x `columns`, computed by `threads` of a block.

    Attributes:
        inner: the kernel's other numbers: terms a stage, sums a thread or a warp in both directions, and, of "product",
            groups of threads that share a stage.
        shared: bytes of dynamic shared memory; 0 if static memory suffices.
        resident: blocks that a multiprocessor is to hold at once, for which nvcc saves registers.
    """

    kernel: str
    rows: int
    columns: int
    inner: tuple[int, ...]
    threads: int
    shared: int = 0
    resident: int = 1

    @property
    def own_columns(self) -> int:
        """How many columns of a tile a thread has results of: EACH of `TileColumns`."""
        if self.kernel == "product_wgmma":
            return self.columns // 32
        if self.kernel == "product_tf32":
            return max(1, self.inner[2] // 32)
        return self.inner[2] // (4 if self.kernel == "product_half" else 1)


def _square(kernel: str, tile: int, inner: tuple[int, ...], threads: int, resident: int = 1) -> Tiling:
    return Tiling(kernel, tile, tile, inner, threads, resident=resident)


# By precision and the length of a tile. On tensor cores, a block of 32 x 32 has a warp for each 16 x 16.
_TILINGS = {
    precision: {length: _square(kernel, length, *rest) for length, rest in by_length.items()}
    for precision, kernel, by_length in (
        ("float32", "product", {32: ((32, 4, 4, 1), 64), 64: ((16, 4, 4, 1), 256, 2), 128: ((8, 8, 16, 1), 128, 2)}),
        ("tf32", "product_tf32", {32: ((32, 16, 16), 128), 64: ((16, 32, 32), 128), 128: ((16, 64, 64), 128)}),
        ("half", "product_half", {32: ((64, 16, 16), 128), 64: ((32, 32, 32), 128), 128: ((32, 64, 32), 256)}),
    )
}
# Float32's largest tile of gathered matrices; addressing takes registers, and 16 columns a thread would spill.
_GATHERED = _square("product", 128, (8, 8, 8, 1), 256)
# Its smallest, in four groups of threads, for results of fewer such tiles.
_GROUPED, _FEW_TILES = _square("product", 32, (64, 4, 4, 4), 256, 2), 256
# Tiles for up to 16 columns (channels, classes): where these are enough blocks, and else, of convolutions, in groups.
_NARROW = Tiling("product", 128, 16, (16, 8, 4, 1), 64)
_NARROW_GROUPED = Tiling("product", 64, 16, (64, 4, 4, 4), 256, resident=2)
# Warps of a block by the length of a tile, as plans count them.
_WARPS = {128: 8, 64: 8, 32: 2}


@dataclass(frozen=True)
class ProductPlan:
    """How a product is computed: its kernel, and the number of slices of its sums with `depth` terms each."""

    tiling: Tiling
    slices: int
    depth: int

    @property
    def counters(self) -> int:
        """Return a tile's number of counters: one for each node of the tree that joins its slices."""
        return max(1, sum(tree_levels(self.slices, _SLICE_FAN)[1:]))

    def tiles(self, M: int, N: int) -> int:
        """Return how many tiles M x N results take."""
        return _blocks(self.tiling.rows, self.tiling.columns, M, N)


@functools.cache
def product_plan(M: int, N: int, K: int, precision: str = "float32", gathered: bool = False) -> ProductPlan:
    """Return how an M x N result of sums over K is computed; depends on nothing else. `gathered`: of a convolution."""
    # It takes the largest tile that gives enough blocks, with long slices if need be, and is more than half filled; a
    # batch of 32 rows in tiles of 64 would spend half the time on zeros. A tile twice as long reads half as much for
    # each result. If the blocks have too few warps to fill a GPU, long sums are cut into slices. Slices cost a second
    # pass over the result, as long as a block takes for about 200 terms, so short sums stay whole. Precision "wgmma" is
    # half precision on compute capability 9.0, where warpgroups compute what fills the largest tiles and at least one
    # of their stages.
    long_slices = max(1, min(K // _LONG_SLICE, _MOST_SLICES))
    # With few terms the results take the time: more threads store smaller tiles at once.
    tiles = TILES if K >= _FEW_TERMS else TILES[1:]
    filled = (tile for tile in tiles if 2 * min(M, N) > tile)
    tile = next(
        (length for length in filled if _blocks(length, length, M, N) * long_slices >= _WANTED_BLOCKS), TILES[-1]
    )
    if precision == "wgmma" and tile == _WGMMA_ROWS and K >= _WGMMA_DEPTH:
        return _by_warpgroups(M, N, K)
    tiling, warps = _TILINGS["half" if precision == "wgmma" else precision][tile], _WARPS[tile]
    if gathered and tiling.kernel == "product" and tile == TILES[0]:
        tiling = _GATHERED
    if tiling.kernel == "product" and tile == TILES[-1]:
        tiling = _of_small_tiles(M, N, K, gathered)
        warps = tiling.threads // 32
    slices = 1
    if K >= _LEAST_SPLIT:
        warps = max(1, _blocks(tiling.rows, tiling.columns, M, N) * warps)  # none for an empty batch
        slices = max(1, min(_WANTED_WARPS // warps, K // _LEAST_SLICE, _MOST_SLICES))
    return ProductPlan(tiling, *_sliced(K, slices, tiling.inner[0] if tiling in (_GROUPED, _NARROW_GROUPED) else 32))


def _of_small_tiles(M: int, N: int, K: int, gathered: bool) -> Tiling:
    """Return how float32 computes what does not fill larger squares: with few tiles, groups of threads share each."""
    small, is_narrow = _TILINGS["float32"][TILES[-1]], _NARROW.columns >= N
    if is_narrow and K >= _FEW_TERMS and _blocks(_NARROW.rows, _NARROW.columns, M, N) >= _WANTED_BLOCKS:
        return _NARROW
    if _blocks(small.rows, small.columns, M, N) >= _FEW_TILES:
        return small
    # A dense product has few terms to gather: more blocks, of half as many rows, do more for it than full tiles.
    return _NARROW_GROUPED if gathered and is_narrow else _GROUPED


def _by_warpgroups(M: int, N: int, K: int) -> ProductPlan:
    # 256 columns if these are enough blocks: for 1024 multiplications, two warpgroups read 40 bytes of shared memory in
    # a tile of 128 x 256, 48 in one of 128.
    rows = _WGMMA_ROWS
    wide = (width for width in _WGMMA_COLUMNS if width < 2 * N and _blocks(rows, width, M, N) >= _WANTED_BLOCKS)
    columns = next(wide, _WGMMA_COLUMNS[-1])
    # The swizzle's alignment, the stages, and an mbarrier each for full and empty ones and for the end.
    shared = 1024 + _WGMMA_STAGES * (rows + columns) * 2 * _WGMMA_DEPTH + 8 * (2 * _WGMMA_STAGES + 2)
    tiling = Tiling("product_wgmma", rows, columns, (), 384, shared)
    slices = max(1, min(_WANTED_WGMMA // _blocks(rows, columns, M, N), K // _LEAST_SPLIT))
    return ProductPlan(tiling, *_sliced(K, slices, _WGMMA_DEPTH))


def tree_levels(leaves: int, fan: int) -> list[int]:
    """Return the number of nodes on each level of a tree that joins `fan` at a time, leaves first."""
    levels = [leaves]
    while levels[-1] > 1:
        levels.append(-(-levels[-1] // fan))
    return levels


def _blocks(rows: int, columns: int, M: int, N: int) -> int:
    return -(-M // rows) * -(-N // columns)


def _sliced(K: int, slices: int, unit: int) -> tuple[int, int]:
    depth = -(-K // (slices * unit)) * unit
    return max(1, -(-K // depth)) if depth else 1, depth
