"""What a GPU executes of a program; no GPU is needed."""

from collections import Counter

from dptrain.backend.cuda.compile import resources_of_text
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.cost.loads import LEGEND, loads, table
from dptrain.backend.cuda.generate import launched
from dptrain.backend.cuda.libraries.providers import asked
from dptrain.errors import DeviceError
from dptrain.program.body import with_steps
from dptrain.program.lowering import HostCall, lowering_of
from dptrain.program.schedule.description import Description, KernelDescription, Layers
from dptrain.program.sharding.mesh import PlacedProgram
from dptrain.program.tensor import Tensor

# Architecture of two of the predicted GPUs, for register counts, and its instruction for half precision.
_ARCHITECTURE, _OF_HALVES = "sm_90a", "wgmma"


def describe(
    program: PlacedProgram, rows: int, precision: str = "float32", gemm: str = "dptrain", conv: str = "dptrain"
) -> Description:
    """Return a rank's program, with so many rows, as kernels of a Hopper GPU; arguments as for `CudaBackend`."""
    provider = asked(gemm, conv)
    composition = Composition(program, rows, precision=precision, of_halves=_OF_HALVES, provider=provider)
    source = composition.source()
    on_host = [tensor.op.label for tensor in with_steps(program.tensors) if tensor.op and _is_on_host(tensor)]
    return Description(
        "GPU",
        kernels_of(composition),
        source,
        composition.plan,
        len(composition.in_place),
        lambda: _costs(composition, source),
        tuple(dict.fromkeys(on_host)),
        Counter(composition.in_one_launch),
    )


def kernels_of(composition: Composition) -> list[KernelDescription]:
    """Return what a program's launches compute, read and write, in order; within loops once."""
    layers, kernels = Layers(composition.program, composition.sizes.rows), list[KernelDescription]()
    pairs = launched(kernel for stage in composition.stages for kernel in stage)
    for (launch, times), load in zip(pairs, loads(composition), strict=True):
        kind = ("launch" if launch.threads else "call") if times == 1 else f"{times:,} times"
        label = ", ".join(function.name for function in launch.functions)
        nests = [function.nest for function in launch.functions if function.nest is not None]
        tensors = list(dict.fromkeys(t for nest in nests for t in nest.computed))  # some elements by several
        kernels.append(KernelDescription(kind, label, tensors, layers.of(tensors), load.read, load.written, times))
    return kernels


def _is_on_host(tensor: Tensor) -> bool:
    return isinstance(lowering_of(tensor), HostCall)


def _costs(composition: Composition, source: str) -> list[str]:
    """Return the table of a GPU's kernel costs."""
    try:
        resources, compiled = resources_of_text("program", source, _ARCHITECTURE), f"by nvcc for {_ARCHITECTURE}"
    except DeviceError:
        resources, compiled = {}, "not known without nvcc"
    return [
        "",
        f"costs, predicted by a roofline model, not measured; registers {compiled}:",
        *table(loads(composition, resources)),
        *LEGEND,
    ]
