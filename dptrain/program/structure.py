"""What programs have in common that differ in variables and seeds alone, as those of a sweep's runs do.

What a backend makes of one of them is right for all: kernels and their code know variables and seeds by number.
"""

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
from dptrain.program.tensor import Tensor, Variable, placeholder

# Bytes of constants that programs may have and still be compared.
CONSTANTS = 1 << 16


@dataclass(frozen=True, eq=False)
class ProgramStructure:
    """A program without its variables and seeds.

    Attributes:
        key: equal for programs that compute the same of what they are given.
        variables: its state, in the order of the key.
        seeds: of its random numbers, each once.
    """

    key: Hashable
    variables: Sequence[Variable]
    seeds: Sequence[int]


def structure_of(program: Program) -> ProgramStructure | None:
    """Return a program's structure; None where it holds what cannot be compared, or constants of many bytes."""
    seeds: dict[int, int] = {}
    given = {one: ("input", name) for name, one in program.inputs.items()}
    state = {one: ("state", number) for number, one in enumerate(program.state.values())}
    found = _nodes(program.tensors, {**state, **given}, seeds)
    if found is None:
        return None
    numbers = {one: number for number, one in enumerate(program.tensors)}
    variables = list(program.state)
    order = {variable: number for number, variable in enumerate(variables)}
    key = (
        found,
        tuple((name, _key(one)) for name, one in program.inputs.items()),
        tuple(_key(one) for one in program.state.values()),
        tuple((name, numbers[one]) for name, one in program.outputs.items()),
        tuple((order[variable], numbers[one]) for variable, one in program.updates.items()),
        program.rows if program.shape_specialised else None,
        (program.bucket_bytes, bool(program.layouts)) if isinstance(program, PlacedProgram) else None,
    )
    return ProgramStructure(key, variables, list(seeds))


def _nodes(tensors: Sequence[Tensor], given: Mapping[Tensor, Any], seeds: dict[int, int]) -> Hashable | None:
    """Return what tensors are, told by their places, with seeds by number; None where that cannot be said."""
    numbers = {one: number for number, one in enumerate(tensors)}
    nodes: list[Hashable] = []
    left = CONSTANTS
    for one in tensors:
        made_of: Any = given.get(one)
        about = one.attributes
        if made_of is None and (one.op is not None or one.counts_rows):
            made_of = tuple(numbers[read] for read in one.inputs)
        elif made_of is None and one.value is not None:
            left -= one.value.nbytes
            made_of = one.value.tobytes() if left >= 0 else None
        if made_of is None:
            return None
        if draws_bits(one):
            about = {**about, "seed": seeds.setdefault(int(about["seed"]), len(seeds))}
        if has_body(one):
            about = {**about, "body": _body(body_of(one), seeds)}
        try:
            attributes = tuple((name, comparable(about[name])) for name in sorted(about))
        except TypeError:
            return None
        nodes.append((one.op, one.index, made_of, attributes, _key(one)))
    return tuple(nodes)


def _body(body: Body, seeds: dict[int, int]) -> Hashable:
    """Return what bodies of loops have in common that compute the same, but for seeds; the body itself at worst."""
    tensors = topological(body.results)
    given = {one: ("given", number) for number, one in enumerate(body.placeholders)}
    found = _nodes(tensors, given, seeds)
    if found is None:
        return body
    numbers = {one: number for number, one in enumerate(tensors)}
    results = tuple(numbers[one] for one in body.results)
    return found, tuple(_key(one) for one in body.placeholders), results, len(body.carries), len(body.slices), body.sums


def draws_bits(tensor: Tensor) -> bool:
    """Whether a tensor is random bits, whose seed is no part of the structure."""
    return isinstance(lowering_of(tensor), RandomBits)


def _key(tensor: Tensor) -> Hashable:
    return comparable(tensor.shape), tensor.dtype


def to_be_kept(program: Program) -> Program:
    """Return a program that computes the same of placeholders that know no variable, so that it keeps none in memory.

    Its constants are copies, which nobody changes. Its state and updates still say which variables there were.
    """
    stand_ins = {one: placeholder(one.shape, one.dtype, one.name) for one in program.state.values()}
    for one in program.tensors:
        if one.op is None and one.value is not None and one not in stand_ins:
            stand_ins[one] = Tensor(None, (), one.attributes, one.shape, one.dtype, one.value.copy(), one.name)
    made = replace(program, derived=None, weight_gradients={})
    if isinstance(made, PlacedProgram):
        made = replace(made, placements={}, summed=frozenset())
    made = rewritten(made, lambda one: stand_ins.get(one, one))
    return replace(made, state={variable: stand_ins[one] for variable, one in program.state.items()})


def of_variables(fused: Fused, known: Mapping[Any, Any]) -> Fused:
    """Return kernels as those of other variables.

    Args:
        fused: kernels.
        known: what takes the place of each: another variable, or its number while kernels are kept.
    """
    program = replace(
        fused.program,
        state={known[variable]: one for variable, one in fused.program.state.items()},
        updates={known[variable]: one for variable, one in fused.program.updates.items()},
    )
    return replace(fused, program=program, updates={known[variable]: one for variable, one in fused.updates.items()})
