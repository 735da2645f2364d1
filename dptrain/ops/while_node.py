"""The op of loops of unknown length: steps of a body as long as its first carry, a boolean, is true.

Its inputs are the initial carries and captures, its values the final carries.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program.body import Body, body_of
from dptrain.program.gradient import topological
from dptrain.program.lowering import Repeat
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import Op
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor


def _compute(*arrays: Any, body: Body, out: Any) -> None:
    raise AssertionError("executables run the body of a loop, not its op")


def _letters(shapes: Sequence[Shape], out: Shape, attributes: Mapping[str, Any]) -> str:
    # All axes are unsharded, unless the body is placed.
    body: Body = attributes["body"]
    letters = ("X" * len(shape) for shape in body.shapes())
    return f"{','.join('X' * len(shape) for shape in shapes)}->{','.join(letters)}"


def _operations(value: Tensor) -> int:
    # Of one step.
    body = body_of(value)
    order = topological(body.results) if value.index == body.counted else []
    return sum(tensor.op.operations(tensor) for tensor in order if tensor.op is not None and not tensor.op.is_view)


WHILE = Op(
    _compute,
    lambda *inputs, body: body.shapes(),
    _letters,
    lambda *inputs, body: body.dtypes(),
    lowering=Repeat(None),
    has_values=True,
    operations=_operations,
)
WHILE.name = "while"


@WHILE.gradient
def _gradient(outputs: Any, dys: Any, *inputs: Tensor) -> NoReturn:
    raise ConfigError(
        "while_loop without maximum_iterations and fori_loop without known bounds have no gradient, which needs the "
        "values of all iterations: pass maximum_iterations or such bounds, or use ops.stop_gradient on the result"
    )


@WHILE.onnx_lowering
def _onnx(graph: OnnxGraph, value: Tensor, *inputs: Value) -> Sequence[Value]:
    body = body_of(value)
    count, step = len(body.carries), OnnxGraph(graph)
    arguments = [step.argument(number, leaf.dtype) for number, leaf in enumerate(body.carries)]
    values = dict(zip(body.placeholders, (*arguments, *inputs[count:]), strict=True))
    step.add(topological(body.results), values)
    number_of_step = step.argument(count, np.dtype(np.int64))
    results = step.body([number_of_step, *arguments], [values[end] for end in body.results], body.results)
    return [inputs[0], *graph.loop(inputs[:count], results)]  # nobody reads the last condition
