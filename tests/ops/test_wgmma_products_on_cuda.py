"""Products of half precision by warpgroups, on compute capability 9.0: `kernels/product_wgmma.cuh`."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda import products
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from tests.ops.test_convolutions_on_cuda import check_halves
from tests.ops.test_half_products_on_cuda import calls, product, run, whole
from tests.ops.test_programs_on_cuda import mlp
from tests.sample import sample


@pytest.fixture(autouse=True)
def by_warpgroups(cuda_backend, monkeypatch):
    """Let products of more than 64 rows and columns be computed by warpgroups, as few blocks as these are."""
    if cuda_backend.of_halves != "wgmma":
        pytest.skip("the device is not of compute capability 9.0")
    monkeypatch.setattr(products, "_WANTED_BLOCKS", 1)
    products.product_plan.cache_clear()
    yield
    products.product_plan.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    sample([("bfloat16", (72, 136, 200)), ("float16", (129, 65, 101))], 2, 1),
    ids=["wide", "odd"],
)
def test_all_layouts_by_warpgroups(cuda_backend, dtype, sizes):
    """Rows begin at multiples of 16 bytes or anywhere; a part of a tile or of a stage, or more than one."""
    m, k, n = sizes

    def step(a, b, c):
        a, b = ops.cast(a, dtype), ops.cast(b, dtype)
        left, right = ops.transpose(a), ops.transpose(b)
        return {
            "neither": ops.relu(product(a, b, dtype) + c),
            "both": product(right, left, dtype),
            "the first": product(left, a * 2, dtype),
            "the second": product(a, ops.transpose(a * 2), dtype),
            "rounded": a @ b,
            "of each": product(ops.stack([a, a * 2]), ops.stack([b * 3, b]), dtype),
        }

    shapes = {"a": (m, k), "b": (k, n), "c": (n,)}
    rng = np.random.default_rng(0)
    values = {name: whole(rng, *shape) for name, shape in shapes.items()}
    executable = run(cuda_backend, trace(step, {name: (shape, "float32") for name, shape in shapes.items()}), values)
    a, b, c = values.values()
    expected = {
        "neither": np.maximum(a @ b + c, 0),
        "both": b.T @ a.T,
        "the first": a.T @ a * 2,
        "the second": a @ a.T * 2,
        "rounded": (a @ b).astype(dtype),
        "of each": np.stack([a @ b * 3, a @ b * 2]),
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(executable.outputs[name], value, err_msg=f"transposed: {name}")
    launched = calls(executable.source)
    assert [kernel for kernel, _ in launched] == ["product_wgmma"] * len(expected)
    assert {rest.split(", ")[2] for _, rest in launched} == {"128", "256"}
    assert len({rest.split(", ", 3)[3] for _, rest in launched}) == 4


def test_slices_by_warpgroups(cuda_backend):
    """Each of nine stages, more than the ring has; four panels of columns."""
    rng = np.random.default_rng(0)
    a, b = whole(rng, 72, 1100), whole(rng, 1100, 200)
    program = trace(
        lambda a, b: {"y": product(a, b, "bfloat16")}, {"a": (a.shape, "float32"), "b": (b.shape, "float32")}
    )
    executable = run(cuda_backend, program, {"a": a, "b": b})
    assert [kernel for kernel, _ in calls(executable.source)] == ["product_wgmma"]
    assert products.product_plan(72, 200, 1100, "wgmma").slices == 2
    for _ in range(2):  # counters are zero again
        np.testing.assert_array_equal(executable.outputs["y"], a @ b)
        executable.run()


# As `SHAPES` of convolutions, with channels that are copied 16 bytes at a time.
CONVOLUTIONS = {
    "sliced": ((6, 5), (2, 2, 72, 136), (1, 1), (1, 1), (1, 0), (6, 5), 36),
    "strides with gaps": ((9, 11), (3, 4, 72, 72), (2, 3), (2, 2), (1, 3), (4, 4), 5),
}


@pytest.mark.parametrize("name", sample(CONVOLUTIONS, 2))
def test_convolutions_by_warpgroups(cuda_backend, name):
    """Images, places and kernels are gathered by wide copies; the gradient of a kernel is sliced."""
    *shapes, rows = CONVOLUTIONS[name]
    launched = calls(check_halves(cuda_backend, {name: shapes}, "bfloat16", rows))
    assert {kernel for kernel, _ in launched} == {"product_wgmma"}
    assert {rest.split(", ", 3)[3] for _, rest in launched} == {"false, false", "true, false", "false, true"}


@pytest.mark.long
def test_on_both_sides_of_every_threshold(cuda_backend):
    """Of numbers with all digits: rows are M, N and K in turn."""

    def step(x, w):
        x, turned = ops.cast(x, "bfloat16"), ops.transpose(x)
        return {
            "M": ops.cast(product(x, w, "bfloat16"), "float32"),
            "N": product(ops.transpose(w), turned, "bfloat16"),
            "K": product(turned, x * 3, "bfloat16"),
        }

    rows = Dim.rows(1024)
    program = trace(step, {"x": ((rows, 72), "float32"), "w": ((72, 88), "float32")})
    rng, launched = np.random.default_rng(0), []
    for count in (63, 64, 65, 128, 129, 1024):
        values = {"x": (count, 72), "w": (72, 88)}
        values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in values.items()}
        executable = run(cuda_backend, program, values, rows=count)
        kernels = (f"{kernel} {rest.split(', ')[2]}" for kernel, rest in calls(executable.source))
        launched.append(sorted(kernel.removeprefix("product_") for kernel in kernels))
        x, w = (value.astype("bfloat16").astype(np.float64) for value in values.values())
        tripled = (np.float32(3) * x.astype(np.float32)).astype("bfloat16").astype(np.float64)
        expected = {"M": x @ w, "N": w.T @ x.T, "K": x.T @ tripled}
        for name, value in expected.items():
            np.testing.assert_allclose(
                executable.outputs[name], value, rtol=1e-5, atol=1e-4, err_msg=f"{name}, {count}"
            )
    none, narrow, wide = ["half 64"] * 3, ["wgmma 128"] * 3, ["wgmma 128", "wgmma 128", "wgmma 256"]
    assert launched == [none, [*none[1:], narrow[0]], narrow, narrow, wide, wide]


# Of a batch; and the starts of a run's steps in its row numbers.
ROWS, STARTS = 136, (0, 136, 272)


def half_network(seed, width):
    """Return a training step of mixed precision, whose layers fill tiles, and its data."""
    rng = np.random.default_rng(seed)
    program, data = mlp(rng, 144, width, 136, ROWS, 160, compute="bfloat16")
    return program, data | {"rows": rng.integers(0, 160, len(STARTS) * ROWS)}


def bits(program, executable):
    state = [variable.numpy().tobytes() for variable in program.state]
    return [*state, *(value.tobytes() for value in executable.outputs.values())]


def trained_alone(backend, seed, width):
    """Return the bits of a run, and its source, after a step beside NumPy's and two more."""
    program, data = half_network(seed, width)
    executable = backend.executable(program, data)
    state = {variable: variable.numpy() for variable in program.state}
    expected, new = evaluate(program, data | {"rows": data["rows"][:ROWS]}, state)
    executable.run(STARTS[:1])
    np.testing.assert_allclose(executable.outputs["loss"], expected["loss"], rtol=1e-2)
    for variable, value in new.items():
        if variable.name.startswith("w"):
            np.testing.assert_allclose(variable.numpy(), value, atol=0.03, err_msg=variable.name)
    executable.run(STARTS[1:])
    result = bits(program, executable), executable.source
    executable.close()
    return result


def trained_in_a_pack(another, seeds, width):
    """Return the bits of each run, and the source."""
    together = []
    for seed in seeds:
        program, data = half_network(seed, width)
        together.append((program, another().executable(program, data)))
    for _, executable in together:
        executable.run(STARTS)
    return [bits(*pair) for pair in together], together[0][1].source


@pytest.mark.long
def test_a_step_of_mixed_precision(cuda_backend, another):
    """That of NumPy but for rounding, and in a pack the bits of runs alone."""
    alone = [trained_alone(cuda_backend, seed, 200) for seed in (1, 2)]
    assert all({kernel for kernel, _ in calls(source)} == {"product_wgmma"} for _, source in alone)
    assert trained_in_a_pack(another, (1, 2), 200)[0] == [bits_alone for bits_alone, _ in alone]
