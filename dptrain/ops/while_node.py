"""The op of loops of unknown length: steps of a body as long as its first carry, a boolean, is true.

Its inputs are the initial carries and captures, its values the final carries.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from dptrain.errors import ConfigError
from dptrain.ops.scan import letters_of_loop
from dptrain.program.body import Body
from dptrain.program.gradient import topological
from dptrain.program.lowering import LoopLowering
from dptrain.program.onnx_graph import OnnxGraph, Value
from dptrain.program.op import Op
from dptrain.program.schedule.loops import operations_of, repeat_of
from dptrain.program.tensor import Tensor


def _compute(*arrays: Any, body: Body, out: Any) -> None:
    raise AssertionError("executables run the body of a loop, not its op")


WHILE = Op(
    _compute,
    lambda *inputs, body: body.shapes(),
    letters_of_loop,
    lambda *inputs, body: body.dtypes(),
    lowering=LoopLowering(None),
    has_values=True,
    operations=operations_of,
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
    repeat, step = repeat_of(value), OnnxGraph(graph)
    arguments = [step.argument(carry.value, carry.leaf.dtype) for carry in repeat.carries]
    values = {carry.leaf: argument for carry, argument in zip(repeat.carries, arguments, strict=True)}
    values |= {capture.leaf: inputs[capture.input] for capture in repeat.captures}
    results = repeat.body.results
    step.add(topological(results), values)
    step_index = step.argument(len(arguments), np.dtype(np.int64))
    of_step = step.body([step_index, *arguments], [values[end] for end in results], results)
    firsts = [inputs[carry.input] for carry in repeat.carries if carry.input is not None]
    return [firsts[0], *graph.loop(firsts, of_step)]  # nobody reads the last condition
