"""How our own kernels cut products of matrices into tiles and slices."""

import functools

TILES = (128, 64, 32)
# Threads of a block, by precision and tile. On tensor cores, a block of 32 x 32 has a warp for each 16 x 16.
THREADS = {
    "float32": {128: 256, 64: 256, 32: 64},
    "tf32": {128: 256, 64: 128, 32: 128},
    "half": {128: 256, 64: 128, 32: 128},
}
# What `product_plan` aims at. Constants, not the GPU's number of processors, so that the order of sums, and with it the
# bits, depend on shapes alone.
_WANTED_BLOCKS, _WANTED_WARPS = 64, 1024
_LEAST_SPLIT, _LEAST_SLICE, _MOST_SLICES = 512, 64, 32


@functools.cache
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
        warps = max(1, blocks(tile) * THREADS["float32"][tile] // 32)  # none for an empty batch
        slices = max(1, min(_WANTED_WARPS // warps, K // _LEAST_SLICE, _MOST_SLICES))
    depth = -(-K // (slices * 32)) * 32
    return tile, max(1, -(-K // depth)) if depth else 1, depth
