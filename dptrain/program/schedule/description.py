"""A rank's step as a device executes it: its kernels, with the ops and layers of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dptrain.program.codegen.memory import MemoryPlan
from dptrain.program.explain import flops, grouped
from dptrain.program.program import Program
from dptrain.program.tensor import Tensor

# What ops belong to that are of no layer, by their group of `grouped`.
_OTHERS = {"forward": "loss", "backward": "loss", "update": "update", "messages": "messages"}


@dataclass(frozen=True, eq=False)
class KernelDescription:
    """A unit that a device executes.

    Attributes:
        kind: such as "loop", "product" or "launch".
        label: what it computes, as text.
        tensors: that it computes, stored or not, in order.
        layers: names of the layers of these; "loss", "update" and "messages" are those of no layer.
        read, written: bytes of a rank's tensors, each once.
        times: how often a step executes it.
    """

    kind: str
    label: str
    tensors: Sequence[Tensor]
    layers: Sequence[str]
    read: int = 0
    written: int = 0
    times: int = 1

    @property
    def operations(self) -> int:
        """Floating-point operations on the global batch, each time."""
        return sum(map(flops, self.tensors))


@dataclass(frozen=True, eq=False)
class Description:
    """A rank's program as a device executes it.

    Attributes:
        device: "CPU" or "GPU".
        code: of all kernels, as a source file.
        memory: of intermediate results; `in_place` new values are written over the old ones.
        costs: returns lines about what is known of the kernels' costs.
        on_host: ops that the host computes for a GPU.
        in_one_launch: number of a GPU's loops by their number of steps.
    """

    device: str
    kernels: Sequence[KernelDescription]
    code: str
    memory: MemoryPlan
    in_place: int
    costs: Callable[[], list[str]] = list
    on_host: Sequence[str] = ()
    in_one_launch: Mapping[int, int] = field(default_factory=dict)


class Layers:
    """The layers of a program's tensors."""

    def __init__(self, program: Program) -> None:
        self._names = {
            tensor: tensor.name if tensor.name and group in ("forward", "backward") else _OTHERS[group]
            for group, tensors in grouped(program).items()
            for tensor in tensors
        }

    def of(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return the distinct layers of some tensors, in order; those of a loop's steps have their own names."""
        names = (self._names.get(tensor, tensor.name) for tensor in tensors)
        return list(dict.fromkeys(name for name in names if name))
