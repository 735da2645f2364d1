"""A rank's step as a device executes it: its kernels, with the ops and layers of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dptrain.program.codegen.memory import MemoryPlan
from dptrain.program.dims import Dim
from dptrain.program.explain import flops, grouped
from dptrain.program.lowering import Gather, lowering_of
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
        layers: operations by the layers of these; "data", "loss", "update" and "messages" stand for no layer.
        read, written: bytes of a rank's tensors, each once.
        times: how often a step executes it.
    """

    kind: str
    label: str
    tensors: Sequence[Tensor]
    layers: Mapping[str, int]
    read: int = 0
    written: int = 0
    times: int = 1

    @property
    def operations(self) -> int:
        """Floating-point operations of a rank, each time."""
        return sum(self.layers.values())

    def with_epilogue(self, loop: "KernelDescription") -> "KernelDescription":
        """Return this kernel together with a loop over its results."""
        layers = {name: self.layers.get(name, 0) + loop.layers.get(name, 0) for name in {**self.layers, **loop.layers}}
        tensors, label = [*self.tensors, *loop.tensors], f"{self.label}, {loop.label}"
        return replace(
            self,
            label=label,
            tensors=tensors,
            layers=layers,
            read=self.read + loop.read,
            written=self.written + loop.written,
        )


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
    """The layers of a program's tensors, of which a rank has so many rows."""

    def __init__(self, program: Program, rows: int) -> None:
        self._rows, self._batch = rows, max(program.rows, 1)
        self._names = {
            tensor: tensor.name if tensor.name and group in ("forward", "backward") else _OTHERS[group]
            for group, tensors in grouped(program).items()
            for tensor in tensors
        }
        data = set(program.inputs.values())
        takes_rows = (t for t in self._names if isinstance(lowering_of(t), Gather) and t.inputs[0] in data)
        self._names |= dict.fromkeys(takes_rows, "data")

    def of(self, tensors: Iterable[Tensor]) -> dict[str, int]:
        """Return the operations of some tensors by layer, in order; those of a loop's steps have their own names."""
        operations: dict[str, int] = {}
        for tensor in tensors:
            name = self._names.get(tensor) or tensor.name or "loss"
            operations[name] = operations.get(name, 0) + self._operations(tensor)
        return operations

    def _operations(self, tensor: Tensor) -> int:
        shapes = (tensor.shape, *(operand.shape for operand in tensor.inputs))
        has_rows = any(isinstance(n, Dim) for shape in shapes for n in shape)
        return flops(tensor) * self._rows // self._batch if has_rows else flops(tensor)
