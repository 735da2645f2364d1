"""New ops, a record each here and no line elsewhere: fused, placed, differentiated, packed and run as built-in ones."""

import re

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cpu import compile as compiling
from dptrain.backend.cuda.compose import Composition
from dptrain.layers import Layer
from dptrain.ops.common import broadcast_shape, elementwise, first_dtype, floating_dtype
from dptrain.program.codegen.fuse import fuse
from dptrain.program.codegen.index_expr import offset_by
from dptrain.program.codegen.kernels import Loop
from dptrain.program.codegen.views import IndexMap
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.lowering import Element, Reduction, ViewMap
from dptrain.program.op import Op
from dptrain.program.program import trace
from tests.programs.check import wrong_on_cpu, wrong_on_cuda
from tests.programs.table import Entry

B, N = 7, 5


# An expensive function of single elements


def bent(x, *, out):
    """x / sqrt(1 + x^2)."""
    np.divide(x, np.sqrt(1 + x * x), out=out)


def bent_op(expensive=True):
    element = Element("{0} / dp_sqrt(1 + {0} * {0})")
    op = Op(bent, broadcast_shape, elementwise, floating_dtype, lowering=element, expensive=expensive)

    @op.gradient
    def rule(y, dy, x):
        return dy / (1 + x * x) ** 1.5

    return op


# Views that no built-in op is: the diagonals of matrices, and vectors backwards


def diagonals(x):
    """x[..., i, i]."""
    return np.einsum("...ii->...i", x)


def _diagonal_maps(output):
    return [*map(IndexMap, range(output.ndim)), IndexMap(output.ndim - 1)]


diagonals_op = Op(
    diagonals,
    shape=lambda shape: shape[:-1],
    letters="aXX->aX",
    dtype=first_dtype,
    linear="each",
    lowering=ViewMap(_diagonal_maps),
)


@diagonals_op.gradient
def _diagonals(y, dy, x):
    return ops.where(np.eye(N, dtype=bool), ops.expand_dims(dy, -1), 0)


backwards_op = Op(
    lambda x: x[..., ::-1],
    shape=lambda shape: shape,
    letters="aX->aX",
    dtype=first_dtype,
    linear="each",
    lowering=ViewMap(
        lambda output: [*map(IndexMap, range(output.ndim - 1)), IndexMap(output.ndim - 1, offset_by((N - 1, 0)), -1)]
    ),
)


@backwards_op.gradient
def _backwards(y, dy, x):
    return backwards_op(dy)


# An op of new letters: the ranks' outputs are candidates, of which the greatest are the whole one's


def tallest(x, *, axis, out):
    """The greatest element of each column."""
    np.maximum.reduce(x, axis=axis, initial=-np.inf, out=out)


tallest_op = Op(
    tallest,
    shape=lambda shape, *, axis: shape[1:],
    letters="rc->c",
    partial_reduce="max",
    dtype=first_dtype,
    lowering=Reduction("max"),
    ends_gradients=True,
)


@tallest_op.gradient
def _tallest(y, dy, x):
    return None


# A layer that reduces two axes


class Standardized(Layer):
    """Each sample with mean 0 and variance 1 over both of its axes."""

    def call(self, inputs):
        centered = inputs - ops.mean(inputs, axis=(1, 2), keepdims=True)
        return centered / ops.sqrt(ops.mean(ops.square(centered), axis=(1, 2), keepdims=True) + 1e-3)


LAYER = Standardized()


def training(x, w):
    """Return what a step of a batch of matrices computes that uses all of them."""

    def view(x):
        return backwards_op(diagonals_op(x))

    function = bent_op()
    rows = function(ops.sum(x, axis=2, keepdims=True))  # (B, N, 1), used for N elements each
    y = LAYER(x + rows) * rows
    tops = tallest_op(view(y), axis=0)
    loss = ops.mean(ops.square(function(view(y) - 0.1 * tops) @ w))
    (dx, dw) = gradients(loss, [x, w.value])
    w.assign(w - 0.1 * dw)
    return {"loss": loss, "dx": dx, "y": y, "view": view(y) + 1, "tops": tops}


TRAINING = Entry(
    lengths={"n": B},
    leaves={"x": f"input n {N} {N} float32 normal", "w": f"variable {N} 3 float32 normal"},
    lines=(),
    outputs=(),
    steps=2,
    shards=(3, 0, 4),
    pack=True,
    step=training,
)


def test_gradients_are_those_of_central_differences():
    x = np.random.default_rng(1).normal(size=(2, N, N))
    weights = np.random.default_rng(2).normal(size=(2, N))
    layer, function = Standardized(dtype="float64"), bent_op()

    def step(x):
        y = function(backwards_op(diagonals_op(layer(x))))
        return {"y": y, "dx": gradients(y, [x], weights)[0]}

    program = trace(step, {"x": (x.shape, x.dtype)})

    def value(x):
        return float(np.sum(weights * evaluate(program, {"x": x})[0]["y"]))

    gradient = evaluate(program, {"x": x})[0]["dx"]
    for at in [(0, 1, 1), (1, 2, 4), (1, 4, 4)]:
        up, down = x.copy(), x.copy()
        up[at], down[at] = x[at] + 1e-6, x[at] - 1e-6
        np.testing.assert_allclose(gradient[at], (value(up) - value(down)) / 2e-6, rtol=1e-5, atol=1e-8)


# The same treatment as built-in ones


def kernels(program):
    """Return what each kernel of a CPU computes: loops by the names of their ops."""
    return [
        [tensor.op.name.replace("bent", "tanh") for tensor in kernel.tensors]
        if isinstance(kernel, Loop)
        else type(kernel)
        for kernel in fuse(program).kernels
    ]


def without_gradient(function, view):
    return trace(
        lambda x, w: {"y": function(view(function(x) * 2) @ w) + 1},
        {"x": ((Dim.rows(B), N, N), "float32"), "w": ((N, 3), "float32")},
    )


def test_a_cpu_fuses_them_as_built_in_ones():
    custom, built_in = without_gradient(bent_op(), diagonals_op), without_gradient(ops.tanh, lambda x: x[:, :, 1])
    assert kernels(custom) == kernels(built_in)
    names = [name for kernel in kernels(TRAINING.trace()) if isinstance(kernel, list) for name in kernel]
    assert not {"diagonals", "<lambda>"} & set(names)


def comments_of(program):
    """Return what each function of a GPU computes, without numbers that only tell names apart."""
    comments = [
        function.about for stage in Composition(program).stages for kernel in stage for function in kernel.functions
    ]
    return [
        re.sub(r"_\d+\b", "", comment).replace("bent", "tanh").replace("diagonals", "getitem") for comment in comments
    ]


def test_a_gpu_stores_what_is_expensive_and_no_view():
    def step(function):
        # A row's number, which all its elements use.
        return trace(lambda x: {"y": x * function(x[:, :1] * 2)}, {"x": ((Dim.rows(B), N), "float32")})

    assert comments_of(step(bent_op())) == comments_of(step(ops.tanh)) == ["map: tanh", "map: y"]
    assert comments_of(step(bent_op(expensive=False))) == comments_of(step(ops.square)) == ["map: y"]
    program = without_gradient(bent_op(), diagonals_op)
    assert comments_of(program) == comments_of(without_gradient(ops.tanh, lambda x: x[:, 1]))


# Both backends


@pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler")
def test_on_a_cpu():
    assert not wrong_on_cpu(TRAINING, traced_for=B + 2, eager=True)


def test_on_a_gpu(cuda_backend, another):
    """Alone, on ranks, and in a pack."""
    assert not wrong_on_cuda(TRAINING, cuda_backend, another)
