"""Convolutions on a CPU: right, and of the same bits on any number of threads and beside any other images."""

import ctypes
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain import ops
from dptrain.backend.cpu.compile import compiler, convolutions, shared
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.backend.cpu.convolutions import implementation_of
from dptrain.ops.nn.convolution import conv2d, conv2d_input, conv2d_kernel
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.sample import examples, sample

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
MAKES = {"places": (conv2d, 0), "images": (conv2d_input, 1), "kernel": (conv2d_kernel, 2)}  # dp_Makes
TOLERANCE = {"float32": 1e-6, "float64": 1e-15}  # of an element, by the square root of its terms


class Case:
    """Images (B, H, W, I), what a window makes of them, (B, P, Q, O), and a kernel (R, S, I, O)."""

    def __init__(self, rows, image, kernel, channels, strides=(1, 1), dilation=(1, 1), before=(0, 0), behind=(0, 0)):
        self.window = {"strides": strides, "dilation": dilation, "before": before}
        places = [
            (n + a + b - (k - 1) * d - 1) // s + 1
            for n, k, s, d, a, b in zip(image, kernel, strides, dilation, before, behind, strict=True)
        ]
        self.fits = min(places) > 0
        self.shapes = (
            (rows, *image, channels[0]),
            (rows, *(max(n, 1) for n in places), channels[1]),
            (*kernel, *channels),
        )

    def arrays(self, makes, dtype="float64"):
        """Return the operands of what is made, and their sizes."""
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=shape).astype(dtype) for shape in self.shapes]
        images, places, kernel = arrays
        return {"places": (images, kernel), "images": (places, kernel), "kernel": (images, places)}[makes]

    def expected(self, makes, operand, other):
        images, places, kernel = self.shapes
        shape = {"places": places, "images": images, "kernel": kernel}[makes]
        out = np.empty(shape, np.float64)
        size = shape[:2] if makes == "kernel" else shape[1:3]
        MAKES[makes][0].compute(np.float64(operand), np.float64(other), **self.window, size=size, out=out)
        return out

    def computed(self, makes, operand, other, threads=1, by="channels", epilogue=None, step=1, function=None):
        """Return what the function makes that programs call; with an epilogue, also whether it has been executed."""
        images, places, kernel = self.shapes
        shape = {"places": places, "images": images, "kernel": kernel}[makes]
        rows = operand.shape[0]
        out = np.full(shape if makes == "kernel" else (rows, *shape[1:]), np.nan, operand.dtype)
        window = (*images[1:3], *places[1:3], *kernel[:2], *sum(map(tuple, self.window.values()), ()))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        kinds = [pointer, number, ctypes.c_int, pointer, *[number] * 3, *[pointer] * 3, THEN, pointer, number, number]
        call = ctypes.CFUNCTYPE(ctypes.c_bool, *kinds)(function or convolutions(by, operand.dtype.name).result())
        fields = (ctypes.c_int64 * 12)(*window)
        arrays = (x.ctypes.data for x in (operand, other, out))
        callback = THEN() if epilogue is None else THEN(lambda context, low, high: epilogue(out, low, high))
        arguments = shared("dp_parallel"), threads, MAKES[makes][1], fields, rows, *kernel[2:]
        executed = call(*arguments, *arrays, callback, None, step, 0)
        return out if epilogue is None else (out, executed)


THEN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)  # dp_Range


BY = "channels", "pixels"


def check(case, makes, dtype="float64", implementations=BY):
    """Check implementations, of which the first two make places and images of the same bits."""
    operand, other = case.arrays(makes, dtype)
    expected = case.expected(makes, operand, other)
    terms = {"places": case.shapes[2][:3], "images": case.shapes[2], "kernel": case.shapes[1][:3]}[makes]
    results = [case.computed(makes, operand, other, by=by) for by in implementations]
    row = len(operand) // 2
    for result, by in zip(results, implementations, strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE[dtype] * 20 * np.sqrt(np.prod(terms)))
        np.testing.assert_array_equal(case.computed(makes, operand, other, threads=3, by=by), result)
        if makes != "kernel":
            np.testing.assert_array_equal(
                case.computed(makes, operand[row : row + 1].copy(), other, by=by)[0], result[row]
            )
    if implementations == BY and makes != "kernel":
        np.testing.assert_array_equal(*results)


LENGTHS = st.tuples(st.integers(1, 20), st.integers(1, 33))


@settings(max_examples=examples(150), deadline=None)
@given(
    st.data(),
    st.integers(1, 20),
    LENGTHS,
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.tuples(st.integers(1, 20), st.sampled_from([1, 3, 8, 16, 17, 32, 33, 48, 70])),
    st.sampled_from(sorted(MAKES)),
    st.sampled_from(sorted(TOLERANCE)),
)
def test_against_numpy(data, rows, image, kernel, channels, makes, dtype):
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    strides, dilation = data.draw(pair), data.draw(pair)
    reach = [(n - 1) * d + 1 for n, d in zip(kernel, dilation, strict=True)]
    before, behind = (tuple(data.draw(st.integers(0, max(n, 2))) for n in reach) for _ in range(2))
    case = Case(rows, image, kernel, channels, strides, dilation, before, behind)
    if case.fits:
        check(case, makes, dtype)


EDGE = st.integers(0, 3)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 12),
    LENGTHS,
    st.tuples(st.sampled_from([16, 32, 48]), st.sampled_from([16, 32, 48, 64])),
    st.tuples(EDGE, EDGE),
    st.tuples(EDGE, EDGE),
    st.sampled_from(["places", "images"]),
    st.sampled_from(sorted(TOLERANCE)),
)
def test_winograd_against_numpy(rows, image, channels, before, behind, makes, dtype):
    case = Case(rows, image, (3, 3), channels, before=before, behind=behind)
    if case.fits:
        check(case, makes, dtype, ["winograd"])


# Blocks of tiles within an image and over several, of the last of which few are left; blocks of a long sum; images that
# end before the columns with which a row of tiles begins.
TILES = {
    "a column": Case(2, (5, 1), (3, 3), (16, 32), before=(1, 0), behind=(1, 2)),
    "a tile": Case(1, (4, 4), (3, 3), (16, 16)),
    "many channels": Case(20, (8, 8), (3, 3), (64, 48), before=(1, 1), behind=(1, 1)),
    "large kernels": Case(3, (6, 7), (3, 3), (560, 288), before=(1, 1), behind=(1, 1)),
    "a wide image": Case(2, (21, 75), (3, 3), (32, 64), before=(1, 0), behind=(0, 1)),
}


@pytest.mark.parametrize("makes", ["places", "images"])
@pytest.mark.parametrize("name", TILES)
def test_tiles(name, makes):
    assert TILES[name].fits
    check(TILES[name], makes, "float32", ["winograd"])


@pytest.mark.parametrize("makes", ["places", "images"])
def test_winograd_rounds_as_little_as_patches(makes):
    """Of normal numbers: its errors are at most three times those of sums over patches."""
    for channels in (16, 64, 256):
        case = Case(2, (14, 14), (3, 3), (channels, channels), before=(1, 1), behind=(1, 1))
        operands = case.arrays(makes, "float32")
        expected = case.expected(makes, *operands)
        wrong = {by: case.computed(makes, *operands, by=by) - expected for by in ("channels", "winograd")}
        for norm in (np.std, lambda error: np.abs(error).max()):
            assert norm(wrong["winograd"]) <= 3 * norm(wrong["channels"])


# Several blocks of lines; frames of some rows, and images together; many parts of a sum, one, and its elements in
# slices; rows that are too short for a tile; phases that no element of the kernel meets.
CASES = {
    "many channels": Case(3, (9, 8), (3, 3), (64, 40), before=(1, 1), behind=(1, 1)),
    "a wide image": Case(2, (40, 60), (3, 3), (40, 24), before=(1, 1), behind=(1, 1)),
    "a wide image as it lies": Case(2, (40, 60), (3, 3), (40, 24), (2, 1)),
    "short rows": Case(40, (4, 4), (3, 3), (24, 64), before=(1, 1), behind=(1, 1)),
    "single places": Case(33, (3, 3), (3, 3), (16, 10)),
    "one channel": Case(20, (28, 28), (5, 5), (1, 6), before=(2, 2), behind=(2, 2)),
    "to one channel": Case(3, (20, 33), (3, 3), (5, 1), before=(1, 1), behind=(1, 1)),
    "to three channels": Case(3, (20, 45), (3, 5), (7, 3), (2, 2), (2, 1), before=(3, 1), behind=(1, 2)),
    "to eleven channels": Case(5, (30, 46), (3, 5), (3, 11), (3, 3), (1, 2), before=(2, 5), behind=(2, 3)),
    "few channels on both sides": Case(2, (17, 31), (5, 5), (3, 5)),
    "few channels of tall images": Case(1, (250, 40), (5, 5), (8, 6), before=(2, 2), behind=(2, 2)),
    "few channels, many lines": Case(3, (12, 48), (5, 5), (13, 6), (1, 3)),
    "large kernels": Case(4, (6, 6), (3, 3), (200, 160), before=(1, 1), behind=(1, 1)),
    "strides over all": Case(30, (13, 16), (1, 1), (20, 30), (3, 2)),
    "far zeros": Case(5, (4, 5), (2, 2), (3, 4), before=(6, 7), behind=(5, 9)),
    "strides into zeros": Case(9, (8, 7), (3, 2), (12, 20), (2, 3), (1, 2), (1, 3), (4, 2)),
    "zeros behind rows alone": Case(3, (4, 64), (1, 3), (8, 8), (1, 2), behind=(0, 1)),
    "hundreds of images": Case(300, (2, 3), (1, 2), (8, 9)),
    "hundreds of channels": Case(2, (2, 3), (1, 1), (300, 9)),
    "wide gaps": Case(9, (21, 20), (3, 3), (6, 18), (2, 3), (4, 3), (4, 3), (4, 3)),
}


@pytest.mark.parametrize("makes", MAKES)
@pytest.mark.parametrize("name", sample(CASES, 2))
def test_shapes(name, makes):
    assert CASES[name].fits
    check(CASES[name], makes)
    check(CASES[name], makes, "float32")


@pytest.mark.parametrize(
    ("name", "makes", "expected"),
    [
        ("one channel", "places", "pixels"),
        ("one channel", "images", "pixels"),
        ("one channel", "kernel", "pixels"),
        ("many channels", "images", "channels"),
        ("few channels on both sides", "kernel", "pixels"),
        ("to eleven channels", "kernel", "channels"),
        ("single places", "places", "channels"),
        ("wide gaps", "images", "channels"),
        ("to three channels", "places", "channels"),
        ("to one channel", "places", "pixels"),
    ],
)
def test_shapes_tell_what_vectors_hold(name, makes, expected):
    assert chosen(CASES[name], makes) == expected


SAME = {"before": (1, 1), "behind": (1, 1)}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(4, (16, 16), (3, 3), (32, 32), **SAME), "winograd"),
        (Case(4, (16, 16), (3, 3), (32, 40), **SAME), "channels"),
        (Case(4, (16, 16), (3, 3), (40, 32), **SAME), "channels"),
        (Case(4, (16, 16), (3, 3), (16, 32), **SAME), "channels"),  # too few
        (Case(4, (6, 6), (3, 3), (64, 64), **SAME), "winograd"),
        (Case(4, (5, 5), (3, 3), (64, 64), **SAME), "channels"),  # tiles are not full
        (Case(4, (7, 7), (3, 3), (256, 256), **SAME), "winograd"),
        (Case(4, (7, 7), (3, 3), (272, 256), **SAME), "channels"),  # a large kernel for few tiles
        (Case(4, (14, 14), (3, 3), (512, 512), **SAME), "winograd"),
        (Case(4, (16, 16), (3, 3), (32, 32), (2, 1), **SAME), "channels"),
        (Case(4, (16, 16), (3, 3), (32, 32), (1, 2), **SAME), "channels"),
        (Case(4, (16, 16), (3, 3), (32, 32), (1, 1), (2, 1), **SAME), "channels"),
        (Case(4, (16, 16), (3, 3), (32, 32), (1, 1), (1, 2), **SAME), "channels"),
        (Case(4, (16, 16), (3, 2), (32, 32)), "channels"),
        (Case(4, (16, 16), (2, 3), (32, 32)), "channels"),
    ],
)
def test_shapes_tell_where_tiles_save_time(case, expected):
    assert chosen(case, "places") == chosen(case, "images") == expected
    assert chosen(case, "kernel") == "channels"


def chosen(case, makes):
    tensor = traced(case, makes)
    return implementation_of(tensor)


@pytest.mark.parametrize(("makes", "expected"), [("places", "product"), ("images", "product"), ("kernel", "channels")])
def test_a_kernel_of_one_element_is_a_product(makes, expected):
    tensor = traced(Case(4, (9, 8), (1, 1), (20, 30)), makes)
    assert implementation_of(tensor) == expected


def traced(case, makes):
    """Return what is made, as a tensor of a program."""
    images, places, kernel = case.shapes
    read = {"places": (images, kernel), "images": (places, kernel), "kernel": (images, places)}[makes]
    specs = {name: (shape, "float32") for name, shape in zip("ab", read, strict=True)}
    size = {"places": places[1:3], "images": images[1:3], "kernel": kernel[:2]}[makes]
    return trace(lambda a, b: {"made": MAKES[makes][0](a, b, **case.window, size=size)}, specs).outputs["made"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("makes", ["places", "images"])
@pytest.mark.parametrize(("step", "by"), [(1, "channels"), (16, "pixels"), (1, "winograd"), (3, "winograd")])
def test_an_epilogue_gets_each_image_once_and_complete(makes, step, by, threads):
    shapes = "one channel", "short rows", "strides over all", "wide gaps", "strides into zeros", "large kernels"
    executed = set()
    for name, case in TILES.items() if by == "winograd" else [(name, CASES[name]) for name in shapes]:
        operands = case.arrays(makes, "float32")
        expected, parts, lock = case.computed(makes, *operands, by=by), [], threading.Lock()

        def then(out, low, high, parts=parts, expected=expected, lock=lock):
            with lock:
                parts.append((low, high, np.array_equal(out[low:high], expected[low:high])))

        result, was_executed = case.computed(makes, *operands, threads=threads, by=by, epilogue=then, step=step)
        np.testing.assert_array_equal(result, expected)
        executed.add(was_executed)
        assert was_executed == bool(parts)
        # Not with a last phase that meets nothing, nor where threads need parts of images.
        assert was_executed or (makes, name) in (("images", "strides over all"), ("images", "wide gaps")) or threads > 1
        if was_executed:
            ends = [0, *(high for _, high, _ in sorted(parts))]
            assert [(low, high) for low, high, _ in sorted(parts)] == list(itertools.pairwise(ends))
            assert ends[-1] == len(result)
            assert all(low % step == 0 and complete for low, _, complete in parts)
    assert True in executed


def test_nothing_behind_an_image_is_read():
    """Numbers that are none lie around the operands in memory."""
    case = Case(3, (6, 7), (3, 3), (5, 7), before=(1, 1), behind=(1, 1))
    for makes in MAKES:
        operands = case.arrays(makes)
        expected = case.computed(makes, *operands)
        around = [np.full(array.size + 200, np.nan) for array in operands]
        inside = []
        for operand, memory in zip(operands, around, strict=True):
            memory[100:-100] = operand.reshape(-1)
            inside.append(memory[100:-100].reshape(operand.shape))
        np.testing.assert_array_equal(case.computed(makes, *inside), expected)


@pytest.mark.parametrize("channels", [31, 32, 33, 65])
def test_channels_by_themselves_in_blocks_and_beside_them(channels):
    """Convolutions of each channel, whose sums stay in registers 32 channels at a time."""
    rng = np.random.default_rng(channels)
    kernel = Variable(rng.normal(size=(3, 2, channels, 1)).astype(np.float32))

    def step(x, w):
        y = ops.depthwise_conv(x, kernel.value, strides=2, padding="same")
        dx, dkernel = gradients(ops.sum(y * w), [x, kernel.value])
        return {"y": y, "dx": dx, "dkernel": dkernel}

    values = {"x": rng.normal(size=(2, 5, 6, channels)), "w": rng.normal(size=(2, 3, 3, channels))}
    values = {name: value.astype(np.float32) for name, value in values.items()}
    traced = trace(step, {name: ((Dim.rows(2), *value.shape[1:]), "float32") for name, value in values.items()})
    executable = CompiledExecutable(traced, HostMemory(), values)
    executable.run()
    exact = {name: value.astype(np.float64) for name, value in values.items()}
    for name, expected in evaluate(traced, exact, {kernel: kernel.numpy().astype(np.float64)})[0].items():
        np.testing.assert_allclose(executable.outputs[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
