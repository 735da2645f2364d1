"""Structures: keys of programs that differ only in variables and seeds, such as those of a sweep's runs."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dptrain.program.body import Body, body_of, has_body
from dptrain.program.codegen.kernels import Fused
from dptrain.program.gradient import topological
from dptrain.program.lowering import RandomBits, lowering_of
from dptrain.program.passes import comparable, rewritten
from dptrain.program.program import Program
from dptrain.program.sharding.mesh import PlacedProgram
from dptrain.program.tensor import Node, Tensor, Variable, placeholder

# The most bytes of constants of programs that are compared.
CONSTANTS = 1 << 16


@dataclass(frozen=True, eq=False)
class ProgramStructure:
    """A key, equal for programs that compute the same function, with the program's variables and seeds in order."""

    key: Hashable
    variables: Sequence[Variable]
    seeds: Sequence[int]


def structure_of(program: Program) -> ProgramStructure | None:
    """Return a program's structure; None if an attribute is not comparable or constants are large."""
    seeds: dict[int, int] = {}
    inputs = {tensor: ("input", name) for name, tensor in program.inputs.items()}
    state = {tensor: ("state", number) for number, tensor in enumerate(program.state.values())}
    nodes = _nodes(program.tensors, {**state, **inputs}, seeds)
    if nodes is None:
        return None
    numbers = {tensor: number for number, tensor in enumerate(program.tensors)}
    variables = list(program.state)
    order = {variable: number for number, variable in enumerate(variables)}
    key = (
        nodes,
        tuple((name, _key(tensor)) for name, tensor in program.inputs.items()),
        tuple(_key(tensor) for tensor in program.state.values()),
        tuple((name, numbers[tensor]) for name, tensor in program.outputs.items()),
        tuple((order[variable], numbers[tensor]) for variable, tensor in program.updates.items()),
        program.rows if program.shape_specialised else None,
        (program.bucket_bytes, bool(program.layouts)) if isinstance(program, PlacedProgram) else None,
    )
    return ProgramStructure(key, variables, list(seeds))


def _nodes(tensors: Sequence[Tensor], leaves: Mapping[Tensor, Any], seeds: dict[int, int]) -> Hashable | None:
    # A key of tensors, with inputs and seeds by number; None if there is none.
    numbers = {tensor: number for number, tensor in enumerate(tensors)}
    nodes: list[Hashable] = []
    constant_bytes_left = CONSTANTS
    loops: dict[Node, int] = {}
    for tensor in tensors:
        source: Any = leaves.get(tensor)
        attributes_of = tensor.attributes
        if source is None and (tensor.op is not None or tensor.counts_rows):
            source = tuple(numbers[read] for read in tensor.inputs)
        elif source is None and tensor.value is not None:
            constant_bytes_left -= tensor.value.nbytes
            source = tensor.value.tobytes() if constant_bytes_left >= 0 else None
        if source is None:
            return None
        if draws_bits(tensor):
            attributes_of = {**attributes_of, "seed": seeds.setdefault(int(attributes_of["seed"]), len(seeds))}
        if has_body(tensor):  # once for all values, or nested bodies take exponential time
            first = loops.setdefault(tensor.node, len(nodes))
            body = _body(body_of(tensor), seeds) if first == len(nodes) else first
            attributes_of = {**attributes_of, "body": body}
        try:
            attributes = tuple((name, comparable(attributes_of[name])) for name in sorted(attributes_of))
        except TypeError:
            return None
        nodes.append((tensor.op, tensor.index, source, attributes, _key(tensor)))
    return tuple(nodes)


def _body(body: Body, seeds: dict[int, int]) -> Hashable:
    tensors = topological(body.results)
    leaves = {tensor: ("given", number) for number, tensor in enumerate(body.placeholders)}
    nodes = _nodes(tensors, leaves, seeds)
    if nodes is None:
        return body
    numbers = {tensor: number for number, tensor in enumerate(tensors)}
    results = tuple(numbers[tensor] for tensor in body.results)
    return (
        nodes,
        tuple(_key(tensor) for tensor in body.placeholders),
        results,
        len(body.carries),
        len(body.slices),
        body.sums,
        body.guarded,
    )


def draws_bits(tensor: Tensor) -> bool:
    """Whether a tensor is random bits, whose seed is not part of the structure."""
    return isinstance(lowering_of(tensor), RandomBits)


def _key(tensor: Tensor) -> Hashable:
    return comparable(tensor.shape), tensor.dtype


def to_be_kept(program: Program) -> Program:
    """Return an equal program without variables, to be cached without keeping their memory.

    Constants are copied. State and updates still name the variables.
    """
    stand_ins = {tensor: placeholder(tensor.shape, tensor.dtype, tensor.name) for tensor in program.state.values()}
    for tensor in program.tensors:
        if tensor.op is None and tensor.value is not None and tensor not in stand_ins:
            stand_ins[tensor] = Tensor(
                None, (), tensor.attributes, tensor.shape, tensor.dtype, tensor.value.copy(), tensor.name
            )
    kept_program = replace(program, derived=None, weight_gradients={})
    if isinstance(kept_program, PlacedProgram):
        kept_program = replace(kept_program, placements={}, summed=frozenset())
    kept_program = rewritten(kept_program, lambda tensor: stand_ins.get(tensor, tensor))
    return replace(kept_program, state={variable: stand_ins[tensor] for variable, tensor in program.state.items()})


def of_variables(fused: Fused, substitutes: Mapping[Any, Any]) -> Fused:
    """Replace the variables of kernels, or number them while kernels are cached."""
    program = replace(
        fused.program,
        state={substitutes[variable]: tensor for variable, tensor in fused.program.state.items()},
        updates={substitutes[variable]: tensor for variable, tensor in fused.program.updates.items()},
    )
    return replace(
        fused, program=program, updates={substitutes[variable]: tensor for variable, tensor in fused.updates.items()}
    )
