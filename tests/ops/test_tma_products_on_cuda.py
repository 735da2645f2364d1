"""Products by tensor maps, on compute capability 9.0: `kernels/product_tma.cuh`."""

import ml_dtypes
import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda import products, tma
from dptrain.errors import DeviceError
from dptrain.program.program import trace
from tests.ops.test_half_products_on_cuda import product, run
from tests.ops.test_wgmma_products_on_cuda import trained_alone, trained_in_a_pack
from tests.sample import sample

LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False), "tt": (True, True)}


@pytest.fixture(autouse=True)
def by_tensor_maps(cuda_backend, monkeypatch):
    """Let products of more than 64 rows and 128 columns qualify; a test sets the schedule."""
    if cuda_backend.of_halves != "wgmma":
        pytest.skip("the device is not of compute capability 9.0")
    monkeypatch.setattr(products, "_WANTED_BLOCKS", 1)
    products.product_plan.cache_clear()
    yield
    products.product_plan.cache_clear()


def set_schedule(monkeypatch, name, processors=None):
    """Set the schedule of programs, and how many blocks the GPU holds."""
    schedule = None if name is None else tma.SCHEDULES[name]
    monkeypatch.setattr(tma, "SCHEDULE", schedule)
    if processors is not None and schedule is not None:
        most = max(1, processors // schedule.cluster) * schedule.cluster
        monkeypatch.setattr("dptrain.backend.cuda.executable.resident_blocks", lambda image, kernel, schedule: most)


def kernels_of(executable):
    """Return which kernels the products of a program call."""
    return [name for name in ("product_tma", "product_wgmma", "product_half") if f" {name}<" in executable.source]


def multiplied(backend, a, b, transposed, dtype, result="float32", kernel="product_tma"):
    """Return a b, from matrices stored as `transposed` says."""
    stored = [np.ascontiguousarray(x.T if flag else x) for x, flag in zip((a, b), transposed, strict=True)]

    def step(a, b):
        factors = [ops.cast(x, dtype) for x in (a, b)]  # which are stored as the matrices are
        factors = [ops.transpose(x) if flag else x for x, flag in zip(factors, transposed, strict=True)]
        return {"c": ops.cast(product(*factors, dtype), result)}

    values = {name: x.astype(np.float32) for name, x in zip("ab", stored, strict=True)}
    executable = run(backend, trace(step, {name: (x.shape, "float32") for name, x in values.items()}), values)
    assert kernels_of(executable) == [kernel]
    return executable.outputs["c"]


def halves(rng, dtype, *shape):
    """Return numbers of half precision with all digits."""
    return rng.normal(size=shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)


# The schedule, M, N, K, blocks at most: whole tiles and parts of them, one stage and more than the ring has, two items
# of a cluster and more.
CASES = {
    "cooperative_1": ("cooperative, clusters of 1", 136, 264, 72, 1),
    "cooperative_2": ("cooperative, clusters of 2", 264, 264, 328, 2),
    "pingpong_1": ("pingpong, clusters of 1", 136, 264, 400, 1),
    "pingpong_2": ("pingpong, clusters of 2", 200, 520, 136, 2),
    "pingpong_4": ("pingpong, clusters of 4", 264, 520, 200, 4),
    "two_blocks": ("cooperative, clusters of 1", 128, 512, 320, 2),
    "two_clusters": ("cooperative, clusters of 2", 120, 520, 64, 4),
    "one_stage": ("pingpong, clusters of 1", 72, 776, 64, 1),
}


@pytest.mark.parametrize("case", sample(CASES, 5))
@pytest.mark.parametrize("layout", sample(LAYOUTS, 2))
def test_products_by_tensor_maps(cuda_backend, case, layout, monkeypatch):
    """Those of float64, in every layout."""
    name, M, N, K, processors = CASES[case]
    set_schedule(monkeypatch, name, processors)
    dtype = "bfloat16" if M % 16 else "float16"
    rng = np.random.default_rng(M + N + K)
    a, b = halves(rng, dtype, M, K), halves(rng, dtype, K, N)
    result = multiplied(cuda_backend, a, b, LAYOUTS[layout], dtype)
    np.testing.assert_allclose(result, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("seed", sample(range(12), 2))
def test_random_products_by_tensor_maps(cuda_backend, seed, monkeypatch):
    """Sizes, layouts, types, schedules and numbers of blocks by chance; the bits are those of `product_wgmma`."""
    rng = np.random.default_rng(seed)
    layout, dtype = LAYOUTS[rng.choice(list(LAYOUTS))], str(rng.choice(["bfloat16", "float16"]))
    M, N, K = (8 * int(rng.integers(least, most)) for least, most in ((9, 45), (17, 80), (8, 60)))
    a, b = halves(rng, dtype, M, K), halves(rng, dtype, K, N)
    set_schedule(monkeypatch, None)
    by_warpgroups = multiplied(cuda_backend, a, b, layout, dtype, kernel="product_wgmma")
    np.testing.assert_allclose(by_warpgroups, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=3e-4)
    for name in rng.choice(list(tma.SCHEDULES), 2, replace=False):
        set_schedule(monkeypatch, str(name), int(rng.integers(1, 9)))
        np.testing.assert_array_equal(multiplied(cuda_backend, a, b, layout, dtype), by_warpgroups)
        rounded = multiplied(cuda_backend, a, b, layout, dtype, result=dtype)
        np.testing.assert_array_equal(rounded, by_warpgroups.astype(rounded.dtype))


def test_an_epilogue_two_products_of_a_launch_and_replays(cuda_backend, monkeypatch):
    """Bias and activation in the product's kernel; two products share a launch, and a graph repeats it."""
    set_schedule(monkeypatch, "cooperative, clusters of 2", 4)
    rng = np.random.default_rng(0)
    values = {
        "a": rng.integers(-9, 9, (264, 136)),
        "b": rng.integers(-9, 9, (136, 264)),
        "c": rng.integers(0, 9, (264,)),
    }
    values = {name: value.astype(np.float32) for name, value in values.items()}

    def step(a, b, c):
        a, b = ops.cast(a, "bfloat16"), ops.cast(b, "bfloat16")
        return {"relu": ops.relu(product(a, b, "bfloat16") + c), "square": product(a, ops.transpose(a), "bfloat16") * 2}

    program = trace(step, {name: (value.shape, "float32") for name, value in values.items()})
    executable = run(cuda_backend, program, values)
    assert executable.source.count("product_tma<") == 2
    assert executable.launches == 2, "casts, then both products"
    a, b, c = values.values()
    for _ in range(3):
        np.testing.assert_array_equal(executable.outputs["relu"], np.maximum(a @ b + c, 0))
        np.testing.assert_array_equal(executable.outputs["square"], 2 * a @ a.T)
        executable.run()


# Rows of one factor that begin anywhere, in each layout; more than one matrix; factors that move from step to step.
ODD = {"nn": (136, 261, 72), "nt": (136, 264, 71), "tn": (137, 264, 72), "tt": (137, 264, 72)}


@pytest.mark.parametrize("layout", sample(LAYOUTS, 1))
def test_other_rows_stay_with_warpgroups(cuda_backend, layout, monkeypatch):
    set_schedule(monkeypatch, "pingpong, clusters of 2")
    transposed = LAYOUTS[layout]
    counted = (0 if transposed[0] else 2, 2 if transposed[1] else 1)  # of which a row of a and of b is as long
    for number, sizes in enumerate([(4100, 4104, 4104), (4104, 4100, 4104), (4104, 4104, 4100)]):
        schedule = tma.schedule_of(products.product_plan(*sizes, "wgmma"), sizes, transposed)
        assert (schedule is None) == (number in counted)
    rng, (M, N, K) = np.random.default_rng(0), ODD[layout]
    a, b = halves(rng, "float16", M, K), halves(rng, "float16", K, N)
    result = multiplied(cuda_backend, a, b, transposed, "float16", kernel="product_wgmma")
    np.testing.assert_allclose(result, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=2e-4)
    with pytest.raises(DeviceError, match="refuses a tensor map"):
        tma._encoded(0x1008, 64, 64, 64, "float16")


def test_batches_and_factors_that_move_stay_with_warpgroups(cuda_backend, monkeypatch):
    """A batch of matrices; in a loop the slices move, and the weights, which all steps share, do not."""
    set_schedule(monkeypatch, "cooperative, clusters of 1", 2)
    rng = np.random.default_rng(0)
    batch = [rng.integers(-9, 9, shape).astype(np.float32) for shape in ((2, 136, 72), (2, 72, 264))]
    specs = {name: (value.shape, "float32") for name, value in zip("ab", batch, strict=True)}
    program = trace(lambda a, b: {"c": product(a, b, "bfloat16")}, specs)
    executable = run(cuda_backend, program, dict(zip("ab", batch, strict=True)))
    assert kernels_of(executable) == ["product_wgmma"]
    np.testing.assert_array_equal(executable.outputs["c"], batch[0] @ batch[1])

    def steps(xs, w):
        def step(total, x):
            # The carry and the slices move; what a step computes lies at one place, and w is there once.
            still, moving = product(w, ops.minimum(total, x), "bfloat16"), product(w, x, "bfloat16")
            return ops.mod(still + moving, 16), moving

        total, stacked = ops.scan(step, ops.ones((136, 264)), ops.cast(xs, "bfloat16"))
        return {"total": total, "stacked": stacked}

    values = {"xs": rng.integers(0, 9, (3, 136, 264)), "w": rng.integers(0, 9, (136, 136))}
    values = {name: value.astype(np.float32) for name, value in values.items()}
    program = trace(steps, {name: (value.shape, "float32") for name, value in values.items()})
    executable = run(cuda_backend, program, values)
    assert kernels_of(executable) == ["product_tma", "product_wgmma"]
    total, expected = np.ones((136, 264)), []
    for x in values["xs"]:
        expected.append(values["w"] @ x)
        total = np.mod(values["w"] @ np.minimum(total, x) + expected[-1], 16)
    np.testing.assert_array_equal(executable.outputs["stacked"], expected)
    np.testing.assert_array_equal(executable.outputs["total"], total)


@pytest.mark.parametrize("name", sample(tma.SCHEDULES, 5, 3))
def test_as_many_blocks_as_the_gpu_holds(cuda_backend, name, monkeypatch):
    """A kernel of clusters has no more of them than run at once, since each walks over tiles."""
    set_schedule(monkeypatch, name)
    held = []

    def resident_blocks(*arguments):
        held.append(tma.resident_blocks(*arguments))
        return held[-1]

    monkeypatch.setattr("dptrain.backend.cuda.executable.resident_blocks", resident_blocks)
    rng = np.random.default_rng(0)
    a, b = halves(rng, "bfloat16", 72, 64), halves(rng, "bfloat16", 64, 136)
    multiplied(cuda_backend, a, b, (False, False), "bfloat16")
    processors, (blocks,) = cuda_backend.gpu_record.device.multiprocessor_count, held
    assert blocks % tma.SCHEDULES[name].cluster == 0
    assert processors * 0.85 < blocks <= processors


def test_thresholds(monkeypatch):
    """Both sides of each: 256 columns, one slice, at least a stage of terms, and a schedule at all."""
    monkeypatch.undo()
    products.product_plan.cache_clear()

    def is_by_tensor_maps(*sizes):
        return tma.schedule_of(products.product_plan(*sizes, "wgmma"), sizes, (False, False)) is not None

    assert not is_by_tensor_maps(1024, 4096, 64), "no program uses what no GPU has run"
    set_schedule(monkeypatch, "cooperative, clusters of 2")
    assert [is_by_tensor_maps(1024, 4096, K) for K in (64, 56)] == [True, False]
    assert products.product_plan(1024, 1024, 4096, "wgmma").slices > 1
    assert not is_by_tensor_maps(1024, 1024, 4096)
    columns = {N: products.product_plan(64 * 128, N, 64, "wgmma").tiling.columns for N in (128, 136)}
    assert columns == {128: 128, 136: 256}
    assert [is_by_tensor_maps(64 * 128, N, 64) for N in columns] == [False, True]


def test_blocks_with_something_to_do():
    """Whole clusters, each with tiles of the same columns."""
    cooperative, pingpong = tma.SCHEDULES["cooperative, clusters of 2"], tma.SCHEDULES["pingpong, clusters of 4"]
    assert [cooperative.blocks(M, 512) for M in (128, 256, 257)] == [4, 4, 8]
    assert [pingpong.blocks(M, N) for M, N in ((64, 256), (256, 257), (257, 256))] == [4, 8, 8]


@pytest.mark.long
def test_a_step_of_mixed_precision(cuda_backend, another, monkeypatch):
    """That of NumPy but for rounding; the bits are those by warpgroups, and in a pack those of runs alone."""
    results = {}
    for name in (None, "cooperative, clusters of 2", "pingpong, clusters of 1"):
        set_schedule(monkeypatch, name, 3)
        runs = [trained_alone(cuda_backend, seed, 264) for seed in (1, 2)]
        assert all((" product_tma<" in source) == (name is not None) for _, source in runs)
        results[name] = [bits for bits, _ in runs]
    alone = results[None]
    assert all(result == alone for result in results.values())
    together, source = trained_in_a_pack(another, (1, 2), 264)
    assert " product_tma<" in source
    assert together == alone
