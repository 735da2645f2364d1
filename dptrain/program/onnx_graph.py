"""An ONNX graph as plain data, written by ops without the onnx library.

An op's record has its ONNX form: an operator for the same operands (`Op.onnx`), or a rule (`Op.onnx_rule`).
`saving/onnx_file.py` writes the file.

Source: the operators of opset 18, https://onnx.ai/onnx/operators.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.shapes import Shape, row_axis
from dptrain.program.tensor import Node, Tensor
from dptrain.runtime.types import type_of

Array = npt.NDArray[Any]

_COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")


@dataclass(frozen=True)
class Value:
    """An edge of the graph: the name of an input, constant or node's output, and its type."""

    name: str
    dtype: np.dtype[Any]


@dataclass(frozen=True, eq=False)
class OnnxBody:
    """The graph of a loop's step, whose nodes also read constants and values of the graphs around it."""

    inputs: Sequence[Value]
    outputs: Sequence[Value]
    nodes: "Sequence[OnnxNode]"
    results: Sequence[Tensor] = ()  # that are the outputs, if runtimes must know their shapes


@dataclass(frozen=True)
class OnnxNode:
    """An operator by ONNX's name ("Add"), names of inputs and outputs, and attributes: numbers, or tuples."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    body: OnnxBody | None = None
    otherwise: OnnxBody | None = None  # of an If

    def reads(self) -> set[str]:
        """Return the names of all that it reads, and of its bodies' own values."""
        bodies = [body for body in (self.body, self.otherwise) if body is not None]
        return set(self.inputs).union(*(node.reads() for body in bodies for node in body.nodes))


class OnnxGraph:
    """Collects nodes and constants, of a body in `outer`; their names begin with a slash, unlike others'."""

    def __init__(self, outer: "OnnxGraph | None" = None, name: str = "step") -> None:
        self._outer = outer
        self._prefix: str = "" if outer is None else f"{outer._prefix}/{name}_{len(outer.nodes)}"
        self.nodes: list[OnnxNode] = []
        self.constants: dict[str, Array] = {} if outer is None else outer.constants
        self._batch: tuple[Value, int] | None = None  # an input, and its axis that counts the rows
        self._rows: dict[int, Value] = {}

    def add_input(self, name: str, tensor: Tensor) -> Value:
        """Return an input; the first one with rows defines their number."""
        value = Value(name, tensor.dtype)
        axis = row_axis(tensor.shape)
        length = None if axis is None else tensor.shape[axis]
        if self._batch is None and axis is not None and isinstance(length, Dim) and length.scale == 1:
            self._batch = value, axis
        return value

    def constant(self, array: npt.ArrayLike, dtype: npt.DTypeLike | None = None, name: str = "") -> Value:
        """Return a constant."""
        value_array = np.asarray(array, dtype)
        name = name or f"/constants/{len(self.constants)}"
        self.constants[name] = value_array
        return Value(name, value_array.dtype)

    def node(self, kind: str, *inputs: Value, dtype: npt.DTypeLike | None = None, **attributes: Any) -> Value:
        """Add a node and return its output, by default of the first input's type."""
        output = Value(self._name(kind), np.dtype(inputs[0].dtype if dtype is None else dtype))
        self.nodes.append(OnnxNode(kind, tuple(operand.name for operand in inputs), (output.name,), attributes))
        return output

    def _name(self, kind: str) -> str:
        return f"{self._prefix}/{kind.lower()}_{len(self.nodes)}"

    def scan(self, carries: Sequence[Value], slices: Sequence[Value], body: OnnxBody) -> Sequence[Value]:
        """Add a Scan of stacked inputs and return its outputs: the last carries, and stacked outputs."""
        name, inputs = self._name("Scan"), tuple(operand.name for operand in (*carries, *slices))
        outputs = [Value(f"{name}/{number}", output.dtype) for number, output in enumerate(body.outputs)]
        names = tuple(output.name for output in outputs)
        self.nodes.append(OnnxNode("Scan", inputs, names, {"num_scan_inputs": len(slices)}, body))
        return outputs

    def choose(self, condition: Value, body: OnnxBody, otherwise: OnnxBody) -> Sequence[Value]:
        """Add an If and return its outputs."""
        name = self._name("If")
        outputs = [Value(f"{name}/{number}", output.dtype) for number, output in enumerate(body.outputs)]
        names = tuple(output.name for output in outputs)
        self.nodes.append(OnnxNode("If", (condition.name,), names, {}, body, otherwise))
        return outputs

    def loop(self, carries: Sequence[Value], body: OnnxBody) -> Sequence[Value]:
        """Add a Loop that goes on while its first carry is true, and return the other last carries."""
        name, inputs = self._name("Loop"), ("", *(carry.name for carry in carries))
        outputs = [Value(f"{name}/{number}", output.dtype) for number, output in enumerate(body.outputs[1:])]
        self.nodes.append(OnnxNode("Loop", inputs, tuple(output.name for output in outputs), {}, body))
        return outputs

    def body(self, inputs: Sequence[Value], outputs: Sequence[Value], results: Sequence[Tensor] = ()) -> OnnxBody:
        """Return the body that this graph is, with outputs of its own."""
        ends = [self.node("Identity", output) for output in outputs]
        return OnnxBody(inputs, ends, needed(self.nodes, {end.name for end in ends}), results)

    def argument(self, number: int, dtype: np.dtype[Any]) -> Value:
        """Return an input of a body."""
        return Value(f"{self._prefix}/input_{number}", dtype)  # no operator has that name

    def cast(self, value: Value, dtype: npt.DTypeLike) -> Value:
        """Return a value in another type."""
        target = np.dtype(dtype)
        if value.dtype == target:
            return value
        if value.name in self.constants:
            return self.constant(self.constants[value.name].astype(target))
        return self.node("Cast", value, dtype=target, to=target)

    def computed(self, value: Value, dtype: npt.DTypeLike | None = None) -> Value:
        """Return a value in a type fit for computing: `dtype`, by default its own, or a wider one."""
        return self.cast(value, type_of(np.dtype(value.dtype if dtype is None else dtype)).onnx)

    def transpose(self, value: Value, axes: Sequence[int]) -> Value:
        """Return a value with its axes in another order."""
        if value.name in self.constants:
            return self.constant(np.ascontiguousarray(self.constants[value.name].transpose(axes)))
        return self.node("Transpose", value, perm=tuple(axes))

    def vector(self, numbers: Sequence[int]) -> Value:
        """Return integers as a vector of int64, with row counts computed at each execution."""
        if not any(isinstance(n, Dim) for n in numbers):
            return self.constant([int(n) for n in numbers], np.int64)
        parts = [self.rows(n.scale) if isinstance(n, Dim) else self.constant([int(n)], np.int64) for n in numbers]
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, axis=0)

    def rows(self, scale: int = 1) -> Value:
        """Return `scale` times the number of rows, a vector of one int64; ConfigError if no input has rows."""
        if self._outer is not None:
            return self._outer.rows(scale)
        if self._batch is None:
            raise ConfigError("not supported in ONNX: a number of rows where no input has rows")
        if scale not in self._rows:
            if scale == 1:
                value, axis = self._batch
                self._rows[1] = self.node("Shape", value, dtype=np.int64, start=axis, end=axis + 1)
            else:
                self._rows[scale] = self.node("Mul", self.rows(), self.constant([scale], np.int64))
        return self._rows[scale]

    def reshape(self, value: Value, shape: Shape) -> Value:
        """Return the elements in another shape."""
        counted = [place for place, n in enumerate(shape) if isinstance(n, Dim)]
        if len(counted) == 1 and all(shape):
            lengths = self.constant([-1 if place in counted else int(n) for place, n in enumerate(shape)], np.int64)
            return self.node("Reshape", value, lengths)
        return self.node("Reshape", value, self.vector(shape), allowzero=1)

    def expand(self, value: Value, shape: Shape) -> Value:
        """Return a value repeated to a shape."""
        return self.node("Expand", value, self.vector(shape))

    def flip(self, value: Value) -> Value:
        """Return a value with its first axis reversed."""
        bounds = ([-1], [np.iinfo(np.int64).min], [0], [-1])
        return self.node("Slice", value, *(self.constant(bound, np.int64) for bound in bounds))

    def add(self, tensors: Iterable[Tensor], values: dict[Tensor, Value]) -> None:
        """Add the `values` of tensors, in topological order, that are not there; errors as for `lower`."""
        several: dict[Node, Sequence[Value]] = {}  # of nodes with several values
        for tensor in tensors:
            if tensor in values:
                continue
            inputs = [values[operand] for operand in tensor.inputs]
            if tensor.op is None and tensor.counts_rows:
                rows = self.rows(int(tensor.attributes["rows"]))
                values[tensor] = self.cast(self.reshape(rows, ()), tensor.dtype)
            elif tensor.op is None:
                values[tensor] = self.constant(tensor.numpy())
            elif tensor.op.has_values and tensor.op.onnx_rule is not None:
                if tensor.node not in several:
                    several[tensor.node] = tensor.op.onnx_rule(self, tensor, *inputs)
                values[tensor] = several[tensor.node][tensor.index]
            else:
                values[tensor] = self.lower(tensor, inputs)

    def lower(self, tensor: Tensor, inputs: Sequence[Value]) -> Value:
        """Return the output of a tensor's op; ConfigError, naming op and layer, if ONNX cannot express it."""
        op = tensor.op
        assert op is not None
        if not type_of(tensor.dtype).is_onnx:
            raise refusal(tensor, f"of {tensor.dtype.name}")
        if op.onnx_rule is not None:
            value: Value = op.onnx_rule(self, tensor, *inputs)
        elif op.onnx is not None:
            value = self.elements(op.onnx, tensor, inputs)
        else:
            raise refusal(tensor)
        return self.cast(value, tensor.dtype)

    def elements(self, kind: str, tensor: Tensor, inputs: Sequence[Value]) -> Value:
        """Return an operator's output for operands of one type: the output's, or for a comparison their common one."""
        dtype, compares = tensor.dtype, kind in _COMPARISONS
        if compares:
            floats = [operand.dtype for operand in inputs if operand.dtype.kind == "f"]
            dtype = np.result_type(*(floats or [operand.dtype for operand in inputs]))
        operands = [self.computed(operand, dtype) for operand in inputs]
        return self.node(kind, *operands, dtype=np.bool_ if compares else operands[0].dtype)


def needed(nodes: Sequence[OnnxNode], names: set[str]) -> list[OnnxNode]:
    """Return the nodes on which values with these names depend, in order."""
    kept, read = list[OnnxNode](), set(names)
    for node in reversed(nodes):
        if not read.isdisjoint(node.outputs):
            kept.append(node)
            read |= node.reads()
    return kept[::-1]


def refusal(tensor: Tensor, reason: str = "") -> ConfigError:
    """Return the error that names an op that ONNX cannot express, and its layer."""
    assert tensor.op is not None
    layer = f" in {tensor.name!r}" if tensor.name else ""
    return ConfigError(f"not supported in ONNX: op {tensor.op.name!r}{layer}{f' {reason}' if reason else ''}")
