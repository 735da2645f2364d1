"""What checks users' layers and ops, on the CPU: it passes what is right and finds what is wrong."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.errors import ConfigError
from dptrain.layers import (
    Activation,
    BatchNormalization,
    Concatenate,
    Dense,
    Dropout,
    Flatten,
    Layer,
    Rescaling,
)
from dptrain.testing import CheckError, check_layer, check_op


@pytest.mark.parametrize(
    "layer",
    [
        Dense(5, "tanh"),
        Dense(3, use_bias=False),
        Activation("softmax"),
        BatchNormalization(),
        Dropout(0.4),
        Flatten(),
        Rescaling(-2.0, 0.5),
    ],
)
def test_built_in_layers_are_right(layer):
    assert check_layer(layer, (4,), device="cpu") == ("gradients", "program")
    assert layer._name is None  # free for a model
    assert not layer.weights


def test_layers_of_several_inputs():
    assert check_layer(Concatenate(), [(4,), (3,)], device="cpu") == ("gradients", "program")

    class Difference(Layer):
        def call(self, inputs):
            return {"y": inputs["a"] - inputs["b"], "scaled": 2.0 * inputs["b"]}

    assert check_layer(Difference(), {"a": (2, 3), "b": (1, 3)}, rows=2, device="cpu") == ("gradients", "program")


class WrongInput(Dense):
    """Its gradient leaves out one of the two ways in which the input counts."""

    def call(self, inputs):
        return super().call(inputs) * dp.ops.sum(dp.ops.stop_gradient(inputs))


class WrongBias(Dense):
    def call(self, inputs):
        return inputs @ self.kernel + self.bias * dp.ops.square(dp.ops.stop_gradient(self.bias))


class DecidesByValue(Dense):
    def call(self, inputs):
        y = super().call(inputs)
        return y if float(dp.ops.sum(y)) > 0 else -y


class KeepsCount(Dense):
    """Computes something else whenever it is called, which a traced step does not."""

    calls = 0

    def call(self, inputs):
        KeepsCount.calls += 1
        return super().call(inputs) * float(KeepsCount.calls)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (WrongInput(3), r"the gradient in its input differs first at \[0, 0\]: found .*\(central differences\)"),
        (WrongBias(3), r"layer 'wrong_bias': the gradient in 'wrong_bias/bias' differs first at \[0\]: found .*,"),
        (KeepsCount(3), "differs first at"),
    ],
)
def test_wrong_layers_are_found(layer, message):
    with pytest.raises(CheckError, match=message):
        check_layer(layer, (4,), rows=4, device="cpu")


def test_a_layer_that_cannot_be_traced_is_found():
    with pytest.raises(ConfigError, match=r"compute with ops .* instead of Python's if"):
        check_layer(DecidesByValue(3), (4,), device="cpu")


def cube(x, w, y, *, scale):
    y[...] = scale * w * x**3


def make(reference=cube, gradient=None, **options):
    op = dp.ops.op(source="", arguments="PPPqf", **options)(reference)
    if gradient is not None:
        op.gradient(arguments="PPPPPqf")(gradient)
    return op


def right(x, w, dy, dx, dw, *, scale):
    dx[...] = 3 * scale * w * x**2 * dy
    dw[...] = scale * x**3 * dy


def wrong(x, w, dy, dx, dw, *, scale):
    right(x, w, dy, dx, dw, scale=scale)
    dw.reshape(-1)[4:] *= 1.01


def test_ops_on_the_cpu():
    shape = (3, 5)
    assert check_op(make(), shape, shape, scale=2.0, device="cpu") == ("numpy float32",)
    checks = check_op(make(gradient=right), shape, shape, scale=2.0, device="cpu")
    assert checks == ("numpy float32", "gradient", "numpy float32 gradient")
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
    with pytest.raises(ConfigError, match=r"source .*swish\.cu does not exist"):
        dp.ops.op(source=tmp_path / "swish.cu", arguments="PPPqf")(cube)
    with pytest.raises(ConfigError, match=r"with 3 output\(s\), found cube\(x, w, y, \*, scale\)"):
        make(outputs=3)
    with pytest.raises(ConfigError, match="the gradient of 'cube' takes 2 input"):
        make(gradient=lambda_named("short", None))
    for inputs, numbers in (((1.0,), {"scale": 1.0}), ((1.0, 2.0), {"skale": 1.0}), ((1.0, 2.0, 3.0), {})):
        with pytest.raises(ConfigError, match=r"op 'cube': wrong arguments; call it as cube\(x, w, scale=\.\.\.\)"):
            make()(*inputs, **numbers)
    with pytest.raises(ConfigError, match=r"op 'cube': 'scale' is missing; call it as cube\("):
        make()(1.0, 2.0)
    with pytest.raises(ConfigError, match="op 'relu': a built-in op has this name"):
        make(lambda_named("relu", None))
    with pytest.raises(ConfigError, match="op 'cube': letters = 'columns': expected a letter for each"):
        make(letters="columns")
    with pytest.raises(ConfigError, match="op 'cube': letters = 'a->a': 1 operands; expected 2"):
        make(letters="a->a")
    with pytest.raises(ConfigError, match=r"has 2 input\(s\), \['x', 'w'\]; found 1"):
        check_op(make(), (3,), scale=1.0)
    with pytest.raises(ConfigError, match="device = 'gpu'"):
        check_op(make(), (3,), (3,), scale=1.0, device="gpu")
    wrong = dp.ops.op(source="", arguments="PP", launch=lambda x, y: dp.ops.Launch((1,), (1, 1, 1), (x,)))(
        lambda x, y: None
    )
    with pytest.raises(ConfigError, match=r"its launch passes 1 arguments, the kernel takes 2 \('PP'\)"):
        wrong.kernel.launch([1, 2], {})
