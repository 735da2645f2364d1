"""Plans of matrix products."""

from dptrain.backend.cuda.products import TILES, product_plan


def test_plans_of_products():
    """What each of the plan's rules decides, for layers of 784-128-10, 784-512-10 and 784-4096-4096-10."""
    for M, N, K in [(1, 1, 1), (32, 10, 784), (32, 128, 0), (5, 7, 100_000), (32, 128, 511), (32, 128, 512)]:
        tile, slices, depth = product_plan(M, N, K)
        assert tile in TILES
        assert depth % 32 == 0
        assert slices * depth >= K > (slices - 1) * depth or K == 0
    # Large results: large tiles, whole sums.
    assert product_plan(1024, 4096, 4096)[:2] == (128, 1)
    assert product_plan(784, 512, 1024)[:2] == (64, 1)
    # A batch of 32 rows does not half fill a tile of 64, nor do ten classes.
    assert product_plan(32, 4096, 4096)[0] == 32
    assert product_plan(4096, 10, 1024)[0] == 32
    # Short sums are not worth a second kernel; long ones with few results are.
    assert product_plan(32, 10, 128)[1] == product_plan(784, 128, 128)[1] == 1
    assert product_plan(32, 128, 784)[1] >= 8
    assert product_plan(1024, 10, 4096)[1] == 16
