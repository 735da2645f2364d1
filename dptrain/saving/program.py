"""A program in a file: its ops by name with their attributes, and its weights. Nothing of the Python that traced it.

The format is that of `saving.state`: safetensors, with a checksum. Tensors are the variables' values by path, and
constants "constants/0", "constants/1", ... The JSON has
    dtype             the floating-point type that the model computes in
    inputs, outputs   names, nested as the model's
    nodes             in order; {"input": name, "shape", "dtype"}, {"variable": path}, {"constant": name},
                      {"rows": scale, "dtype"} for a multiple of the number of rows, and
                      {"op": name, "inputs": [numbers of nodes], "attributes": {...}}
    results           numbers of the nodes that are the outputs, by name
    updates           numbers of the nodes that are the new values of variables, by path
A length that counts rows of the batch is {"rows": scale}, so that the program can be made for any number of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import dptrain.ops.random  # noqa: F401  # with all of the vocabulary: a file names ops by their names
from dptrain.errors import ConfigError, DataError
from dptrain.program import tree
from dptrain.program.dims import Dim, is_number, read
from dptrain.program.execute import evaluate
from dptrain.program.program import Program, trace
from dptrain.program.schema import check_attributes, is_length, is_type_name
from dptrain.program.shapes import is_open, size
from dptrain.program.steps import unrolled
from dptrain.program.tensor import OPS, Tensor, Variable, constant, placeholder, row_count, tracing, watching
from dptrain.runtime.text import short
from dptrain.saving.reading import reading
from dptrain.saving.state import Arrays, pack, unpack

_KIND = "dptrain program 1"
_ADVICE = "export it again"
# Most elements of constants that reading recomputes from others.
_MAX_FOLDED = 1 << 24
# Most elements of an op's result for two rows.
_MAX_CHECKED = 1 << 28


def attribute_of(value: Any) -> Any:
    """Return an op's attribute in JSON."""
    if isinstance(value, Dim):
        return {"rows": value.scale}
    if isinstance(value, tuple | list):
        return [attribute_of(entry) for entry in value]
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"not supported: attribute {value!r} of an op in a file")


def attribute_from(value: Any, rows: int | None = None) -> Any:
    """Return the attribute that `attribute_of` wrote, for a number of rows."""
    if isinstance(value, Mapping):
        scale = value["rows"]
        if not is_length(scale) or len(value) > 1:
            raise DataError(f"{short(dict(value))}: expected a length")
        return Dim.rows(rows, scale)
    return tuple(attribute_from(entry, rows) for entry in value) if isinstance(value, list) else value


def encode(model: Any) -> bytes:
    """Return the program of a model's `predict_step`."""
    description, arrays = _described(prediction(model))
    symbols = model._input_symbols
    description |= {
        "dtype": model.dtype_policy.name,
        "inputs": tree.map_leaves(lambda path, _: path or "input", symbols),
    }
    return pack(arrays, description | {"outputs": model._prediction}, _KIND)


def prediction(model: Any, length: int | None = None) -> Program:
    """Return the program of a model's `predict_step`, for any number of rows.

    The first unknown length of an input becomes `length`, the second 2520 more, and so on.
    """
    symbols = model._input_symbols
    if length is None and any(is_open(symbol.shape[1:]) for symbol in tree.leaves(symbols)):
        shapes = ", ".join(str(read(symbol.shape)) for symbol in tree.leaves(symbols))
        raise ConfigError(f"not supported: exporting a model of inputs {shapes}, where more than the rows is None")

    def predicted(*tensors: Tensor) -> Mapping[str, Any]:
        each = iter(tensors)
        outputs: Mapping[str, Any] = model._make_step("predict").function(
            (tree.map_leaves(lambda *_: next(each), symbols),)
        )
        return outputs

    if model._fixed_batch_size is not None:
        raise ConfigError(f"not supported: exporting a model whose batch_size is fixed, to {model._fixed_batch_size}")
    rows = Dim.rows(2)
    lengths = {name: 2520 * number + (length or 0) for number, name in enumerate(open_axes(model))}
    inputs = {
        path or "input": (
            (rows, *(n if is_number(n) else lengths[n.name] for n in symbol.shape[1:])),
            model._data_dtype if symbol.dtype.kind in "fV" else symbol.dtype,
        )
        for path, symbol in tree.flatten(symbols)
    }
    program = unrolled(trace(predicted, inputs))
    if missing := [name for name in tree.leaves(model._prediction) if name not in program.outputs]:
        raise ConfigError(f"not supported: output {missing[0]!r} does not depend on the inputs")
    if program.shape_specialised:
        raise ConfigError(
            "not supported: a prediction in whose program the number of rows is a number of Python's; compute with "
            "x.shape[0] in ops alone"
        )
    return program


def open_axes(model: Any) -> list[str]:
    """Return the names of unknown lengths of a model's inputs, except the rows, each once."""
    shapes = [symbol.shape[1:] for symbol in tree.leaves(model._input_symbols)]
    return list(dict.fromkeys(n.name for shape in shapes for n in shape if not is_number(n)))


def _described(program: Program) -> tuple[dict[str, Any], Arrays]:
    numbers: dict[Tensor, int] = {}
    nodes: list[dict[str, Any]] = []
    arrays: Arrays = {}

    def add(tensor: Tensor, node: dict[str, Any]) -> None:
        numbers[tensor] = len(nodes)
        nodes.append(node)

    for name, tensor in program.inputs.items():
        add(tensor, {"input": name, "shape": attribute_of(tensor.shape), "dtype": tensor.dtype.name})
    for variable, tensor in program.state.items():
        path = variable._path if variable._path not in arrays else f"{variable._path} ({len(arrays)})"
        add(tensor, {"variable": path})
        arrays[path] = variable.numpy()
    paths = dict(zip(program.state, list(arrays), strict=True))
    for tensor in program.tensors:
        if tensor in numbers:
            continue
        if tensor.op is not None:
            if OPS.get(tensor.op.name) is not tensor.op:
                raise ConfigError(f"not supported: {tensor.op}, an op of your own, in an exported program")
            attributes = {name: attribute_of(value) for name, value in tensor.attributes.items()}
            inputs = [numbers[each] for each in tensor.inputs]
            add(tensor, {"op": tensor.op.name, "inputs": inputs, "attributes": attributes})
        elif tensor.counts_rows:
            add(tensor, {"rows": tensor.attributes["rows"], "dtype": tensor.dtype.name})
        else:
            arrays[f"constants/{len(nodes)}"] = tensor.numpy()
            add(tensor, {"constant": f"constants/{len(nodes)}"})
    results = {name: numbers[tensor] for name, tensor in program.outputs.items()}
    updates = {paths[variable]: numbers[tensor] for variable, tensor in program.updates.items()}
    return {"nodes": nodes, "results": results, "updates": updates}, arrays


@dataclass(eq=False)
class StoredProgram:
    """Content of a file."""

    where: str  # names the file in messages
    description: dict[str, Any]  # the JSON
    arrays: Arrays  # constants by name
    state: dict[str, Variable]  # variables by path

    def program(self, rows: int) -> Program:
        """Return the program for a number of rows; refuse what dptrain cannot execute."""
        tensors: list[Tensor] = []
        inputs: dict[str, Tensor] = {}
        state: dict[Variable, Tensor] = {}
        with reading(self.where), tracing():
            for node in self.description["nodes"]:
                if "op" in node:
                    tensors.append(self._call_op(node, tensors, rows))
                elif "input" in node:
                    shape = attribute_from(node["shape"], rows)
                    if not (isinstance(shape, tuple) and all(map(is_length, shape)) and is_type_name(node["dtype"])):
                        raise DataError(f"{self.where}: an input of {short(node['dtype'])} {short(node['shape'])}")
                    tensors.append(placeholder(shape, node["dtype"], f"input_{len(inputs)}"))
                    inputs[node["input"]] = tensors[-1]
                elif "variable" in node:
                    variable = self.state[node["variable"]]
                    tensors.append(placeholder(variable.shape, variable.dtype, variable._path, variable))
                    state[variable] = tensors[-1]
                elif "rows" in node:
                    if not (is_length(node["rows"]) and is_type_name(node["dtype"])):
                        raise DataError(f"{self.where}: {short(node['rows'])} times the rows, {short(node['dtype'])}")
                    tensors.append(row_count(constant(rows * node["rows"], node["dtype"]), node["rows"]))
                else:
                    tensors.append(constant(self.arrays[node["constant"]]))
            outputs = {name: tensors[number] for name, number in self.description["results"].items()}
            updates = {self.state[path]: tensors[number] for path, number in self.description["updates"].items()}
        return Program(inputs, state, outputs, updates, rows=rows)

    def _call_op(self, node: Mapping[str, Any], tensors: Sequence[Tensor], rows: int) -> Tensor:
        op, numbers = OPS.get(node["op"]), node["inputs"]
        if op is None:
            raise DataError(f"{self.where}: op {str(node['op'])[:80]!r}, which this version does not have")
        if not all(type(number) is int and 0 <= number < len(tensors) for number in numbers):
            raise DataError(f"{self.where}: op {op.name!r} has inputs {str(numbers)[:80]}, of {len(tensors)}")
        operands = [tensors[number] for number in numbers]
        if op.operands is not None and len(operands) != op.operands:
            raise DataError(f"{self.where}: op {op.name!r} of {len(operands)} inputs, expected {op.operands}")
        attributes = {name: attribute_from(value, rows) for name, value in node["attributes"].items()}
        check_attributes(op, attributes, self.where)
        if all(operand.value is not None for operand in operands):
            shape = op.shape(*(operand.shape for operand in operands), **attributes)
            if size(shape) > _MAX_FOLDED + 2 * math.prod(int(n) for operand in operands for n in operand.shape):
                raise DataError(f"{self.where}: a constant of shape {shape}, too large to be made")
        return op(*operands, **attributes)


def decode(content: bytes, where: str) -> StoredProgram:
    """Return the program that `encode` wrote; `where` names it in messages."""
    description, arrays = unpack(content, where, _KIND, _ADVICE)
    with reading(where):
        paths = [node["variable"] for node in description["nodes"] if "variable" in node]
        state = {path: Variable(arrays.pop(path), path, trainable=False) for path in paths}
    stored = StoredProgram(where, description, arrays, state)
    _require_sound(stored.program(2), where)  # report errors now
    return stored


def _require_sound(program: Program, where: str) -> None:
    """Refuse a program whose ops, run by NumPy on zeros, fail (an index, say) or miss their declared shapes."""
    for tensor in program.tensors:
        if tensor.op is not None and size(tensor.shape) > _MAX_CHECKED:
            raise DataError(f"{where}: {tensor.op.name!r} of shape {tensor.shape} for two rows, too large")

    def check(tensor: Tensor) -> None:
        assert tensor.op is not None
        assert tensor.value is not None
        if tensor.value.shape != tensor.shape:
            raise DataError(f"{where}: {tensor.op.name!r} gives {tensor.value.shape}, expected {tensor.shape}")

    with reading(where), watching(check):
        evaluate(program, {name: np.zeros(tensor.shape, tensor.dtype) for name, tensor in program.inputs.items()})
