"""What a CPU executes of a program, without executing it."""

from collections.abc import Callable

from dptrain.backend.cpu.codegen import generate
from dptrain.backend.cpu.compile import HEADERS
from dptrain.backend.cpu.compiled import planned
from dptrain.program.codegen.fuse import fuse
from dptrain.program.codegen.kernels import Call, Fused, Kernel, Loop, ProductKernel, RepeatKernel
from dptrain.program.codegen.memory import nbytes
from dptrain.program.explain import names_of, shown
from dptrain.program.lowering import ConvolutionLowering, lowering_of
from dptrain.program.passes import first_of_equals, rewritten, with_half_factors, without_all_reduce
from dptrain.program.schedule.description import Description, KernelDescription, Layers
from dptrain.program.sharding.mesh import PlacedProgram
from dptrain.program.tensor import Tensor

# Implementations of convolutions.
_IMPLEMENTATIONS = {
    "product": "a product of matrices",
    "channels": "by vectors of channels",
    "pixels": "by vectors of pixels",
    "winograd": "by Winograd's F(2x2, 3x3)",
}
_KINDS = {Call: "call", Loop: "loop", ProductKernel: "product", RepeatKernel: "repeat"}


def describe(program: PlacedProgram, rows: int) -> Description:
    """Return a rank's program, with so many rows, as C++ executes it."""
    names = names_of(program)
    for change in (without_all_reduce, with_half_factors, first_of_equals()):
        program, names = _renamed(program, names, change)
    fused = fuse(program)
    code = generate(fused)
    in_place, memory = planned(fused, code, rows)

    def label(kernel: Kernel) -> str:
        space = f"{shown(kernel.space)}: " if isinstance(kernel, Loop) else ""
        ops = (
            f"{names.get(tensor, '')} {tensor.op.name}".strip() for tensor in kernel.tensors if tensor.op is not None
        )
        convolution = lowering_of(kernel.tensors[0]) if isinstance(kernel, Call) else None
        by = ""
        if isinstance(convolution, ConvolutionLowering):
            by = f", {_IMPLEMENTATIONS[convolution.implementation(kernel.tensors[0])]}"
        return space + ", ".join(ops) + by

    source = "".join(f'#include "{header}"\n' for header in HEADERS) + f"\n{code.source}"
    return Description("CPU", kernels_of(fused, code.stored, rows, label), source, memory, len(in_place))


def kernels_of(fused: Fused, stored: set[Tensor], rows: int, label: Callable[[Kernel], str]) -> list[KernelDescription]:
    """Return what the kernels of a fused program compute, read and write."""
    layers = Layers(fused.program)
    return [
        KernelDescription(
            _KINDS[type(kernel)],
            label(kernel),
            kernel.tensors,
            layers.of(kernel.tensors),
            sum(nbytes(root, rows) for root in {view.root for view in kernel.reads} - {*kernel.tensors}),
            sum(nbytes(tensor, rows) for tensor in kernel.tensors if tensor in stored),
        )
        for kernel in fused.kernels
    ]


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
