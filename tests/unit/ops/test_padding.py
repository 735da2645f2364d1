"""Padding in every mode, against NumPy's; of traced tensors and with gradients too."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import differentiable

X = np.random.default_rng(0).normal(size=(2, 3, 4))
WIDTHS = [0, 2, (1, 2), [2], ((1, 2),), [[1], [0], [3]], ((0, 1), (2, 0), (3, 3)), ((5, 7), (4, 4), (9, 1))]


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric", "wrap"])
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_values_are_numpys(mode, width):
    np.testing.assert_array_equal(ops.pad(X, width, mode), np.pad(X, width, mode))


def test_with_a_number():
    np.testing.assert_array_equal(ops.pad(X, 1, constant_values=2.5), np.pad(X, 1, constant_values=2.5))
    padded = ops.pad(np.array([True]), 1, constant_values=1)
    assert (padded.dtype, padded.numpy().tolist()) == (bool, [True] * 3)


def test_gradients_go_to_what_is_repeated():
    source = differentiable(np.arange(3.0))
    (gradient,) = gradients(ops.pad(source, (2, 1), "reflect"), [source], np.arange(6.0))
    np.testing.assert_array_equal(gradient, [2, 1 + 3 + 5, 0 + 4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, "mean"), "mode='mean'; expected one of constant, edge, reflect, symmetric, wrap"),
        ((1, "edge", 2.0), "can only be provided when `mode == 'constant'`"),
        ((-1,), "pad_width=-1 for 3 axes"),
        (([1, 2, 3],), r"pad_width=\[1, 2, 3\] for 3 axes; expected \(before, after\) for each"),
        ((0.5,), "pad_width=0.5"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ops.pad(X, *arguments)


def test_the_rows_of_a_batch_are_mirrored():
    x = np.arange(20.0).reshape(5, 4)
    program = trace(lambda x: {"y": ops.pad(x, 1, "reflect")}, {"x": ((Dim.rows(5), 4), np.float64)})
    np.testing.assert_array_equal(evaluate(place(program), {"x": x})[0]["y"], np.pad(x, 1, "reflect"))


@pytest.mark.parametrize("mode", ["reflect", "symmetric", "wrap", "edge"])
def test_an_unknown_length_is_mirrored_once_it_is_known(mode):
    inputs = dp.Input((None, 2))
    model = dp.Model(inputs, ops.pad(inputs, ((0, 0), (2, 1), (0, 0)), mode))
    for length in (3, 5, 3):
        x = np.arange(2.0 * 2 * length, dtype=np.float32).reshape(2, length, 2)
        expected = np.pad(x, ((0, 0), (2, 1), (0, 0)), mode)
        np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
