"""Programs of which every tensor is known from NumPy, for what executes their statements."""

from dataclasses import replace

import numpy as np

from dptrain.program.body import has_body
from dptrain.program.execute import evaluate
from dptrain.program.lowering import (
    ConvolutionLowering,
    Element,
    Gather,
    Insert,
    Join,
    Product,
    Reduction,
    ViewMap,
    lowering_of,
)
from dptrain.program.program import ROWS

INTERPRETED = Element, ViewMap, Insert, Join, Gather, Product, Reduction, ConvolutionLowering


def is_interpreted(tensor):
    """Whether `Interpreter` knows a tensor's op, with rounding like NumPy's."""
    lowering = lowering_of(tensor)
    rounded = lowering is not None and tensor.dtype.kind == "V"  # NumPy's scalars of it promote otherwise
    return tensor.op is not None and type(lowering) in INTERPRETED and not has_body(tensor) and not rounded


def is_known(tensor):
    """Whether statements have a tensor's number."""
    return tensor.op is None and tensor.value is not None and tensor.value.size == 1 and tensor.variable is None


def arrays_of(program, case):
    """Return the array of every tensor of a case's program."""
    named = {str(index): tensor for index, tensor in enumerate(program.tensors) if tensor.op is not None}
    values = {name: value[: case.rows] if name == ROWS else value for name, value in case.values().items()}
    with np.errstate(all="ignore"):
        outputs, _ = evaluate(replace(program, outputs=named, updates={}, derived=None), values)
    arrays = {named[name]: value for name, value in outputs.items() if name in named}
    arrays |= {tensor: np.asarray(values[name], tensor.dtype) for name, tensor in program.inputs.items()}
    arrays |= {tensor: variable.numpy() for variable, tensor in program.state.items()}
    return arrays | {
        t: np.asarray(t.numpy()) for t in program.tensors if t.op is None and t not in arrays and not t.counts_rows
    }
