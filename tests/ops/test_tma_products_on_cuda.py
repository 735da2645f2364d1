"""Products by tensor maps, candidates for compute capability 9.0: `kernels/product_tma.cuh`."""

import ml_dtypes
import numpy as np
import pytest

from dptrain.backend.cuda import products, tma
from dptrain.errors import DeviceError
from tests.sample import sample

LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False), "tt": (True, True)}


@pytest.fixture(autouse=True)
def on_hopper(cuda_backend):
    """Skip where the device has no tensor maps."""
    if cuda_backend.of_halves != "wgmma":
        pytest.skip("the device is not of compute capability 9.0")


def multiplied(backend, candidate, a, b, transposed, dtype, processors, result="float32"):
    """Return a b by a candidate, from matrices that lie as `transposed` says, and rows of NaN behind the result."""
    from dptrain.backend.cuda.gpu.device import cuda

    (M, K), N = a.shape, b.shape[1]
    laid = [np.ascontiguousarray(x.T if turned else x) for x, turned in zip((a, b), transposed, strict=True)]
    places = [cuda.to_device(x.view(np.uint16)) for x in laid]
    of_result = np.dtype(ml_dtypes.bfloat16 if result == "bfloat16" else result)
    bits = np.dtype(f"uint{8 * of_result.itemsize}")
    c = cuda.to_device(np.full((M + 3, N), np.nan, of_result).view(bits))
    queue = tma.prepared(
        backend.gpu_record, tma.CANDIDATES[candidate], (M, N, K), transposed, dtype, processors, result
    )
    queue.launch(queue.maps(int(places[0]), int(places[1])), int(c), backend.stream)
    backend.stream.synchronize()
    values = cuda.from_device(c, (M + 3, N), bits).view(of_result)
    assert np.isnan(values[M:]).all()
    return values[:M]


def halves(rng, dtype, *shape):
    """Return numbers of half precision with all digits."""
    return rng.normal(size=shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)


# The candidate, M, N, K, blocks at most: whole tiles and parts of them, one stage and more than the ring has, two items
# of a cluster and more.
CASES = {
    "together_1": ("together, clusters of 1", 136, 264, 72, 1),
    "together_2": ("together, clusters of 2", 264, 264, 328, 2),
    "turns_1": ("in turns, clusters of 1", 136, 264, 400, 1),
    "turns_2": ("in turns, clusters of 2", 200, 520, 136, 2),
    "turns_4": ("in turns, clusters of 4", 264, 520, 200, 4),
    "two_blocks": ("together, clusters of 1", 128, 512, 320, 2),
    "two_clusters": ("together, clusters of 2", 120, 520, 64, 4),
    "one_stage": ("in turns, clusters of 1", 72, 776, 64, 1),
}
# In the others rows of one factor begin anywhere, which both kinds of rows show.
ODD = {"nn": (136, 261, 72), "nt": (136, 264, 71), "tn": (137, 264, 72), "tt": (137, 264, 72)}


@pytest.mark.parametrize("case", sample(CASES, 5))
@pytest.mark.parametrize("layout", sample(LAYOUTS, 2))
def test_products_by_tensor_maps(cuda_backend, case, layout):
    """Those of float64, in every layout."""
    candidate, M, N, K, processors = CASES[case]
    dtype = "bfloat16" if M % 16 else "float16"
    rng = np.random.default_rng(M + N + K)
    a, b = halves(rng, dtype, M, K), halves(rng, dtype, K, N)
    result = multiplied(cuda_backend, candidate, a, b, LAYOUTS[layout], dtype, processors)
    np.testing.assert_allclose(result, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("seed", sample(range(12), 2))
def test_random_products_by_tensor_maps(cuda_backend, seed):
    """Sizes, layouts, types, schedules and numbers of blocks by chance; the bits do not depend on the last two."""
    rng = np.random.default_rng(seed)
    layout, dtype = LAYOUTS[rng.choice(list(LAYOUTS))], str(rng.choice(["bfloat16", "float16"]))
    M, N, K = (8 * int(rng.integers(1, most)) for most in (45, 80, 60))
    a, b = halves(rng, dtype, M, K), halves(rng, dtype, K, N)
    names = rng.choice(list(tma.CANDIDATES), 2, replace=False)
    results = [multiplied(cuda_backend, name, a, b, layout, dtype, int(rng.integers(1, 9))) for name in names]
    np.testing.assert_allclose(results[0], a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=3e-4)
    np.testing.assert_array_equal(*results)
    rounded = multiplied(cuda_backend, names[0], a, b, layout, dtype, 2, result=dtype)
    np.testing.assert_array_equal(rounded, results[0].astype(rounded.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_rows_stay_with_the_kernel_of_programs(cuda_backend, layout):
    """The driver refuses a tensor map of rows that begin anywhere, and `suits` says so before."""
    turned = LAYOUTS[layout]
    assert tma.suits(4096, 4096, 4096, turned)
    widths = [(4100, 4104, 4104), (4104, 4100, 4104), (4104, 4104, 4100)]
    counted = (0 if turned[0] else 2, 2 if turned[1] else 1)  # of which a row of a and of b is as long
    for number, sizes in enumerate(widths):
        assert tma.suits(*sizes, turned) == (number not in counted)
    rng, (M, N, K) = np.random.default_rng(0), ODD[layout]
    a, b = halves(rng, "float16", M, K), halves(rng, "float16", K, N)
    with pytest.raises(DeviceError, match="refuses a tensor map"):
        multiplied(cuda_backend, "together, clusters of 1", a, b, turned, "float16", 1)


@pytest.mark.parametrize("candidate", sample(tma.CANDIDATES, 5, 3))
def test_as_many_blocks_as_the_gpu_holds(cuda_backend, candidate):
    """A kernel of clusters has no more of them than run at once, since each walks over tiles."""
    kernel, sizes = tma.CANDIDATES[candidate], (64 * 132 * 4, 256, 64)
    launched = tma.prepared(cuda_backend.gpu_record, kernel, sizes, (False, False), "bfloat16")
    processors = cuda_backend.gpu_record.device.multiprocessor_count
    assert launched.grid[0] % kernel.cluster == 0
    assert processors * 0.85 < launched.grid[0] <= processors


def test_what_candidates_could_replace():
    """Both sides of each threshold: 256 columns, one slice, at least a stage of terms."""
    plans = {sizes: products.product_plan(*sizes, "wgmma") for sizes in [(1024, 4096, 64), (1024, 4096, 56)]}
    assert [plan.tiling.kernel for plan in plans.values()] == ["product_wgmma", "product_half"]
    assert [tma.suits(*sizes) for sizes in plans] == [True, False]
    assert products.product_plan(1024, 1024, 4096, "wgmma").slices > 1
    assert not tma.suits(1024, 1024, 4096)
    columns = {N: products.product_plan(64 * 128, N, 64, "wgmma").tiling.columns for N in (128, 136)}
    assert columns == {128: 128, 136: 256}
    assert [tma.suits(64 * 128, N, 64) for N in columns] == [False, True]


def test_blocks_of_a_launch():
    """Whole clusters, no more than have something to do, no more than there are processors."""
    together, turns = (tma.CANDIDATES[f"{name}, clusters of {n}"] for name, n in (("together", 2), ("in turns", 4)))
    assert [together.blocks(M, 512, 132) for M in (128, 256, 257, 128 * 200)] == [4, 4, 8, 132]
    assert [turns.blocks(M, 256, 130) for M in (64, 256, 257, 64 * 4 * 32, 64 * 4 * 33)] == [4, 4, 8, 128, 128]
    assert turns.blocks(64, 256, 1) == 4
