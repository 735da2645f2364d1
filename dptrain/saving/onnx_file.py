"""ONNX: the program of `predict` for other runtimes.

A file has one graph with a few nodes for each op, from the op's record (`program.onnx_graph`). Inputs have the names of
the model's inputs and any number of rows; outputs are `output`, or named as the model's. Preprocessing by layers
(Normalization, Rescaling) is included. Preprocessing in Python, such as numbering a table's categories, is not: the
file's metadata has it as "preprocessing", JSON as in a `.keras` file. The operators are those of opset 18, which ONNX
Runtime 1.14 and later execute.
"""

import itertools
import json
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program import tree
from dptrain.program.onnx_graph import OnnxBody, OnnxGraph, OnnxNode, Value, needed
from dptrain.program.program import Program
from dptrain.program.tensor import Tensor
from dptrain.runtime.extras import pip_install
from dptrain.saving.program import open_axes, prediction
from dptrain.version import __version__

OPSET, IR_VERSION = 18, 8
# Values tried for unknown lengths in turn: the computation must not differ. Modulo strides up to 10 they leave 0 and 1,
# between which all paddings differ; twice as much makes all other lengths differ.
_LENGTHS = 2520, 2521, 5040
# The size limit of protocol buffers, the file's format.
_MAX_BYTES = 2**31 - 1


def onnx_module() -> ModuleType:
    """Return onnx, or raise a ConfigError that says how to install it."""
    try:
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
    except ImportError as error:
        raise ConfigError(f"ONNX files need onnx: {pip_install('onnx')} ({error})") from error
    module: ModuleType = onnx
    return module


def encode(model: Any) -> bytes:
    """Return the content of a file."""
    onnx = onnx_module()
    axes = open_axes(model)
    program = prediction(model, _LENGTHS[0] if axes else None)
    if program.updates:
        named = ", ".join(variable._path for variable in program.updates)
        raise ConfigError(f"not supported in ONNX: a prediction that changes variables ({named})")
    names = model._expected_data.input_names
    if len(names) != len(program.inputs):
        names = [_name(path, "input") for path in program.inputs]
    inputs = dict(zip(program.inputs, names, strict=True))
    outputs = {path: _name("" if path == "output" else path, "output") for path in tree.leaves(model._prediction)}
    outputs = {path: f"output_{name}" if name in names else name for path, name in outputs.items()}
    onnx_model = model_of(program, inputs, outputs, model.name)
    if axes:
        for length in _LENGTHS[1:]:
            _open_axes(model, onnx_model, _of_length(model, length, inputs, outputs))
    if model._preprocessing is not None:
        onnx.helper.set_model_props(onnx_model, {"preprocessing": json.dumps(model._preprocessing.to_dict())})
    size = onnx_model.ByteSize()
    if size > _MAX_BYTES:
        raise ConfigError(f"not supported in ONNX: a model of {size:,} bytes in one file, which holds 2 GB at most")
    onnx.checker.check_model(onnx_model)
    content: bytes = onnx_model.SerializeToString(deterministic=True)
    return content


def _of_length(model: Any, length: int, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Any:
    try:
        return model_of(prediction(model, length), inputs, outputs, model.name)
    except ConfigError as error:
        problem = f"model {model.name!r} does not take all lengths that are None, such as {length}"
        raise ConfigError(f"not supported in ONNX: {problem}: {error}") from error


def _open_axes(model: Any, exported: Any, other: Any) -> None:
    # Lengths become symbolic in which the two exports, for inputs of two lengths, differ.
    for node, same in itertools.zip_longest(exported.graph.node, other.graph.node):
        if node != same:
            kind = "" if node is None else f": {node.op_type} {node.name!r}"
            raise ConfigError(f"not supported in ONNX: model {model.name!r} depends on lengths that are None{kind}")
    if list(exported.graph.initializer) != list(other.graph.initializer):
        pairs = zip(exported.graph.initializer, other.graph.initializer, strict=True)
        first = next(constant.name for constant, same in pairs if constant != same)
        users = ", ".join(f"{node.op_type} {node.name!r}" for node in exported.graph.node if first in node.input)
        raise ConfigError(f"not supported in ONNX: model {model.name!r} depends on lengths that are None: {users}")
    for ends, same_ends in ((exported.graph.input, other.graph.input), (exported.graph.output, other.graph.output)):
        for end, same in zip(ends, same_ends, strict=True):
            dims = end.type.tensor_type.shape.dim
            for axis, (dim, same_dim) in enumerate(zip(dims, same.type.tensor_type.shape.dim, strict=True)):
                if dim != same_dim and not dim.dim_param:
                    dim.Clear()
                    dim.dim_param = f"{end.name}_{axis}"


def _name(path: str, kind: str) -> str:
    """Return the name of an input or output, which may only have a number."""
    return f"{kind}_{path}" if path[:1].isdigit() else path or kind


def model_of(program: Program, inputs: Mapping[str, str], outputs: Mapping[str, str], name: str) -> Any:
    """Return a program of symbolic rows as an ONNX model; `inputs` and `outputs` give names in the file."""
    onnx, graph = onnx_module(), OnnxGraph()
    values: dict[Tensor, Value] = {}
    for path, tensor in program.inputs.items():
        values[tensor] = graph.add_input(inputs[path], tensor)
    for variable, tensor in program.state.items():
        label = (
            variable._path if variable._path not in graph.constants else f"{variable._path} ({len(graph.constants)})"
        )
        values[tensor] = graph.constant(variable.numpy(), name=label)
    graph.add(program.tensors, values)
    results = {path: program.outputs[path] for path in outputs}
    for path, tensor in results.items():  # under their own names, whatever made them
        graph.nodes.append(OnnxNode("Identity", (values[tensor].name,), (outputs[path],), {}))
    nodes = needed(graph.nodes, set(outputs.values()))
    read = set[str]().union(*(node.reads() for node in nodes))
    return onnx.helper.make_model(
        onnx.helper.make_graph(
            [_node(onnx, node) for node in nodes],
            re.sub(r"\W", "_", name) or "model",
            [_value_info(onnx, inputs[path], tensor) for path, tensor in program.inputs.items()],
            [_value_info(onnx, outputs[path], tensor) for path, tensor in results.items()],
            [onnx.numpy_helper.from_array(array, each) for each, array in graph.constants.items() if each in read],
        ),
        producer_name="dptrain",
        producer_version=__version__,
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )


def _node(onnx: ModuleType, node: OnnxNode) -> Any:
    attributes = {
        name: onnx.helper.np_dtype_to_tensor_dtype(value) if isinstance(value, np.dtype) else value
        for name, value in node.attributes.items()
    }
    if node.body is not None:
        attributes["body" if node.otherwise is None else "then_branch"] = _body(
            onnx, node.body, scalars=2 if node.kind == "Loop" else 0
        )
    if node.otherwise is not None:
        attributes["else_branch"] = _body(onnx, node.otherwise)
    return onnx.helper.make_node(node.kind, node.inputs, node.outputs, name=node.outputs[0], **attributes)


def _body(onnx: ModuleType, body: OnnxBody, scalars: int = 0) -> Any:
    """Return a body, the first of whose inputs are scalars."""

    def info(value: Value) -> Any:
        kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        return onnx.helper.make_tensor_value_info(value.name, kind, () if value in body.inputs[:scalars] else None)

    if body.results:
        pairs = zip(body.outputs, body.results, strict=True)
        outputs = [_value_info(onnx, value.name, tensor) for value, tensor in pairs]
    else:
        outputs = list(map(info, body.outputs))
    return onnx.helper.make_graph(
        [_node(onnx, node) for node in body.nodes], "step", list(map(info, body.inputs)), outputs
    )


def _value_info(onnx: ModuleType, name: str, tensor: Tensor) -> Any:
    kind = onnx.helper.np_dtype_to_tensor_dtype(tensor.dtype)
    shape = [
        ("rows" if length.scale == 1 else f"{length.scale}*rows") if hasattr(length, "scale") else length
        for length in tensor.shape
    ]
    return onnx.helper.make_tensor_value_info(name, kind, shape)
