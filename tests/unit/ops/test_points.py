"""Every function of elements at 0, at corners, ties and infinities: eager, as a program, and compiled."""

import numpy as np
import pytest

from dptrain import activations, losses, ops
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.tensor import Variable, differentiable
from tests.unit.ops import points

INF, NAN = np.inf, np.nan
DTYPES = ["float32", "float64"]


def test_every_op_of_elements_is_tried():
    assert points.untried() == set()
    assert set(activations.BY_NAME) - set(points.UNARY) - set(points.OF_ROWS) == {"exponential", "linear"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_computes_what_eager_calls_do(dtype):
    outputs, _ = evaluate(points.program(dtype), points.operands(dtype))
    assert points.wrong(outputs, dtype, exact=True) == {}


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_computes_what_numpy_does(dtype):
    executable = CompiledExecutable(points.program(dtype), HostMemory(), points.operands(dtype))
    executable.run()
    assert points.wrong(executable.outputs, dtype) == {}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", points.BINARY)
def test_gradients_in_every_quadrant_by_central_differences(name):
    """Of operands of both signs, and of quotients above and below 1: away from corners and ties."""
    function, side = points.BINARY[name], np.array([0.37, -0.61, 1.43, -2.39, 5.17, -7.33])
    arrays = [array.ravel() for array in np.meshgrid(side, side * 1.09, indexing="ij")]
    with np.errstate(all="ignore"):
        if function(*arrays).dtype.kind != "f" or name == "nextafter":
            return
        ends = [
            [
                np.asarray(function(*(array + step * (of == n) for n, array in enumerate(arrays))))
                for step in (1e-6, -1e-6)
            ]
            for of in range(2)
        ]
    for slope, (above, below) in zip(slopes(function, *arrays), ends, strict=True):
        expected = (above - below) / 2e-6
        np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-7 * max(1, np.nanmax(np.abs(expected))))


def slopes(function, *inputs):
    """Return the gradients of a sum as lists."""
    tensors = [differentiable(np.array(x, np.float64)) for x in inputs]
    found = zip(tensors, gradients(ops.sum(function(*tensors)), tensors), strict=True)
    return [np.zeros(x.shape).tolist() if slope is None else slope.numpy().tolist() for x, slope in found]


# The rules of docs/keras.md: at corners, bounds and ties, at infinities, and where a composed function loses the point.
RULES = {
    "expm1": (ops.expm1, ([0, -INF, 800.0],), [[1, 0, INF]]),
    "sinh": (ops.sinh, ([0.0, -0.0],), [[1, 1]]),
    "arcsinh": (ops.arcsinh, ([0.0, -0.0, 0.75],), [[1, 1, 0.8]]),
    "arctan2 on axes": (ops.arctan2, ([0.0, 0, 2, -2], [2.0, -2, 0, 0]), [[0.5, -0.5, 0, 0], [0, 0, -0.5, 0.5]]),
    "arctan2 on diagonals": (ops.arctan2, ([1.0, 1, -1], [1.0, -1, 1]), [[0.5, -0.5, 0.5], [-0.5, -0.5, 0.5]]),
    "arctan2 far out": (ops.arctan2, ([0.0, 1e-200, 1e200], [0.0, 0, 0]), [[0, 0, 0], [0, -1e200, -1e-200]]),
    "hypot": (ops.hypot, ([0.0, 3, 0], [0.0, 4, -2]), [[0, 0.6, 0], [0, 0.8, -1]]),
    "cbrt": (ops.cbrt, ([0.0, -8],), [[INF, 1 / 12]]),
    "sinc": (ops.sinc, ([0.0, 1],), [[0, -1]]),
    "x ** 0": (lambda x: x**0, ([0.0, 2, -1],), [[0, 0, 0]]),
    "powers": (lambda x: ops.power(x, np.arange(4.0)), ([0.0] * 4,), [[0, 1, 0, 0]]),
    "absolute": (ops.absolute, ([0.0, -2, 2],), [[0, -1, 1]]),
    "root of absolute": (lambda x: ops.sqrt(ops.absolute(x)), ([0.0, -4],), [[0, -0.25]]),
    "maximum": (ops.maximum, ([1.0, 2, 0], [1.0, 1, INF]), [[0.5, 1, 0], [0.5, 0, 1]]),
    "minimum": (ops.minimum, ([1.0, 2, 0], [1.0, 1, INF]), [[0.5, 0, 1], [0.5, 1, 0]]),
    "max": (lambda x: ops.max(x, -1), ([[1.0, 1, 0], [0.0, 2, 1]],), [[[0.5, 0.5, 0], [0, 1, 0]]]),
    "clip": (lambda x: ops.clip(x, -1, 1), ([-2.0, -1, 0, 1, 2],), [[0, 1, 1, 1, 0]]),
    "relu": (ops.relu, ([-1.0, 0, 1],), [[0, 0, 1]]),
    "relu6": (ops.relu6, ([0.0, 1, 6],), [[0, 1, 0]]),
    "leaky relu": (ops.leaky_relu, ([-1.0, 0, 1],), [[0.2, 0.2, 1]]),
    "hard_tanh": (ops.hard_tanh, ([-1.0, 0, 1],), [[0, 1, 0]]),
    "hard_sigmoid": (ops.hard_sigmoid, ([-3.0, 0, 3],), [[0, 1 / 6, 0]]),
    "hard_silu": (ops.hard_silu, ([-3.0, 3, INF],), [[0, 1, 1]]),
    "soft_shrink": (ops.soft_shrink, ([-0.5, 0, 0.5, 1],), [[0, 0, 0, 1]]),
    "root of maximum": (lambda x: ops.sqrt(ops.maximum(x, 0)), ([-1.0, 4],), [[0, 0.25]]),
    "logarithm of clip": (lambda x: ops.log(ops.clip(x, 0, 2)), ([-1.0, 2, 3],), [[0, 0.5, 0]]),
    "logarithm of max": (lambda x: ops.log(ops.max(x, -1)), ([[0.0, -1]],), [[[INF, 0]]]),
    "norm": (lambda x: ops.norm(x, axis=-1), ([[0.0, 0], [3, 4]],), [[[0, 0], [0.6, 0.8]]]),
    "norm of order 3": (lambda x: ops.norm(x, 3, -1), ([[0.0, 0], [0, -2]],), [[[0, 0], [0, -1]]]),
    "norm of order 1/2": (lambda x: ops.norm(x, 0.5, -1), ([[0.0, 0], [0, -2]],), [[[0, 0], [0, -1]]]),
    "std": (lambda x: ops.std(x, -1), ([[2.0, 2], [1, 3]],), [[[0, 0], [-0.5, 0.5]]]),
    "nanstd": (lambda x: ops.nanstd(x, -1), ([[2.0, 2]],), [[[0, 0]]]),
    "cumprod": (lambda x: ops.cumprod(x, -1), ([[2.0, 0, 3, 0]],), [[[1, 8, 0, 0]]]),
    "prod": (lambda x: ops.prod(x, -1), ([[2.0, 0, 3], [0, 5, 0]],), [[[0, 6, 0], [0, 0, 0]]]),
    "det of rank 1": (ops.det, ([[1.0, 2], [2, 4]],), [[[4, -2], [-2, 1]]]),
    "det of rank 2": (ops.det, (np.diag([2.0, 3, 0]).tolist(),), [np.diag([0.0, 0, 6]).tolist()]),
    "det of zeros": (ops.det, ([[0.0] * 3] * 3,), [[[0.0] * 3] * 3]),
    "logsumexp": (lambda x: ops.logsumexp(x, -1), ([[-INF, -INF], [-INF, 1]],), [[[0, 0], [0, 1]]]),
}


@pytest.mark.parametrize("rule", RULES)
def test_gradients_at_corners_and_ties(rule):
    function, inputs, expected = RULES[rule]
    for actual, of in zip(slopes(function, *inputs), expected, strict=True):
        np.testing.assert_allclose(actual, of, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "remainder", "c"),
    [
        (5.5, INF, 5.5, 5.5),
        (-5.5, INF, INF, -5.5),
        (INF, 2.0, NAN, NAN),
        (1e30, 7.0, np.fmod(1e30, 7), np.fmod(1e30, 7)),
        (-1e17, 3.0, 2.0, -1.0),
        (2.0**60, 0.7, np.fmod(2.0**60, 0.7), np.fmod(2.0**60, 0.7)),
        (1.0, 0.0, NAN, NAN),
        (-6.0, 3.0, 0.0, -0.0),
    ],
)
def test_remainders_of_large_numbers_and_infinities(a, b, remainder, c):
    np.testing.assert_array_equal(ops.mod(np.array([a]), b), [remainder])
    np.testing.assert_array_equal(ops.fmod(np.array([a]), b), [c])


def test_remainders_of_integers():
    a, b = np.array([7, -7, 7, -7, 5, -(2**31)], np.int32), np.array([3, 3, -3, -3, 0, -1], np.int32)
    specs = {"a": ((6,), a.dtype), "b": ((6,), b.dtype)}
    for function, expected in ((ops.mod, [1, 2, -2, -1, 0, 0]), (ops.fmod, [1, -1, 1, -1, 0, 0])):
        program = trace(lambda a, b, function=function: {"y": function(a, b)}, specs)
        assert evaluate(program, {"a": a, "b": b})[0]["y"].tolist() == expected
        if compiler() is not None:
            executable = CompiledExecutable(program, HostMemory(), {"a": a, "b": b})
            executable.run()
            assert executable.outputs["y"].tolist() == expected


@pytest.mark.parametrize("gamma", [0, 0.5, 1, 2])
def test_focal_losses_of_saturated_outputs_have_gradients(gamma):
    logits = differentiable(np.array([[800.0], [-800], [0]]))
    loss = losses.binary_focal_crossentropy(np.array([[1.0], [1], [1]]), logits, gamma=gamma, from_logits=True)
    (slope,) = gradients(ops.sum(loss), [logits])
    assert slope.numpy()[:2].tolist() == [[0], [-1]]
    logits = differentiable(np.array([[800.0, 0, 0], [0, 800, 0]]))
    right = np.array([[1.0, 0, 0], [0, 1, 0]])
    loss = losses.categorical_focal_crossentropy(right, logits, gamma=gamma, from_logits=True)
    (slope,) = gradients(ops.sum(loss), [logits])
    assert slope.numpy().tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_layer_of_arcsinh_learns_from_zeros():
    weight = Variable(np.zeros((2, 1)), "w")
    y = ops.sum(ops.arcsinh(ops.matmul(np.ones((3, 2)), weight)) - 1.0)
    y.backward()
    assert weight.value.grad.numpy().tolist() == [[3], [3]]
