"""NaN and infinities wherever they lie: compiled programs return what NumPy returns, also beside them."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain import ops
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from tests.sample import examples

# As many rows as are computed side by side and some more; more columns than are, and a few; images with channels.
ROWS, WIDE, NARROW, IMAGE = 11, 70, 3, (4, 6, 5)
SPECIAL = [np.nan, np.nan, np.inf, -np.inf, -0.0]


@functools.cache
def program():
    """Return reductions, and what is made of them, along the axes of matrices and the channels of images."""

    def step(wide, narrow, image):
        outputs = {}
        for name, x in (("wide", wide), ("narrow", narrow)):
            for axis in (0, 1):
                for reduce in ("argmax", "argmin", "max", "min", "sum", "logsumexp"):
                    outputs[f"{reduce} of {name} along {axis}"] = getattr(ops, reduce)(x, axis)
                outputs[f"softmax of {name} along {axis}"] = ops.softmax(x, axis)
                (gradient,) = gradients(ops.sum(ops.max(x, axis) * 2), [x])
                outputs[f"gradient of max of {name} along {axis}"] = gradient
            outputs[f"max of {name} in float64"] = ops.max(ops.cast(x, "float64"), 1)
            outputs[f"relu of {name}"] = ops.relu(x)
            outputs[f"clip of {name}"] = ops.clip(x, -1, 1)
            outputs[f"isnan of {name}"] = ops.cast(ops.isnan(x), "int32")
        mean, variance = ops.mean(image, (0, 1, 2), keepdims=True), ops.var(image, (0, 1, 2), keepdims=True)
        outputs["normalized"] = (image - mean) / ops.sqrt(variance + 1e-3)
        outputs["highest of channels"] = ops.argmax(image, -1)
        outputs["pooled"] = ops.max_pool(image, 2, 2)
        outputs["average pooled"] = ops.average_pool(image, 2, 2)
        return outputs

    rows = Dim.rows(ROWS)
    shapes = {"wide": (rows, WIDE), "narrow": (rows, NARROW), "image": (rows, *IMAGE)}
    return trace(step, {name: (shape, "float32") for name, shape in shapes.items()})


@st.composite
def inputs(draw):
    """Draw the program's inputs, in each of which some places, and perhaps a row or a channel, hold special numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shapes = {"wide": (ROWS, WIDE), "narrow": (ROWS, NARROW), "image": (ROWS, *IMAGE)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for x in values.values():
        for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=5)):
            x[np.unravel_index(draw(st.integers(0, x.size - 1)), x.shape)] = value
        if draw(st.booleans()):  # all of a row, a column or a channel
            axis = draw(st.integers(0, x.ndim - 1))
            np.moveaxis(x, axis, 0)[draw(st.integers(0, x.shape[axis] - 1))] = draw(st.sampled_from(SPECIAL))
    return values


def wrong(make, values):
    """Return which outputs of an executable differ from NumPy's, in where NaN and infinities lie or in numbers."""
    expected, _ = evaluate(program(), values)
    executable = make(program(), values)
    executable.run()
    return [
        name
        for name, value in executable.outputs.items()
        if not np.allclose(value, expected[name], rtol=1e-5, atol=1e-5, equal_nan=True)
        or (value.dtype.kind == "i" and not np.array_equal(value, expected[name]))
    ]


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@given(inputs())
@settings(max_examples=examples(60), deadline=None)
def test_compiled_programs_put_them_where_numpy_does(values):
    assert wrong(lambda program, values: CompiledExecutable(program, HostMemory(), values), values) == []
