"""What checks users' layers and ops, on the CPU: it passes what is right and finds what is wrong."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError
from dptrain.layers import Activation, Dense, Dropout, Flatten, Rescaling
from dptrain.testing import CheckError, check_layer, check_op


@pytest.mark.parametrize("layer", [Dense(5, "tanh"), Dense(3, use_bias=False), Activation("softmax"), Dropout(0.4)])
def test_built_in_layers_are_right(layer):
    assert check_layer(layer, (4,), device="cpu") == ("gradients",)
    assert layer.name is None  # free for a model
    assert check_layer(Rescaling(-2.0, 0.5), (2, 3), device="cpu") == ("gradients",)
    assert check_layer(Flatten(), (2, 3)) == ()


class WrongInput(Dense):
    def backward(self, ops, buffers, context):
        super().backward(ops, buffers, context)
        if buffers.dx is not None:
            ops.affine(buffers.dx, 0.99, 0.0, buffers.dx)


class WrongBias(Dense):
    def backward(self, ops, buffers, context):
        super().backward(ops, buffers, context)
        ops.fill(buffers.grads["bias"][2:3], 7.0)


class LeavesOut(Dense):
    def backward(self, ops, buffers, context):
        grads, kept = buffers.grads, buffers.scratch["kernel"]
        ops.dense_backward(
            buffers.x, buffers.params["kernel"], buffers.y, buffers.dy, "linear", kept, grads["bias"], buffers.dx
        )

    def scratch_shapes(self, input_shape):
        return {"kernel": (self.units,)}


class Overwrites(Dense):
    def forward(self, ops, buffers, context):
        super().forward(ops, buffers, context)
        ops.fill(buffers.x, 0)


class NeedsInputGradient(Dense):
    def backward(self, ops, buffers, context):
        super().backward(ops, buffers, context)
        ops.fill(buffers.dx[:0], 0)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (WrongInput(3), r"the gradient in its input differs first at \[0, 0\]: found .*\(central differences\)"),
        (WrongBias(3), r"the gradient in 'wrong_bias/bias' differs first at \[2\]: found 7, expected"),
        (LeavesOut(4), r"the gradient in 'leaves_out/kernel' differs first at \[0, 0\]: found nan"),
        (Overwrites(3), "overwrites its input x"),
    ],
)
def test_wrong_layers_are_found(layer, message):
    with pytest.raises(CheckError, match=message):
        check_layer(layer, (4,), rows=4, device="cpu")


def test_a_layer_that_needs_dx_is_found():
    with pytest.raises(TypeError):
        check_layer(NeedsInputGradient(3), (4,), device="cpu")


def cube(x, w, y, *, scale):
    y[...] = scale * w * x**3


def make(reference=cube, gradient=None, **options):
    made = dp.ops.op(source="", arguments="PPPqf", **options)(reference)
    if gradient is not None:
        made.gradient(arguments="PPPPPqf")(gradient)
    return made


def right(x, w, dy, dx, dw, *, scale):
    dx[...] = 3 * scale * w * x**2 * dy
    dw[...] = scale * x**3 * dy


def wrong(x, w, dy, dx, dw, *, scale):
    right(x, w, dy, dx, dw, scale=scale)
    dw.reshape(-1)[4:] *= 1.01


def test_ops_on_the_cpu():
    shape = (3, 5)
    assert check_op(make(), shape, shape, scale=2.0, device="cpu") == ("numpy float32",)
    done = check_op(make(gradient=right), shape, shape, scale=2.0, device="cpu")
    assert done == ("numpy float32", "gradient", "numpy float32 gradient")
    values = np.asfortranarray(np.full(shape, 0.5))
    check_op(make(gradient=right), values, shape, scale=2.0, device="cpu")
    check_op(make(gradient=right), (0, 5), (0, 5), scale=2.0, device="cpu")
    with pytest.raises(CheckError, match=r"op 'wrong': the gradient in 'w' differs first at \[0, 4\]"):
        check_op(make(gradient=wrong), shape, shape, scale=2.0, device="cpu")
    with pytest.raises(CheckError, match=r"op 'forgets' on numpy: 'y' is NaN at \[0, 0\]"):
        check_op(make(lambda_named("forgets", lambda x, w, y: None)), shape, shape, scale=2.0, device="cpu")
    with pytest.raises(CheckError, match="op 'destroys' on numpy overwrites its input 'x'"):
        check_op(make(lambda_named("destroys", lambda x, w, y: x.fill(0))), shape, shape, scale=2.0, device="cpu")


def lambda_named(name, body):
    def function(x, w, y, *, scale):
        body(x, w, y)

    function.__name__ = name
    return function


def test_outputs_of_other_shapes():
    @dp.ops.op(
        source="",
        arguments="PPqq",
        launch=lambda x, y: dp.ops.Launch((1, 1), (1, 1, 1), (x, y, *x.shape)),
        output_shapes=lambda x: [x[:1]],
    )
    def row_sums(x, y):
        y[...] = x.sum(axis=1)

    @row_sums.gradient(arguments="PPPq")
    def row_sums_gradient(x, dy, dx):
        dx[...] = dy[:, None]

    assert "gradient" in check_op(row_sums, (7, 3), device="cpu")


def test_wrong_registrations_are_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="begin with 'PPPq' and have 1 letters more, found 'PPq'"):
        dp.ops.op(source="", arguments="PPq")(cube)
    with pytest.raises(ConfigError, match="unknown argument type 'x' of the kernel; known: P pointer, i int"):
        dp.ops.op(source="", arguments="PPPqx")(cube)
    with pytest.raises(ConfigError, match=r"source .*swish\.cu is not there"):
        dp.ops.op(source=tmp_path / "swish.cu", arguments="PPPqf")(cube)
    with pytest.raises(ConfigError, match=r"with 3 output\(s\), found cube\(x, w, y, \*, scale\)"):
        make(outputs=3)
    with pytest.raises(ConfigError, match="the gradient of 'cube' takes 2 input"):
        make(gradient=lambda_named("short", None))
    with pytest.raises(ConfigError, match=r"op 'cube': missing a required.*called as cube\(ops, x, w, y, \*, scale\)"):
        make()(None, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"has 2 input\(s\), \['x', 'w', 'y'\]; found 1"):
        check_op(make(), (3,), scale=1.0)
    with pytest.raises(ConfigError, match="device = 'gpu'"):
        check_op(make(), (3,), (3,), scale=1.0, device="gpu")
    wrong = dp.ops.op(source="", arguments="PP", launch=lambda x, y: dp.ops.Launch((1,), (1, 1, 1), (x,)))(
        lambda x, y: None
    )
    with pytest.raises(ConfigError, match=r"its launch passes 1 arguments, the kernel takes 2 \('PP'\)"):
        wrong.launch([1, 2], {})
