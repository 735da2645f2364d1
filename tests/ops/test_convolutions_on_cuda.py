"""Convolutions and both their gradients as products of matrices, against NumPy in float64."""

import re

import numpy as np
import pytest

from dptrain import ops
from dptrain.ops.nn.convolution import conv2d, conv2d_input, conv2d_kernel
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.passes import PRECISIONS
from dptrain.program.program import ROWS, trace
from dptrain.program.tensor import Variable
from tests.programs.case import Case
from tests.programs.check import wrong_on_cuda
from tests.sample import sample
from tests.tolerances import assert_near, rounded

# Image (H, W), kernel (R, S, I, O), strides, dilation, zeros before rows and columns, size of what comes out.
SHAPES = {
    "pointwise": ((5, 4), (1, 1, 1, 1), (1, 1), (1, 1), (0, 0), (5, 4)),
    "strides beyond the kernel": ((5, 7), (1, 1, 3, 8), (2, 3), (1, 1), (0, 0), (3, 3)),
    "same": ((6, 5), (3, 3, 4, 33), (1, 1), (1, 1), (1, 1), (6, 5)),
    "valid": ((7, 6), (3, 3, 8, 8), (1, 1), (1, 1), (0, 0), (5, 4)),
    "uneven": ((6, 7), (2, 4, 5, 7), (1, 1), (1, 1), (0, 2), (6, 7)),
    "strides": ((9, 8), (3, 3, 4, 8), (2, 2), (1, 1), (1, 0), (5, 4)),
    "strides along one axis": ((9, 8), (3, 2, 3, 7), (3, 1), (1, 1), (0, 0), (3, 7)),
    "strides of three": ((10, 11), (5, 5, 5, 1), (3, 2), (1, 1), (2, 2), (4, 6)),
    "gaps along the height": ((8, 5), (3, 2, 4, 7), (1, 1), (2, 1), (0, 0), (4, 4)),
    "gaps along the width": ((5, 9), (2, 3, 8, 33), (1, 1), (1, 3), (0, 3), (5, 9)),
    "strides with gaps": ((9, 11), (3, 4, 4, 8), (2, 3), (2, 2), (1, 3), (4, 4)),
    "large": ((9, 9), (5, 5, 3, 8), (1, 1), (1, 1), (2, 2), (9, 9)),
    "long sums": ((4, 5), (3, 3, 64, 132), (2, 2), (1, 1), (1, 1), (2, 3)),
    "not to the edge": ((8, 9), (2, 2, 4, 4), (2, 2), (1, 1), (0, 0), (3, 3)),
}
# With these, of 64 blocks each: tiles of 128 and of 64; with a row less none.
TILED = {
    "wide": ((16, 16), (1, 2, 36, 65), (1, 1), (1, 1), (0, 0), (16, 16)),
    "half as wide": ((16, 32), (2, 1, 33, 34), (2, 2), (1, 1), (0, 0), (8, 16)),
}


def program_of(shapes, rows, dtype="float32"):
    """Return a program of convolutions and their gradients, of inputs of their own, and the shapes of these.

    The inputs are rounded to `dtype`.
    """
    specs = {}
    for name, (image, kernel, _, _, _, size) in shapes.items():
        specs[f"{name} x"] = ((Dim.rows(rows), *image, kernel[2]), "float32")
        specs[f"{name} kernel"] = (kernel, "float32")
        specs[f"{name} dy"] = ((Dim.rows(rows), *size, kernel[3]), "float32")

    def step(*tensors):
        values = [ops.cast(ops.cast(tensor, dtype), "float32") for tensor in tensors]
        inputs, outputs = dict(zip(specs, values, strict=True)), {}
        for name, (image, kernel, strides, dilation, before, size) in shapes.items():
            options = {"strides": strides, "dilation": dilation, "before": before}
            x, filters, dy = (inputs[f"{name} {part}"] for part in ("x", "kernel", "dy"))
            y = outputs[f"{name}: y"] = conv2d(x, filters, **options, size=size)
            dx = outputs[f"{name}: dx"] = conv2d_input(dy, filters, **options, size=image)
            outputs[f"{name}: dkernel"] = conv2d_kernel(x, dy, **options, size=kernel[:2])
            outputs[f"{name}: sums of y"] = ops.sum(y, (0, 1, 2))
            outputs[f"{name}: sums of dx"] = ops.sum(ops.relu(dx), (0, 1, 2))
        return outputs

    return trace(step, specs), specs


def check(cuda_backend, shapes, traced, rows):
    """Compare what so many rows give with NumPy's float64; return the kernels' text and the outputs."""
    rng = np.random.default_rng(rows)
    program, specs = program_of(shapes, traced)
    local = {name: tuple(rows if isinstance(n, Dim) else n for n in shape) for name, (shape, _) in specs.items()}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in local.items()}
    executable = cuda_backend.executable(program, values, rows=rows)
    executable.run()
    exact = {name: rounded(value, cuda_backend.precision) for name, value in values.items()}
    expected, _ = evaluate(program, exact, rows=rows)
    sizes, _ = evaluate(program, {name: np.abs(value) for name, value in exact.items()}, rows=rows)
    for name, value in expected.items():
        assert executable.outputs[name].shape == value.shape
        # Sums of terms that cancel are compared by the terms' size.
        scale = float(sizes[name].max(initial=1)) * 2
        try:
            assert_near(executable.outputs[name], value, cuda_backend.precision, scale)
        except AssertionError as error:
            raise AssertionError(f"{name} of {rows} rows: {error}") from None
    return executable.source, {name: executable.outputs[name].copy() for name in expected}


@pytest.fixture(params=sample(PRECISIONS, 2))
def in_precision(request, cuda_backend, monkeypatch):
    """The CUDA backend, set to a precision of products."""
    monkeypatch.setattr(cuda_backend, "precision", request.param)
    return cuda_backend


@pytest.mark.long
def test_convolutions_and_their_gradients(in_precision):
    texts = {check(in_precision, SHAPES, 13, rows)[0] for rows in (13, 1, 0)}
    assert len(texts) == 1, "one text for any number of rows"
    assert "windows.cuh" not in texts.pop(), "no thread goes over a window by itself"


@pytest.mark.parametrize(("rows", "tiles"), sample([(32, {32, 64, 128}), (31, {32, 64})], 2))
def test_convolutions_of_every_tile(in_precision, rows, tiles):
    text, _ = check(in_precision, TILED, rows, rows)
    assert {int(tile) for tile in re.findall(r"product(?:_tf32)?<(\d+)", text)} == tiles


@pytest.mark.parametrize(
    "rows", [0, 1, 32, 33, 8 * 32 + 1, 32 * 32, 32 * 32 + 1, pytest.param(32 * 32 * 32 + 1, marks=pytest.mark.long)]
)
def test_sums_of_tiles_in_a_tree(cuda_backend, rows):
    """Tiles of 32 rows, of which a node of the tree joins 32; whole numbers, of which float64 has all sums exactly."""
    rng = np.random.default_rng(rows)
    options = {"strides": (1, 1), "dilation": (1, 1), "before": (0, 0), "size": (1, 32)}

    def step(x, kernel):
        y = conv2d(x, kernel, **options)
        return {"sum": ops.sum(y, (0, 1, 2)), "squares": ops.sum(y * y, (0, 1, 2)), "y": y}

    program = trace(step, {"x": ((Dim.rows(4), 1, 32, 2), "float32"), "kernel": ((1, 1, 2, 5), "float32")})
    values = {"x": rng.integers(-2, 3, (rows, 1, 32, 2)), "kernel": rng.integers(-2, 3, (1, 1, 2, 5))}
    values = {name: value.astype(np.float32) for name, value in values.items()}
    executable = cuda_backend.executable(program, values, rows=rows)
    assert "over_tiles(" in executable.source
    executable.run()
    for name, value in evaluate(program, values, rows=rows)[0].items():
        np.testing.assert_array_equal(executable.outputs[name], value, err_msg=name)


# Image, kernel, strides, dilation, zeros before, size of what comes out; some with sides of 1, where indices are 0.
OF_DOUBLES = {
    "a column": ((3, 1), (1, 3, 1, 2), (1, 1), (1, 1), (1, 1), (5, 1)),
    "a row": ((1, 3), (3, 1, 1, 2), (1, 1), (1, 1), (1, 2), (1, 6)),
    "strides": ((5, 4), (3, 2, 2, 1), (2, 3), (1, 1), (2, 1), (3, 2)),
    "strides beyond the kernel": ((6, 5), (1, 2, 1, 1), (3, 3), (1, 1), (1, 0), (3, 2)),
    "gaps": ((4, 6), (2, 2, 1, 3), (1, 1), (2, 3), (1, 3), (4, 6)),
    "pixels that no window covers": ((7, 2), (2, 2, 2, 1), (3, 1), (1, 2), (0, 1), (2, 2)),
}


@pytest.mark.parametrize("name", sample(OF_DOUBLES, 2))
def test_images_of_doubles(cuda_backend, name):
    """Element by element; `EMULATOR_SANITIZE` alone notices what is loaded where a window leaves the image."""
    image, kernel, strides, dilation, before, size = OF_DOUBLES[name]
    options = {"strides": strides, "dilation": dilation, "before": before}
    rng, shapes = np.random.default_rng(0), {"x": (3, *image, kernel[2]), "kernel": kernel, "dy": (3, *size, kernel[3])}

    def step(x, kernel, dy):
        return {
            "y": conv2d(x, kernel, **options, size=size),
            "dx": conv2d_input(dy, kernel, **options, size=image),
            "dkernel": conv2d_kernel(x, dy, **options, size=kernel.shape[:2]),
        }

    values = {name: rng.integers(-9, 10, shape).astype(np.float64) for name, shape in shapes.items()}
    program = trace(step, {name: (shape, "float64") for name, shape in shapes.items()})
    executable = cuda_backend.executable(program, values)
    executable.run()
    for name, value in evaluate(program, values)[0].items():
        np.testing.assert_array_equal(executable.outputs[name], value, err_msg=name)


def test_rows_of_the_batch_as_channels(cuda_backend):
    """Of which the text of a program does not know the number."""
    options = {"strides": (1, 2), "dilation": (1, 1), "before": (0, 1)}

    def step(x, narrow):
        images = ops.transpose(x, (1, 2, 3, 0))
        kernel = ops.ones((2, 3, x.shape[0], 3)) * 0.5
        y = conv2d(images, kernel, **options, size=(2, 3))
        many_channels = conv2d(narrow, ops.ones((2, 3, 3, x.shape[0])), **options, size=(2, 3))
        return {
            "y": y,
            "dx": conv2d_input(y, kernel, **options, size=(3, 6)),
            "dkernel": conv2d_kernel(images, y, **options, size=(2, 3)),
            "many": many_channels,
            "d many": conv2d_input(many_channels, ops.ones((2, 3, 3, x.shape[0])), **options, size=(3, 6)),
        }

    rng = np.random.default_rng(1)
    program = trace(step, {"x": ((Dim.rows(8), 2, 3, 6), "float32"), "narrow": ((2, 3, 6, 3), "float32")})
    for rows in (8, 5, 1, 0):
        values = {"x": rng.integers(-4, 5, (rows, 2, 3, 6)), "narrow": rng.integers(-4, 5, (2, 3, 6, 3))}
        values = {name: value.astype(np.float32) for name, value in values.items()}
        expected, _ = evaluate(program, values, rows=rows)
        executable = cuda_backend.executable(program, values, rows=rows)
        executable.run()
        for name, value in expected.items():
            np.testing.assert_array_equal(executable.outputs[name], value, err_msg=f"{name} of {rows}")


@pytest.mark.long
@pytest.mark.parametrize("shards", sample([(3, 2), (2, 0, 3)], 2, 1, single=True), ids=str)
def test_ranks_and_packs(cuda_backend, another, shards):
    case = Case(
        lengths={"n": 5},
        leaves={
            "x0": "input n 7 6 3 float32 normal",
            "w1": "variable 3 2 3 5 float32 normal",
            "w2": "variable 5 float32 normal",
            "w3": "variable 2 3 5 4 float32 normal",
        },
        lines=(
            "c0 = ops.conv(x0, w1, padding='same')",
            "m0 = ops.mean(c0, (0, 1, 2))",
            "s0 = ops.mean(ops.square(c0 - m0), (0, 1, 2))",
            "t0 = ops.relu((c0 - m0) / ops.sqrt(s0 + 0.1) + w2)",
            "t1 = ops.conv(t0, w3, strides=(2, 3), padding='same')",
            "d1, d2, d3, d0 = gradients(ops.sum(t1 * t1) * 0.01, [w1, w2, w3, x0])",
        ),
        outputs=("t1", "d0"),
        updates={"w1": "w1 - 0.1 * d1", "w2": "w2 - 0.1 * d2", "w3": "w3 - 0.1 * d3"},
        steps=2,
        shards=shards,
        pack=True,
    )
    assert not wrong_on_cuda(case, cuda_backend, another)


HALVES = ["bfloat16", "float16"]
# Of as many channels as 16 bytes of halves hold, or twice as many, beside `SHAPES`, of which most have fewer.
WIDE = {
    "wide, same": ((6, 5), (3, 3, 8, 16), (1, 1), (1, 1), (1, 1), (6, 5)),
    "wide, strides with gaps": ((9, 11), (3, 4, 16, 8), (2, 3), (2, 2), (1, 3), (4, 4)),
    "wide images": ((7, 6), (2, 3, 8, 9), (2, 1), (1, 1), (0, 1), (3, 6)),
    "wide places": ((7, 6), (2, 3, 9, 8), (1, 2), (1, 1), (1, 0), (8, 2)),
}


def check_halves(backend, shapes, dtype, rows):
    """Compare what rounded numbers give with NumPy; return the kernels' text.

    Whole numbers, so that float32 has all sums exactly.
    """
    specs = program_of(shapes, rows)[1]
    rng = np.random.default_rng(rows)
    local = {name: tuple(rows if isinstance(n, Dim) else n for n in shape) for name, (shape, _) in specs.items()}
    values = {name: rng.integers(-4, 5, shape).astype(np.float32) for name, shape in local.items()}
    program = program_of(shapes, 13, dtype)[0]
    expected, _ = evaluate(program, values, rows=rows)
    executable = backend.executable(program, values, rows=rows)
    executable.run()
    for name, value in expected.items():
        np.testing.assert_array_equal(executable.outputs[name], value, err_msg=f"{name} of {rows} rows")
    return executable.source


@pytest.mark.parametrize(
    ("dtype", "shapes"), sample([("float16", WIDE), ("bfloat16", SHAPES | WIDE)], 2), ids=["float16", "bfloat16"]
)
def test_halves_on_tensor_cores(cuda_backend, dtype, shapes):
    (text,) = {check_halves(cuda_backend, shapes, dtype, rows) for rows in (13, 1, 0)}
    assert text.count("product_half<dp_") == 3 * len(shapes)
    assert not any(f"{other}<" in text for other in ("product", "product_tf32"))


@pytest.mark.parametrize(
    ("rows", "of_halves", "tiles"),
    sample([(32, "wgmma", {32, 64, 128}), (31, "wgmma", {32, 64}), (32, "half", {32, 64, 128})], 3),
)
def test_halves_of_every_tile(cuda_backend, monkeypatch, rows, of_halves, tiles):
    if of_halves == "wgmma" != cuda_backend.of_halves:
        pytest.skip("the device is not of compute capability 9.0")
    monkeypatch.setattr(cuda_backend, "of_halves", of_halves)
    text = check_halves(cuda_backend, TILED, "bfloat16", rows)
    assert {int(tile) for tile in re.findall(r"product_(?:half|wgmma)<\w+, (\d+)", text)} == tiles
    assert ("product_wgmma<" in text) == (of_halves == "wgmma" and 128 in tiles)


def test_factors_of_two_types_are_exact_on_tensor_cores(cuda_backend):
    """Whole numbers up to the greatest of which each type holds all."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2048, 2049, (3, 5, 6, 2)).astype(np.float32)
    kernel = rng.integers(-256, 257, (2, 3, 2, 4)).astype(np.float32)

    def step(x, kernel):
        factors = zip((x, kernel), ("float16", "bfloat16"), strict=True)
        return {"y": ops.conv(*(ops.cast(ops.cast(factor, dtype), "float32") for factor, dtype in factors), strides=2)}

    program = trace(step, {"x": ((Dim.rows(3), 5, 6, 2), "float32"), "kernel": (kernel.shape, "float32")})
    executable = cuda_backend.executable(program, {"x": x, "kernel": kernel})
    assert "product_tf32<" in executable.source
    executable.run()
    np.testing.assert_array_equal(executable.outputs["y"], evaluate(program, {"x": x, "kernel": kernel})[0]["y"])


def normalized(y):
    """Return what BatchNormalization makes of a convolution's results."""
    y = ops.cast(y, "float32")
    centered = y - ops.mean(y, (0, 1, 2))
    return centered / ops.sqrt(ops.mean(ops.square(centered), (0, 1, 2)) + 0.01)


def cnn(
    rng, image=(8, 7, 3), channels=(4, 8), classes=3, rows=6, stored=40, strides=1, compute="float32", normal=False
):
    """Return the program of a training step of two convolutions and a layer, on stored images, and its data.

    Layers compute in the type `compute`, weights are float32. With `normal`, convolutions are normalized over a batch.
    """
    shapes = {"first": (3, 3, image[-1], channels[0]), "first bias": (channels[0],)}
    shapes |= {"second": (3, 3, *channels), "second bias": (channels[1],)}
    shapes |= {"last": (channels[1], classes), "last bias": (classes,)}
    weights = [Variable(rng.normal(0, 0.3, shape).astype(np.float32), name) for name, shape in shapes.items()]
    speeds = [
        Variable(np.zeros(weight.shape, np.float32), f"{weight.name}/speed", trainable=False) for weight in weights
    ]

    def step(pixels, labels, rows):
        x, y = ops.cast(ops.take(pixels, rows, 0), "float32") * (1 / 255), ops.take(labels, rows)
        x, first, first_bias, second, second_bias, last, last_bias = (
            ops.cast(tensor, compute) for tensor in (x, *weights)
        )
        after = (lambda y: ops.cast(normalized(y), compute)) if normal else (lambda y: y)
        x = ops.relu(after(ops.conv(x, first, padding="same")) + first_bias)
        x = x if normal else ops.max_pool(x, 2)
        x = ops.mean(ops.relu(after(ops.conv(x, second, strides, padding="same")) + second_bias), (1, 2))
        scores = ops.cast(x @ last + last_bias, "float32")
        loss = ops.mean(-ops.sum(ops.one_hot(y, classes) * ops.log_softmax(scores), axis=-1))
        loss.backward()
        for weight, speed in zip(weights, speeds, strict=True):
            speed.assign(0.9 * speed - 0.1 * weight.value.grad)
            weight.assign(weight + speed.value)
        return {"loss": loss}

    specs = {
        "pixels": ((stored, *image), "uint8"),
        "labels": ((stored,), "int64"),
        ROWS: ((Dim.rows(rows),), "int64"),
    }
    data = {"pixels": rng.integers(0, 256, (stored, *image)).astype(np.uint8)}
    return trace(step, specs), data | {"labels": rng.integers(0, classes, stored)}


@pytest.mark.parametrize(("strides", "normal"), sample([(2, True), (2, False), (1, False)], 3))
def test_training_is_that_of_numpy(cuda_backend, strides, normal):
    rng = np.random.default_rng(0)
    program, data = cnn(rng, strides=strides, normal=normal)
    order = rng.permutation(40)[:36]
    executable = cuda_backend.executable(program, data | {ROWS: order})
    assert executable.launches <= (17 if normal else 12), "as many as with a thread for each element"
    # Means over the batch, and gradients of what is added to both.
    assert executable.source.count("over_tiles(") == (3 if normal else 0)
    state = {variable: variable.numpy() for variable in program.state}
    for start in range(0, 36, 6):
        expected, new = evaluate(program, data | {ROWS: order[start : start + 6]}, state)
        state |= new
    executable.run(list(range(0, 36, 6)))
    np.testing.assert_allclose(executable.outputs["loss"], expected["loss"], rtol=1e-5)
    for variable, value in state.items():
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-4, atol=1e-5, err_msg=variable.name)
