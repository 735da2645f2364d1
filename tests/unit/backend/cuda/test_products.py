"""Plans of matrix products."""

import numpy as np
import pytest

from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.cost.loads import loads
from dptrain.backend.cuda.gpu.probe import architecture_of
from dptrain.backend.cuda.products import TILES, ProductPlan, product_plan
from tests.ops.test_programs_on_cuda import mlp


def chosen(M, N, K, precision="float32"):
    """Return the kernel, rows and columns of its tile, and the number of slices."""
    plan = product_plan(M, N, K, precision)
    return plan.tiling.kernel, plan.tiling.rows, plan.tiling.columns, plan.slices


def test_plans_of_products():
    """What each of the plan's rules decides, for layers of 784-128-10, 784-512-10 and 784-4096-4096-10."""
    for M, N, K in [(1, 1, 1), (32, 10, 784), (32, 128, 0), (5, 7, 100_000), (32, 128, 511), (32, 128, 512)]:
        plan = product_plan(M, N, K)
        assert plan.tiling.rows in TILES
        assert plan.depth % 32 == 0
        assert plan.slices * plan.depth >= K > (plan.slices - 1) * plan.depth or K == 0
    # Large results: large tiles, whole sums, or half as long ones where their tiles fill less than half of a GPU.
    assert chosen(1024, 4096, 4096) == ("product", 128, 128, 1)
    assert chosen(784, 512, 1024) == ("product", 64, 64, 2)
    # A batch of 32 rows does not half fill a tile of 64, nor do ten classes.
    assert chosen(32, 4096, 4096)[1] == 32
    assert chosen(4096, 20, 1024)[1] == 32
    # Nor a square of 32, if there are enough others: see test_narrow_products_on_cuda.py.
    assert chosen(4096, 10, 1024)[1:3] == (32, 32)
    assert chosen(8192, 10, 1024)[1:3] == (128, 16)
    # Short sums are not worth a second kernel; long ones with few results are.
    assert chosen(32, 10, 128)[3] == chosen(784, 128, 128)[3] == 1
    assert chosen(32, 128, 784)[3] == 7
    assert chosen(1024, 10, 4096)[3] == 8
    # Of a few terms, results are what takes the time: no tiles of 128.
    assert [chosen(1024, 4096, K)[1] for K in (63, 64)] == [64, 128]


def test_few_small_tiles_are_shared_by_groups_of_threads():
    """Which multiply the terms of a stage side by side; of float32 alone, and not of as many tiles as fill a GPU."""
    grouped, single = (product_plan(32, columns, 784).tiling for columns in (32 * 255, 32 * 256))
    assert (grouped.threads, grouped.inner) == (256, (64, 4, 4, 4))
    assert (single.threads, single.inner) == (64, (32, 4, 4, 1))
    assert product_plan(32, 128, 784, "half").tiling.threads == 128
    assert product_plan(32, 128, 784).depth % 64 == 0
    assert product_plan(1024, 4096, 4096, gathered=True).tiling.inner == (8, 8, 8, 1)


def test_a_tile_is_chosen_as_if_sliced():
    """Gradients of kernels have few results, of long sums: the largest tile that slices of 1024 terms and more fill."""
    for precision, name in (("float32", "product"), ("tf32", "product_tf32"), ("half", "product_half")):
        assert chosen(576, 64, 131_072, precision) == (name, 64, 64, 28)
        assert chosen(1152, 128, 131_072, precision) == (name, 128, 128, 28)
    assert chosen(1152, 128, 131_072, "wgmma") == ("product_wgmma", 128, 128, 14)
    # Nine tiles in seven and in eight slices: 63 and 72 blocks.
    assert [chosen(576, 64, K)[1] for K in (8 * 1024 - 1, 8 * 1024)] == [32, 64]
    # 256 slices at most: the first convolution of a network of pictures, 27 x 16 results of sums over all pixels.
    assert chosen(128, 128, 1_000_000)[1:] == (128, 128, 255)
    assert chosen(27, 16, 65_536)[1:] == (32, 32, 256)
    assert chosen(27, 16, 1_000_000)[1:] == (32, 32, 253)


def test_a_tree_joins_slices():
    """A counter for each 16 slices, and for each 16 of these."""
    for slices, counters in ((1, 1), (2, 1), (16, 1), (17, 3), (32, 3), (256, 17)):
        assert ProductPlan(product_plan(32, 32, 32).tiling, slices, 64).counters == counters


def test_plans_of_products_by_warpgroups():
    """What takes tiles of 128 otherwise and a stage of terms; of 256 columns where these give enough blocks."""
    assert chosen(1024, 4096, 64, "wgmma") == ("product_wgmma", 128, 256, 1)
    assert chosen(1024, 4096, 63, "wgmma") == chosen(1024, 4096, 63, "half") == ("product_half", 64, 64, 1)
    assert chosen(1024, 1024, 64, "wgmma") == ("product_wgmma", 128, 128, 1)
    assert chosen(128 * 64, 128, 64, "wgmma") == ("product_wgmma", 128, 128, 1)
    assert chosen(128 * 64, 129, 64, "wgmma") == ("product_wgmma", 128, 256, 1)
    assert chosen(1024, 896, 64, "wgmma") == chosen(1024, 896, 64, "half") == ("product_half", 64, 64, 1)
    # 64 blocks leave half of the processors without one: two slices of 512 terms and more.
    assert [chosen(1024, 1024, K, "wgmma")[3] for K in (1023, 1024, 8192)] == [1, 2, 2]
    assert chosen(1024, 1025, 8192, "wgmma")[3] == 1
    for K in (1024, 1025, 1100, 5000):
        plan = product_plan(1024, 1024, K, "wgmma")
        assert plan.depth % 64 == 0
        assert plan.slices * plan.depth >= K > (plan.slices - 1) * plan.depth


def test_a_kernel_of_warpgroups_is_launched_with_the_memory_that_it_asks_for():
    """It has a launch of its own, whose threads no other function is written for."""
    program, _ = mlp(np.random.default_rng(0), 1024, 1024, 10, 1024, 1024, compute="bfloat16")
    composition = Composition(program, of_halves="wgmma")
    kernels = [kernel for stage in composition.stages for kernel in stage]
    warpgroup_kernels = [
        kernel for kernel in kernels if any("product_wgmma<" in "".join(function.body) for function in kernel.functions)
    ]
    assert warpgroup_kernels
    for kernel in warpgroup_kernels:
        assert {function.threads for function in kernel.functions} == {384}
        assert kernel.dynamic == 1024 + 4 * 256 * 128 + 80
    assert {kernel.threads for kernel in kernels} <= {128, 256, 384}
    text = composition.source()
    assert (
        text.count(f"static_assert(bytes == {warpgroup_kernels[0].dynamic}, ")
        == text.count("extern __shared__")
        == len(warpgroup_kernels)
    )
    by_name = {load.name: load for load in loads(composition)}
    assert {by_name[kernel.name].shared for kernel in warpgroup_kernels} == {warpgroup_kernels[0].dynamic}
    assert all(by_name[kernel.name].operations["half"] for kernel in warpgroup_kernels)


@pytest.mark.parametrize(
    ("capability", "architecture"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((10, 0), "sm_100"), ((12, 0), "sm_120")]
)
def test_architectures(capability, architecture):
    assert architecture_of(*capability) == architecture
