"""Which memory a product reads, for every order of views in front of it, and what its blocks compute with it."""

import itertools

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.generate import Local
from dptrain.backend.cuda.libraries.providers import asked, with_providers
from dptrain.backend.cuda.policy import POLICY, factors_of, operand_of
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import Program, trace
from dptrain.program.schedule.fuse import fuse
from dptrain.program.tensor import Variable
from tests.ops.test_products_of_views import VIEWS, viewed


@pytest.mark.parametrize("shape", [(4, 6, 8), (12, 8), (Dim.rows(4), 6, 8), (4, 4, 4)], ids=str)
def test_memory_that_is_read_holds_the_factor(shape):
    for chain in (views for length in range(4) for views in itertools.product(VIEWS, repeat=length)):
        program = trace(lambda x, chain=chain: {"factor": viewed(x * 1, chain)}, {"x": (shape, "float32")})
        factor = program.outputs["factor"]
        base, transposed = operand_of(factor)
        with_base = Program(program.inputs, {}, {"factor": factor, "base": base}, {}, rows=program.rows)
        outputs, _ = evaluate(with_base, {"x": np.arange(np.prod(shape), dtype=np.float32).reshape(shape)})
        *batch, rows, columns = factor.shape
        read = outputs["base"].reshape((*batch, columns, rows) if transposed else factor.shape)
        np.testing.assert_array_equal(
            np.swapaxes(read, -1, -2) if transposed else read, outputs["factor"], err_msg=str(chain)
        )


def test_transposes_are_looked_through():
    program = trace(lambda x: {"y": VIEWS["transpose"](x * 1)}, {"x": ((4, 6, 8), "float32")})
    base, transposed = operand_of(program.outputs["y"])
    assert transposed
    assert base is program.outputs["y"].inputs[0]


def nests_of(step, *, gemm="dptrain", conv="dptrain", **inputs):
    """Return frame and names of the ops of each nest of a program of float32."""
    program = trace(step, {name: (shape, "float32") for name, shape in inputs.items()})
    program = with_providers(program, asked(gemm, conv), Local(4, 0, 4).count, factors_of)
    return {(nest.frame, *(member.op.name for member in nest.members)) for nest in fuse(program, POLICY).nests}


IMAGES = {"x": (Dim.rows(4), 6, 6, 3), "kernel": (3, 3, 3, 8), "bias": (8,)}


def test_what_follows_a_convolution_is_computed_with_it():
    def step(x, kernel, bias):
        y = ops.relu(ops.conv(x, kernel) + bias)
        dx, dkernel = gradients(ops.sum(y), [x, kernel])
        return {
            "y": y,
            "dx": dx * 2,
            "dkernel": dkernel + kernel,
            "wide": ops.relu(ops.conv(ops.cast(x, "float64"), kernel)),
        }

    assert nests_of(step, **IMAGES) == {
        ("product", "conv2d", "relu", "where"),
        ("product", "conv2d_input", "multiply"),
        ("product", "conv2d_kernel", "add"),
        ("map", "cast_to"),
        ("map", "conv2d", "relu"),
    }


def test_a_library_of_products_leaves_convolutions_to_our_kernels():
    def step(x, kernel, bias):
        y = ops.relu(ops.conv(x, kernel) + bias)
        return {"y": y, "product": ops.relu(ops.reshape(y, (-1, 8)) @ ops.ones((8, 2)) + 1.0)}

    nests = nests_of(step, gemm="cublaslt", **IMAGES)
    assert nests == {("product", "conv2d", "relu"), ("product", "batch_matmul"), ("map", "relu")}
    # cuDNN's kernels have axes of their own; what follows them is computed by itself.
    nests = nests_of(step, conv="cudnn", **IMAGES)
    assert nests == {
        ("product", "conv2d"),
        ("map", "transpose_to"),
        ("map", "relu"),
        ("product", "batch_matmul", "relu"),
    }
    assert nests_of(step, gemm="auto", conv="auto", **IMAGES) == nests_of(step, **IMAGES), "nothing is measured here"


def test_a_new_kernel_is_computed_with_its_gradient_unless_others_read_the_old_one():
    kernels = [Variable(np.ones(shape, np.float32), f"k{n}") for n, shape in enumerate([(3, 3, 3, 4), (3, 3, 4, 8)])]

    def step(x):
        first, second = (variable.value for variable in kernels)
        total = ops.sum(ops.conv(ops.conv(x, first), second))
        for kernel, gradient in zip(kernels, gradients(total, [first, second]), strict=True):
            kernel.assign(kernel - 0.1 * gradient)
        return {}

    nests = nests_of(step, x=(Dim.rows(4), 6, 6, 3))
    assert ("product", "conv2d_kernel", "subtract") in nests, "of the first layer"
    assert {("product", "conv2d_kernel"), ("map", "subtract")} <= nests, (
        "of the second, beside the product for the first"
    )


def test_a_convolution_adds_up_its_results_over_rows_and_places():
    """For BatchNormalization, and for a bias's gradient behind the gradient in images; a library's blocks do not."""
    moving_mean = Variable(np.zeros(8, np.float32), "kept")

    def step(x, kernel):
        y = ops.conv(x, kernel)
        mean = ops.mean(y, (0, 1, 2))
        moving_mean.assign(moving_mean * 0.9 + mean * 0.1)
        return {"mean": mean, "spread": ops.sum(ops.square(y - mean), (0, 1, 2)), "greatest": ops.max(y, (0, 1, 2))}

    inputs = {"x": IMAGES["x"], "kernel": IMAGES["kernel"]}
    summed = "conv2d", "reduce_sum", "divide", "add"
    nests = nests_of(step, **inputs)
    assert ("product", *summed) in nests
    assert {nest[0] for nest in nests if "reduce_max" in nest or nest[1:] == ("reduce_sum",)} == {"columns"}
    assert ("columns", "reduce_sum", "divide", "reduce_max", "add") in nests_of(step, conv="cudnn", **inputs)


def test_a_product_of_matrices_leaves_sums_over_its_rows_to_others():
    def step(x, kernel):
        y = x @ kernel
        return {"y": y, "sum": ops.sum(y, 0)}

    nests = nests_of(step, x=(Dim.rows(4), 6), kernel=(6, 8))
    assert nests == {("product", "batch_matmul"), ("columns", "reduce_sum")}


def test_a_convolution_whose_sums_update_what_others_still_read_leaves_the_update():
    """A new value that the blocks of a product beside it could meet."""
    scale = Variable(np.ones(3, np.float32), "scale")

    def step(x, kernel, beside):
        y = ops.conv(x * scale, kernel, padding="same")
        dx = ops.conv(x, beside, padding="same")
        scale.assign(scale - ops.sum(dx, (0, 1, 2)))
        return {"y": y, "dx": dx}

    nests = nests_of(step, x=(Dim.rows(4), 6, 6, 3), kernel=(3, 3, 3, 8), beside=(3, 3, 3, 3))
    assert {("product", "conv2d", "reduce_sum"), ("map", "subtract")} <= nests


def test_convolutions_look_through_views_that_keep_the_order():
    kernel = np.ones((2, 2, 1, 3), np.float32)

    def step(x):
        images = ops.reshape(x * 2, (x.shape[0], 6, 6, 1))
        return {"reshaped": ops.conv(images, kernel), "turned": ops.conv(ops.transpose(images, (0, 2, 1, 3)), kernel)}

    outputs = trace(step, {"x": ((Dim.rows(4), 36), "float32")}).outputs
    assert factors_of(outputs["reshaped"])[0][0].op.name == "multiply"
    assert factors_of(outputs["turned"])[0] == (outputs["turned"].inputs[0], False)


def recurrence(steps):
    """Return what composes a state that is made of itself without a product in between, and read at each step."""

    def step(x, w):
        state, states = x[:, 0] * 0, []
        for number in range(steps):
            for _ in range(4):
                state = ops.tanh(state * 0.5 + x[:, number])
            states.append(ops.sum(state @ w))
        return {"states": sum(states), "state": state}

    shapes = {"x": ((Dim.rows(4), steps, 8), "float32"), "w": ((8, 8), "float32")}
    return Composition(trace(step, shapes), 4)


def test_a_state_is_not_computed_from_the_beginning_at_each_step():
    lines = [sum(len(text.splitlines()) for text in recurrence(steps).sources()) for steps in (20, 40)]
    assert lines[1] < 2.2 * lines[0]


def test_a_long_row_of_ops_is_written_once():
    def step(x):
        for _ in range(300):
            x = ops.tanh(x) * 0.5
        return {"y": x}

    composition = Composition(trace(step, {"x": ((Dim.rows(4), 8), "float32")}), 4)
    assert composition.source().count("tanh(") == 300


def test_no_nest_waits_for_one_of_its_level():
    """Or each of these two would have to run after the other one."""

    def step(a, b):
        of_a, of_b = ops.max(a, 1, keepdims=True), ops.max(b, 1, keepdims=True)
        return {"y": a - of_a + of_b[0], "z": b - of_b + of_a[0]}

    nests = fuse(trace(step, {"a": ((4, 6), "float32"), "b": ((5, 7), "float32")}), POLICY).nests
    waits = [(before.level, nest.level) for nest in nests for before in nest.after]
    assert len(waits) > 1
    assert all(before < level for before, level in waits)


def chain(x, length):
    """Return a tensor that so many ops compute, each from the one before."""
    for _ in range(length):
        x = ops.sin(x)
    return x


@pytest.mark.parametrize(
    ("of_row", "stored"),
    [
        (ops.exp, True),
        (lambda b: b * 2 + 1, False),
        (lambda b: ops.reshape(ops.exp(b), (1, 8)), True),
        (lambda b: ops.exp(ops.ones(8)), False),
    ],
    ids=["expensive", "cheap", "a view of what is expensive", "of known numbers"],
)
def test_what_is_expensive_is_computed_once_for_many_elements(of_row, stored):
    schedule = fuse(
        trace(lambda x, b: {"y": x * of_row(b)}, {"x": ((4, 8), "float32"), "b": ((8,), "float32")}), POLICY
    )
    assert len(schedule.nests) == 1 + stored


@pytest.mark.parametrize(("length", "stored"), [(64, 1), (65, 1), (66, 2)])
def test_long_chains_are_cut(length, stored):
    assert len(fuse(trace(lambda x: {"y": chain(x, length)}, {"x": ((4, 6), "float32")}), POLICY).anchors) == stored


@pytest.mark.parametrize(("length", "stored"), [(32, False), (33, True)])
def test_what_many_ops_compute_for_two_nests_is_stored(length, stored):
    def step(x):
        y = chain(x, length)
        return {"of columns": ops.sum(y, 0), "of rows": ops.sum(y, 1)}

    program = trace(step, {"x": ((4, 6), "float32")})
    assert (program.outputs["of rows"].inputs[0] in fuse(program, POLICY).anchors) == stored
