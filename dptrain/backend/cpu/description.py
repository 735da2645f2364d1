"""What a CPU executes of a program, without executing it."""

from collections.abc import Callable

from dptrain.backend.cpu.codegen import generate
from dptrain.backend.cpu.compile import HEADERS
from dptrain.backend.cpu.compiled import planned
from dptrain.backend.cpu.kernel_descriptions import kernels_of
from dptrain.program.codegen.fuse import fuse
from dptrain.program.explain import names_of
from dptrain.program.passes import first_of_equals, rewritten, with_half_factors, without_all_reduce
from dptrain.program.schedule.description import Description
from dptrain.program.sharding.mesh import PlacedProgram
from dptrain.program.tensor import Tensor


def describe(program: PlacedProgram, rows: int) -> Description:
    """Return a rank's program, with so many rows, as C++ executes it."""
    names = names_of(program)
    for change in (without_all_reduce, with_half_factors, first_of_equals()):
        program, names = _renamed(program, names, change)
    fused = fuse(program)
    code = generate(fused)
    in_place, memory = planned(fused, code, rows)

    source = "".join(f'#include "{header}"\n' for header in HEADERS) + f"\n{code.source}"
    return Description("CPU", kernels_of(fused, code.stored, rows, names), source, memory, len(in_place))


def _renamed(
    program: PlacedProgram, names: dict[Tensor, str], change: Callable[[Tensor], Tensor]
) -> tuple[PlacedProgram, dict[Tensor, str]]:
    """Return a pass's rewritten program, and the names of its tensors."""
    olds, new_names = iter(program.tensors), dict[Tensor, str]()

    def noted(tensor: Tensor) -> Tensor:
        changed = change(tensor)
        new_names.setdefault(changed, names.get(next(olds), ""))  # views made by a pass have no name
        return changed

    result = rewritten(program, noted)
    assert isinstance(result, PlacedProgram)
    return result, new_names
