"""What the kernels of a CPU compute, read and write."""

from collections.abc import Mapping

from dptrain.backend.cpu.codegen import Code
from dptrain.backend.cpu.convolutions import implementation_of
from dptrain.program.codegen.kernels import Call, Fused, Kernel, Loop, ProductKernel, RepeatKernel
from dptrain.program.codegen.memory import nbytes
from dptrain.program.explain import shown
from dptrain.program.lowering import ConvolutionLowering, lowering_of
from dptrain.program.schedule.description import KernelDescription, Layers
from dptrain.program.tensor import Tensor

# Implementations of convolutions.
_IMPLEMENTATIONS = {
    "product": "a product of matrices",
    "channels": "by vectors of channels",
    "pixels": "by vectors of pixels",
    "winograd": "by Winograd's F(2x2, 3x3)",
}
_KINDS = {Call: "call", Loop: "loop", ProductKernel: "product", RepeatKernel: "repeat"}


def kernels_of(
    fused: Fused, stored: set[Tensor], rows: int, names: Mapping[Tensor, str] | None = None
) -> list[KernelDescription]:
    """Describe the kernels of a fused program, with the names of tensors if these are known."""
    layers = Layers(fused.program, rows)
    return [
        KernelDescription(
            _KINDS[type(kernel)],
            _label(kernel, names or {}),
            kernel.tensors,
            layers.of(kernel.tensors),
            sum(nbytes(root, rows) for root in {view.root for view in kernel.reads} - {*kernel.tensors}),
            sum(nbytes(tensor, rows) for tensor in kernel.tensors if tensor in stored),
        )
        for kernel in fused.kernels
    ]


def marked(fused: Fused, code: Code, rows: int) -> list[KernelDescription]:
    """Describe what `dp_mark` of native.h notes: kernels, messages, and copies of new values over old ones."""
    kernels, number = kernels_of(fused, code.stored, rows), {kernel: n for n, kernel in enumerate(fused.kernels)}
    for loop in code.epilogues:  # it runs with the product before it, whose mark stands behind both
        product, epilogue = kernels[number[loop] - 1], kernels[number[loop]]
        kernels[number[loop] - 1] = product.with_epilogue(epilogue)
    for message in (part for part in code.parts if isinstance(part, list)):
        nbytes_sent = sum(nbytes(summand, rows) for summand, _ in message)
        op = message[0][1].op
        assert op is not None
        tensors = [result for _, result in message]
        label = f"{op.name} of {len(message)} tensor{'s' * (len(message) > 1)}"
        kernels.append(KernelDescription("message", label, tensors, {"messages": 0}, nbytes_sent, nbytes_sent))
    return [*kernels, KernelDescription("copy", "new values over old ones", [], {"update": 0})]


def _label(kernel: Kernel, names: Mapping[Tensor, str]) -> str:
    space = f"{shown(kernel.space)}: " if isinstance(kernel, Loop) else ""
    ops = (f"{names.get(tensor, '')} {tensor.op.name}".strip() for tensor in kernel.tensors if tensor.op is not None)
    tensor, by = kernel.tensors[0], ""
    if isinstance(kernel, Call) and isinstance(lowering_of(tensor), ConvolutionLowering):
        by = f", {_IMPLEMENTATIONS[implementation_of(tensor)]}"
    return space + ", ".join(ops) + by
