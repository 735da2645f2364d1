"""A program in a file: its ops by name with their attributes, and its weights. Nothing of the Python that traced it.

The format is that of `saving.state`: safetensors, with a checksum. Tensors are the variables' values by path, and
constants "constants/0", "constants/1", ... The JSON has
    dtype             the floating-point type that the model computes in
    inputs, outputs   names, nested as the model's
    nodes             in order; {"input": name, "shape", "dtype"}, {"variable": path}, {"constant": name},
                      {"rows": scale, "dtype"} for a multiple of the number of rows, and
                      {"op": name, "inputs": [numbers of values], "attributes": {...}}
    results           numbers of the values that are the outputs, by name
    updates           numbers of the new values of variables, by path
    generation        {"length", "tokens", "stops"} of a program that generates: of its sequences, how many tokens it
                      knows, and of how many it can end a text
Values are numbered in order: a node has one, a loop one for each result of its body. A loop is an op "scan" with
    body              {"carries": count, "slices": count, "nodes": [...], "results": [numbers: next carries, stacked]}
whose values are numbered anew, from its carries, slices and captures on: the loop's inputs.
A length that counts rows of the batch is {"rows": scale}, so that the program can be made for any number of them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import dptrain.ops.random  # noqa: F401  # with all of the vocabulary: a file names ops by their names
from dptrain.errors import ConfigError, DataError
from dptrain.layers.low_rank import merging
from dptrain.ops.elementwise import add, less_equal, logical_and, maximum
from dptrain.ops.manipulation import reshape
from dptrain.ops.scan import SCAN
from dptrain.ops.while_node import WHILE
from dptrain.program import tree
from dptrain.program.body import Body, body_of, closed, has_body, has_loops, trimmed
from dptrain.program.codegen.views import marked
from dptrain.program.dims import Dim, is_number, read
from dptrain.program.execute import evaluate
from dptrain.program.gradient import topological
from dptrain.program.program import Program, trace
from dptrain.program.schedule.loops import repeat_of
from dptrain.program.schema import check_attributes, is_length, is_type_name
from dptrain.program.shapes import is_open, size
from dptrain.program.steps import step_of, zero_carry
from dptrain.program.tensor import OPS, Node, Tensor, Variable, constant, placeholder, row_count, tracing, watching
from dptrain.runtime.text import short
from dptrain.runtime.types import is_floating
from dptrain.saving.reading import reading
from dptrain.saving.state import Arrays, pack, unpack

_KIND = "dptrain program 1"
_ADVICE = "export it again"
# Most elements of constants that reading recomputes from others.
_MAX_FOLDED = 1 << 24
# Most elements of an op's result for two rows.
_MAX_CHECKED = 1 << 28
# What a file calls a loop that is a branch.
_BRANCH = "cond"
# How deep loops are nested at most, and the most steps of a loop, times those of the loops around it; of loops of
# unknown length the most steps in all, with those of the loops in them.
_MAX_NESTED, _MAX_STEPS = 8, 1 << 24
# The output of a program with such loops that counts their steps.
STEPS = "steps of loops"


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
    inputs = tree.map_leaves(lambda path, _: path or "input", model._input_symbols)
    return packed(prediction(model), model.dtype_policy.name, inputs, model._prediction)


def packed(program: Program, dtype: str, inputs: Any, outputs: Any, **facts: Any) -> bytes:
    """Return a program as the content of a file, with names of inputs and outputs, nested, and other facts."""
    description, arrays = _described(program)
    return pack(arrays, description | {"dtype": dtype, "inputs": inputs, "outputs": outputs} | facts, _KIND)


def prediction(model: Any, length: int | None = None) -> Program:
    """Return the program of a model's `predict_step`, for any number of rows, LoRA merged.

    The first unknown length of an input becomes `length`, the second 2520 more, and so on.
    """
    symbols = model._input_symbols
    if length is None and any(is_open(symbol.shape[1:]) for symbol in tree.leaves(symbols)):
        shapes = ", ".join(str(read(symbol.shape)) for symbol in tree.leaves(symbols))
        raise ConfigError(f"not supported: exporting a model with inputs {shapes}; only the batch axis may be None")

    def predicted(*tensors: Tensor) -> Mapping[str, Any]:
        each = iter(tensors)
        outputs: Mapping[str, Any] = model._make_step("predict").function(
            (tree.map_leaves(lambda *_: next(each), symbols),)
        )
        return outputs

    if model._fixed_batch_size is not None:
        raise ConfigError(f"not supported: exporting a model with a fixed batch_size, {model._fixed_batch_size}")
    rows = Dim.rows(2)
    lengths = {name: 2520 * number + (length or 0) for number, name in enumerate(open_axes(model))}
    inputs = {
        path or "input": (
            (rows, *(n if is_number(n) else lengths[n.name] for n in symbol.shape[1:])),
            model._data_dtype if is_floating(symbol.dtype) else symbol.dtype,
        )
        for path, symbol in tree.flatten(symbols)
    }
    with merging(model.weights):
        program = trace(predicted, inputs)
    if missing := [name for name in tree.leaves(model._prediction) if name not in program.outputs]:
        raise ConfigError(f"not supported: output {missing[0]!r} does not depend on the inputs")
    if program.shape_specialised:
        raise ConfigError(
            "not supported: exporting a prediction that uses the number of rows as a Python integer; pass x.shape[0] "
            "to ops only"
        )
    return program


def open_axes(model: Any) -> list[str]:
    """Return the names of unknown lengths of a model's inputs, except the rows, each once."""
    shapes = [symbol.shape[1:] for symbol in tree.leaves(model._input_symbols)]
    return list(dict.fromkeys(n.name for shape in shapes for n in shape if not is_number(n)))


def _described(program: Program) -> tuple[dict[str, Any], Arrays]:
    arrays: Arrays = {}
    described = _Description(arrays)
    for name, tensor in program.inputs.items():
        described.add(tensor, {"input": name, "shape": attribute_of(tensor.shape), "dtype": tensor.dtype.name})
    for variable, tensor in program.state.items():
        path = variable._path if variable._path not in arrays else f"{variable._path} ({len(arrays)})"
        described.add(tensor, {"variable": path})
        arrays[path] = variable.numpy()
    paths = dict(zip(program.state, list(arrays), strict=True))
    described.compute(program.tensors)
    results = {name: described.numbers[tensor] for name, tensor in program.outputs.items()}
    updates = {paths[variable]: described.numbers[tensor] for variable, tensor in program.updates.items()}
    return {"nodes": described.nodes, "results": results, "updates": updates}, arrays


class _Description:
    """Nodes of a program or of a body, and numbers of their values; constants go to `arrays`."""

    def __init__(self, arrays: Arrays, leaves: Iterable[Tensor] = (), steps: int = 1, nested: int = 0) -> None:
        self._arrays, self._steps, self._nested = arrays, steps, nested
        self.nodes: list[dict[str, Any]] = []
        self.numbers = {tensor: number for number, tensor in enumerate(leaves)}
        self._count = len(self.numbers)
        self._loops: dict[Node, int] = {}  # the number of a loop's first value

    def add(self, tensor: Tensor, node: dict[str, Any]) -> None:
        self.numbers[tensor] = self._count
        self._count += 1
        self.nodes.append(node)

    def compute(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor in self.numbers:
                continue
            if has_body(tensor):
                if tensor.node not in self._loops:
                    self._add_loop(tensor.node)
                self.numbers[tensor] = self._loops[tensor.node] + tensor.index
            elif tensor.op is not None:
                if OPS.get(tensor.op.name) is not tensor.op:
                    raise ConfigError(f"not supported: {tensor.op}, a custom op, in an exported program")
                attributes = {name: attribute_of(value) for name, value in tensor.attributes.items()}
                inputs = [self.numbers[operand] for operand in tensor.inputs]
                self.add(tensor, {"op": tensor.op.name, "inputs": inputs, "attributes": attributes})
            elif tensor.counts_rows:
                self.add(tensor, {"rows": tensor.attributes["rows"], "dtype": tensor.dtype.name})
            else:
                name = f"constants/{len(self._arrays)}"
                self._arrays[name] = tensor.numpy()
                self.add(tensor, {"constant": name})

    def _add_loop(self, node: Node) -> None:
        repeat = repeat_of(node)
        body, length = repeat.body, repeat.length
        attributes = {} if length is None else {"length": length, "reverse": repeat.reverse}
        steps = self._steps * max(length or 0, 1)
        if self._nested == _MAX_NESTED or steps > _MAX_STEPS:
            raise ConfigError(f"not supported: a loop of {_limits()} in an exported program")
        zeros = {carry: zero_carry(carry.leaf) for carry in repeat.carries if carry.input is None}
        self.compute(list(zeros.values()))
        firsts = (zeros[carry] if carry.input is None else node.inputs[carry.input] for carry in repeat.carries)
        operands = (node.inputs[operand.input] for operand in repeat.operands)
        inputs = [self.numbers[tensor] for tensor in (*firsts, *operands)]
        described = _Description(self._arrays, body.placeholders, steps, self._nested + 1)
        described.compute(topological(body.results))
        self._loops[node] = self._count
        self._count += len(body.results)
        self.nodes.append(
            {
                "op": _BRANCH if body.guarded else node.op.name,
                "inputs": inputs,
                "attributes": attributes,
                "body": {
                    "carries": len(body.carries),
                    "slices": len(body.slices),
                    "nodes": described.nodes,
                    "results": [described.numbers[tensor] for tensor in body.results],
                },
            }
        )


def _limits() -> str:
    return f"more than {_MAX_STEPS:,} steps, those of loops around it included, or within {_MAX_NESTED} others"


@dataclass(eq=False)
class StoredProgram:
    """Content of a file."""

    where: str  # names the file in messages
    description: dict[str, Any]  # the JSON
    arrays: Arrays  # constants by name
    state: dict[str, Variable]  # variables by path

    def program(self, rows: int) -> Program:
        """Return the program for a number of rows; refuse what dptrain cannot execute."""
        with reading(self.where), tracing():
            reader = _Reader(self.where, self.arrays, self.state, rows)
            tensors = reader.tensors(self.description["nodes"])
            outputs = {name: tensors[number] for name, number in self.description["results"].items()}
            if reader.count.op is not None:
                if STEPS in outputs:
                    raise DataError(f"{self.where}: damaged: an output {STEPS!r}")
                outputs[STEPS] = reader.count
            updates = {self.state[path]: tensors[number] for path, number in self.description["updates"].items()}
            if has_loops([*outputs.values(), *updates.values()]):
                new = trimmed([*outputs.values(), *updates.values()])
                outputs = {name: new[tensor] for name, tensor in outputs.items()}
                updates = {variable: new[tensor] for variable, tensor in updates.items()}
        return Program(reader.inputs, reader.state, outputs, updates, rows=rows)

    def require_ended(self, steps: int) -> None:
        """Refuse the results of loops that were ended after the most steps, given the output `STEPS`."""
        if steps > _MAX_STEPS:
            raise DataError(f"{self.where}: loops of unknown length take more than {_MAX_STEPS:,} steps")


class _Reader:
    """Makes tensors of nodes, for a number of rows; attributes as of `StoredProgram` and `Program`.

    A loop of unknown length gets a further carry, `count`: the steps so far, at which it ends. Loops and branches
    around it hand the count on.
    """

    def __init__(self, where: str, arrays: Arrays, variables: Mapping[str, Variable], rows: int) -> None:
        self._where, self._arrays, self._variables, self._rows = where, arrays, variables, rows
        self.inputs: dict[str, Tensor] = {}
        self.state: dict[Variable, Tensor] = {}
        self.count = constant(0, np.int64)  # the steps before the next node
        self._known_steps = 0  # of the loops of known length so far, in the same body

    def tensors(self, nodes: Any, leaves: Iterable[Tensor] = (), steps: int = 1, nested: int = 0) -> list[Tensor]:
        tensors = list(leaves)
        for node in nodes:
            if "body" in node:
                tensors += self._call_loop(node, tensors, steps, nested)
            elif "op" in node:
                tensors.append(self._call_op(node, tensors))
            elif "rows" in node:
                if not (is_length(node["rows"]) and is_type_name(node["dtype"])):
                    raise DataError(
                        f"{self._where}: damaged: a number of rows times {short(node['rows'])}, {short(node['dtype'])}"
                    )
                tensors.append(row_count(constant(self._rows * node["rows"], node["dtype"]), node["rows"]))
            elif "constant" in node:
                tensors.append(constant(self._arrays[node["constant"]]))
            elif nested:
                raise DataError(f"{self._where}: damaged: {short(node)} in the body of a loop")
            else:
                tensors.append(self._leaf(node))
        return tensors

    def _leaf(self, node: Mapping[str, Any]) -> Tensor:
        if "input" in node:
            shape = attribute_from(node["shape"], self._rows)
            if not (isinstance(shape, tuple) and all(map(is_length, shape)) and is_type_name(node["dtype"])):
                raise DataError(
                    f"{self._where}: damaged: an input of type {short(node['dtype'])} and shape {short(node['shape'])}"
                )
            leaf = self.inputs[node["input"]] = placeholder(shape, node["dtype"], f"input_{len(self.inputs)}")
            return leaf
        variable = self._variables[node["variable"]]
        leaf = self.state[variable] = placeholder(variable.shape, variable.dtype, variable._path, variable)
        return leaf

    def _values(self, numbers: Any, tensors: Sequence[Tensor], user: str) -> list[Tensor]:
        if not all(type(number) is int and 0 <= number < len(tensors) for number in numbers):
            raise DataError(
                f"{self._where}: damaged: {user} {short(numbers)}, expected numbers of {len(tensors)} tensors"
            )
        return [tensors[number] for number in numbers]

    def _call_op(self, node: Mapping[str, Any], tensors: Sequence[Tensor]) -> Tensor:
        op = OPS.get(node["op"])
        if op is None:
            raise DataError(f"{self._where}: op {str(node['op'])[:80]!r}, which this version does not have")
        operands = self._values(node["inputs"], tensors, f"op {op.name!r} has inputs")
        if op.operands is not None and len(operands) != op.operands:
            raise DataError(f"{self._where}: op {op.name!r} with {len(operands)} inputs, expected {op.operands}")
        attributes = {name: attribute_from(value, self._rows) for name, value in node["attributes"].items()}
        check_attributes(op, attributes, self._where)
        if all(operand.value is not None for operand in operands):
            shape = op.shape(*(operand.shape for operand in operands), **attributes)
            if size(shape) > _MAX_FOLDED + 2 * math.prod(int(n) for operand in operands for n in operand.shape):
                raise DataError(f"{self._where}: a constant of shape {shape} is too large")
        return op(*operands, **attributes)

    def _call_loop(
        self, node: Mapping[str, Any], tensors: Sequence[Tensor], steps: int, nested: int
    ) -> Sequence[Tensor]:
        body, attributes = node["body"], node["attributes"]
        count, slice_count = body["carries"], body["slices"]
        guarded, ends_by_carry = node["op"] == _BRANCH, node["op"] == WHILE.name
        length = self._length(node["op"], attributes)
        steps *= max(length, 1)
        if nested == _MAX_NESTED or steps > _MAX_STEPS:
            raise DataError(f"{self._where}: a loop of {_limits()}")
        operands = self._values(node["inputs"], tensors, "a loop has inputs")
        is_sound = is_length(count) and is_length(slice_count) and count + slice_count <= len(operands)
        if not is_sound or (ends_by_carry and slice_count):
            counts = f"{short(count)} carries and {short(slice_count)} slices"
            raise DataError(f"{self._where}: damaged: a loop with {counts}, but {len(operands)} inputs")
        ends = count + slice_count
        firsts, stacks, captured = operands[:count], operands[count:ends], operands[ends:]
        if guarded and (count or length != 1 or not captured or _kind(captured[0]) != ((), np.bool_)):
            raise DataError(f"{self._where}: damaged: a branch of {length} steps with {short(operands)}")
        if any(marked(stack.shape[:1]) != marked([length]) for stack in stacks):
            raise DataError(
                f"{self._where}: damaged: a loop of {length} steps over {short([stack.shape for stack in stacks])}"
            )
        carries = [placeholder(tensor.shape, tensor.dtype, "carry") for tensor in firsts]
        slices = [placeholder(tensor.shape[1:], tensor.dtype, "slice") for tensor in stacks]
        captures = [placeholder(tensor.shape, tensor.dtype, "capture") for tensor in captured]
        count_before, steps_before = self.count, self._known_steps
        if is_counted := _has_unknown_length(node):
            self.count = placeholder((), np.int64, "steps")
        first_count, self._known_steps = self.count, 0
        step_tensors = self.tensors(body["nodes"], [*carries, *slices, *captures], steps, nested + 1)
        results = self._values(body["results"], step_tensors, "a loop's body has results")
        following, stacked = results[:count], results[count:]
        if list(map(_kind, following)) != list(map(_kind, carries)):
            raise DataError(
                f"{self._where}: damaged: a loop changes its carries from {short(carries)} to {short(following)}"
            )
        if ends_by_carry and (not results or stacked or _kind(results[0]) != ((), np.dtype(np.bool_))):
            raise DataError(f"{self._where}: damaged: a while_loop with results {short(results)}")
        outside = dict(zip(captures, captured, strict=True))
        guard = captured[0] if guarded else None
        if is_counted and guarded:
            outside[first_count] = count_before
            stacked.append(self.count)
        elif is_counted:
            if ends_by_carry:
                self.count = add(self.count, 1 + self._known_steps)
                following[0] = logical_and(following[0], less_equal(self.count, _MAX_STEPS))
                firsts[0] = logical_and(firsts[0], less_equal(count_before, _MAX_STEPS))
            carries, firsts, following = [*carries, first_count], [*firsts, count_before], [*following, self.count]
        step, captured, _ = closed(carries, slices, following, stacked, outside, guard=guard)
        values = list((WHILE if ends_by_carry else SCAN).values(*firsts, *stacks, *captured, **attributes, body=step))
        self._known_steps = min(steps_before + length * (1 + self._known_steps), _MAX_STEPS)
        if is_counted:
            last_count = values.pop(-1 if guarded else count)
            self.count = maximum(count_before, reshape(last_count, ())) if guarded else last_count
        return values

    def _length(self, op: Any, attributes: Mapping[str, Any]) -> Any:
        """Return the least number of steps of a loop, after checking its attributes."""
        if op == WHILE.name and not attributes:
            return 0
        length, reverse = attributes.get("length"), attributes.get("reverse")
        is_sound = op in (_BRANCH, SCAN.name) and len(attributes) <= 2
        if not (is_sound and is_length(length) and isinstance(reverse, bool)):
            raise DataError(f"{self._where}: damaged: a loop {short(op)} with {short(attributes)}")
        return length


def _has_unknown_length(node: Mapping[str, Any]) -> bool:
    """Whether a loop, or one in it, is of unknown length."""
    return node["op"] == WHILE.name or any(
        "body" in inner and _has_unknown_length(inner) for inner in node["body"]["nodes"]
    )


def _kind(tensor: Tensor) -> Any:
    return marked(tensor.shape), tensor.dtype


def decode(content: bytes, where: str) -> StoredProgram:
    """Return the program that `encode` wrote; `where` names it in messages."""
    with reading(where):
        description, arrays = unpack(content, where, _KIND, _ADVICE)
        paths = [node["variable"] for node in description["nodes"] if "variable" in node]
        state = {path: Variable(arrays.pop(path), path, trainable=False) for path in paths}
    stored = StoredProgram(where, description, arrays, state)
    _require_sound(stored.program(2), where)  # report errors now
    return stored


def _require_sound(program: Program, where: str) -> None:
    """Refuse a program whose ops, run by NumPy on zeros, fail or miss their declared shapes; of loops, one step."""
    bodies: dict[Node, Body] = {}
    for tensor in program.tensors:
        if tensor.op is not None and size(tensor.shape) > _MAX_CHECKED:
            raise DataError(f"{where}: op {tensor.op.name!r} has shape {tensor.shape} for two rows, which is too large")
        if has_body(tensor):
            bodies[tensor.node] = body_of(tensor)

    def check(tensor: Tensor) -> None:
        assert tensor.op is not None
        assert tensor.value is not None
        if tensor.value.shape != tensor.shape:
            raise DataError(
                f"{where}: op {tensor.op.name!r} returns shape {tensor.value.shape}, expected {tensor.shape}"
            )

    alone = _without_loops(program)
    with reading(where), watching(check):
        evaluate(alone, {name: np.zeros(tensor.shape, tensor.dtype) for name, tensor in alone.inputs.items()})
    for body in bodies.values():
        _require_sound(step_of(body, program.rows), where)


def _without_loops(program: Program) -> Program:
    new: dict[Tensor, Tensor] = {}
    inputs, results = dict(program.inputs), dict(program.outputs)
    for tensor in program.tensors:
        if has_body(tensor):
            new[tensor] = inputs[f"value {len(inputs)} of a loop"] = placeholder(tensor.shape, tensor.dtype, "value")
            results |= {f"input {len(results) + number} of a loop": read for number, read in enumerate(tensor.inputs)}
        else:
            new[tensor] = tensor.with_inputs([new[operand] for operand in tensor.inputs])
    outputs = {name: new[tensor] for name, tensor in results.items()}
    updates = {variable: new[tensor] for variable, tensor in program.updates.items()}
    return Program(inputs, program.state, outputs, updates, rows=program.rows)
