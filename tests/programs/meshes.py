"""Cases on meshes of ranks, which are threads: variables are sharded, and each rank executes a program of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dptrain.comm.mesh import BATCH, MeshCommunicator
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory
from dptrain.program.program import Program
from dptrain.program.sharding.local import MeshPosition, localized
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Array, Variable
from tests.programs.case import Case
from tests.programs.check import Make, by_numpy, compiled, expected, joined, not_optimized, results, unlike
from tests.programs.interpreted import InterpretedExecutable
from tests.thread_ranks import on_mesh


@dataclass(frozen=True)
class _OfRank:
    """What a rank ends with.

    Attributes:
        place: the rank's.
        values: what came out, and its state, by name.
        summands: names of those that ranks along `BATCH` have summands of.
    """

    place: MeshPosition
    values: dict[str, Array]
    summands: frozenset[str]


def run_on_mesh(
    case: Case, make: Make, traced_for: int | None = None, together: Callable[..., list[Any]] = on_mesh
) -> dict[str, Array]:
    """Return what the ranks of a mesh compute together: rows, parts of variables and summands joined.

    Args:
        case: with a mesh.
        make: an executable.
        traced_for: another number of rows, for which the program is traced and placed first.
        together: calls a function on each rank of a mesh and returns all results.

    Raises:
        AssertionError: ranks that should have the same have not.
    """
    values = case.values()
    other = case if traced_for is None else replace(case, lengths={**case.lengths, "n": traced_for})

    def work(comm: MeshCommunicator) -> _OfRank:
        at, replica, program = MeshPosition(comm.lengths, comm.coordinates), comm.replica, other.trace()
        layouts = {variable: case.layouts[variable.name] for variable in program.state if variable.name in case.layouts}
        parts = {
            variable: Variable(variable.numpy()[at.key(variable.shape, axes)], variable.name)
            for variable, axes in layouts.items()
        }
        summed = [variable for variable in program.state if variable.name in case.summed]
        placed = place(program, summed, layouts=layouts, bucket_bytes=case.bucket_bytes)
        local_program = (localized(placed, at, parts) if layouts else placed).for_rows(case.rows)
        for variable in local_program.summed if replica else ():
            variable.assign(np.zeros(variable.shape, variable.dtype))
        rows, first = case.shards[replica], sum(case.shards[:replica])
        executable = make(
            local_program, case.in_memory(case.of_rank(values, replica)), rows=rows, first_row=first, comm=comm
        )
        executable.run(case.starts(rows))
        summands = frozenset(f"state {variable.name}" for variable in local_program.summed)
        return _OfRank(at, results(case, local_program, executable), summands)

    ends, traced = together(work, **case.mesh), case.trace()
    shapes = {name: tensor.shape for name, tensor in traced.outputs.items()}
    shapes |= {f"state {variable.name}": variable.shape for variable in traced.state}
    layouts = {f"state {name}": axes for name, axes in case.layouts.items()}
    whole_arrays: dict[str, Array] = {}
    first_arrays: dict[Any, Array] = {}
    for end in ends:
        for name, array in end.values.items():
            axes = layouts.get(name, (None,) * array.ndim)
            of_rows = any(isinstance(n, Dim) for n in shapes[name])
            over = {BATCH} if of_rows or name in end.summands else {mesh for mesh in axes if mesh is not None}
            first = first_arrays.setdefault((name, *(end.place.coordinates[mesh] for mesh in sorted(over))), array)
            assert np.array_equal(array, first, equal_nan=array.dtype.kind in "fV"), f"ranks have another {name}"
            if not of_rows:
                key = (*end.place.key(shapes[name], axes), ...)
                into = whole_arrays.setdefault(name, np.zeros(shapes[name], array.dtype))[key]
                if name not in end.summands:
                    into[...] = array
                elif first is array:
                    into += array
    replicas = [next(end for end in ends if end.place.coordinates[BATCH] == n) for n in range(case.mesh[BATCH])]
    return joined(case, [replica.values for replica in replicas], 0) | whole_arrays


def interpreted(program: Program, values: Mapping[str, Array], **place: Any) -> InterpretedExecutable:
    """Return a program fused, its memory planned, and executed by NumPy."""
    return InterpretedExecutable(program, HostMemory(), values, **place)


def wrong_on_mesh(case: Case, *, compiles: bool) -> str:
    """Return what is wrong with a case on its mesh; an empty string if nothing is.

    Args:
        case: with a mesh.
        compiles: execute it by C++ as well, fused and not.
    """
    try:
        right = expected(case)
        program = case.trace()
    except Exception as error:
        return f"trace: {type(error).__name__}: {error}"
    ways: dict[str, Callable[[], Mapping[str, Array]]] = {"NumPy on a mesh": lambda: run_on_mesh(case, by_numpy)}
    if not place(program).shape_specialised:
        ways["NumPy on a mesh, for other rows"] = lambda: run_on_mesh(case, by_numpy, case.rows + 3)
    ways["fused on a mesh"] = lambda: run_on_mesh(case, interpreted)
    if compiles:
        ways["C++ on a mesh"] = lambda: run_on_mesh(case, compiled())
        ways["C++ on a mesh without fusion"] = lambda: run_on_mesh(case, compiled(join=False))
    outputs: dict[str, Mapping[str, Array]] = {}
    for way, execute in ways.items():
        try:
            outputs[way] = not_optimized(execute)
            problem = right.wrong(outputs[way])
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not problem and way.endswith("without fusion"):
            problem = unlike(outputs["C++ on a mesh"], outputs[way], right)
        if problem:
            return f"{way}: {problem}"
    return ""
