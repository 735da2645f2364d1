"""Loops on a GPU: the kernels of a step, generated once, and launched once for each step.

A launch gets three numbers for each loop: the slice, and which of each carry's two buffers holds the carry and which
the next one. Pointers move, so nothing is copied between steps, and what every step reads stays in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dptrain.program.codegen.cpp import numel_text
from dptrain.program.codegen.memory import MemoryPlan
from dptrain.program.schedule.loops import BUFFERS, Carry, Counter, Repeat, repeat_of
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Node, Tensor

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend
    from dptrain.backend.cuda.generate import Kernel
    from dptrain.backend.cuda.memory import DeviceArray
    from dptrain.backend.cuda.packs import RunTable


@dataclass(frozen=True, eq=False)
class Address:
    """A tensor's address at a step of a loop: a base, and terms of (counter, shape of a slice)."""

    base: Tensor
    name: str
    terms: tuple[tuple[str, Shape], ...] = ()

    @property
    def offset(self) -> str:
        """Elements before it, in C++."""
        return " + ".join(f"(Index){counter} * ({numel_text(shape)})" for counter, shape in self.terms)

    def behind(self, counter: str, shape: Shape) -> "Address":
        """Return the address of a part with this shape."""
        return Address(self.base, self.name, (*self.terms, (counter, shape)))


class HostLoop:
    """A loop of unknown length, whose condition the host reads before each step.

    `carries` are the buffers of each; `steps` queue a step that reads one or the other.
    """

    def __init__(
        self,
        backend: "CudaBackend",
        repeat: Repeat,
        carries: "Sequence[Sequence[DeviceArray]]",
        steps: Sequence[Callable[[], None]],
    ) -> None:
        self._backend, self._repeat, self._carries, self._steps = backend, repeat, carries, steps

    def __call__(self, table: "RunTable", runs: int) -> None:
        """Queue the steps, each after all queued work."""
        assert runs == 1, "a loop of unknown length is never part of a pack"
        repeat, condition = self._repeat, self._carries[self._repeat.condition.value]

        def buffer(step: int) -> int:
            return repeat.counters(step)["now"]

        count = 0
        for step in repeat.steps(lambda step: bool(self._backend.fetched(condition[buffer(step)]))):
            self._steps[buffer(step)]()
            count = step + 1
        for buffers in self._carries if buffer(count) != repeat.last_buffer else ():
            self._backend.copy(buffers[repeat.last_buffer], buffers[buffer(count)])


class LoopCall:
    """The steps of a loop, at a depth of loops: kernels, and their memory plan. All carries begin with inputs."""

    def __init__(self, node: Node, depth: int) -> None:
        self._inputs, self._depth, self.repeat = node.inputs, depth, repeat_of(node)
        self.kernels: list[Kernel] = []
        self.plan = MemoryPlan(0, {}, 0)

    def name(self, counter: Counter) -> str:
        """Return the name of a launch's argument."""
        return f"{counter}_{self._depth}"

    def steps(self) -> Iterator[dict[str, int]]:
        """Yield the counters of each step; of the first two where their number is not known."""
        for step in range(BUFFERS if self.repeat.length is None else self.repeat.length):
            yield {self.name(counter): value for counter, value in self.repeat.counters(step).items()}

    def first_carry(self, carry: Carry) -> Tensor:
        """Return the initial carry, in whose memory both buffers are."""
        assert carry.input is not None
        return self._inputs[carry.input]

    @property
    def first_carries(self) -> list[Tensor]:
        """Initial carries."""
        return list(map(self.first_carry, self.repeat.carries))

    def last_carries(self, values: Sequence[Tensor]) -> dict[Tensor, tuple[Tensor, int]]:
        """Return the initial carry and the buffer that hold each last carry among values."""
        repeat = self.repeat
        pairs = ((value, repeat.carry_of(value.index)) for value in values)
        return {value: (self.first_carry(carry), repeat.last_buffer) for value, carry in pairs if carry is not None}

    def addresses(
        self, values: Sequence[Tensor], names: Mapping[Tensor, str], around: Mapping[Tensor, Address]
    ) -> dict[Tensor, Address]:
        """Return the addresses of what a step reads and computes, given those of the steps `around` this loop."""
        repeat, of_values = self.repeat, {value.index: value for value in values}
        inputs, buffers = dict(enumerate(self._inputs)), dict(enumerate(self.first_carries))
        arrays = {"input": inputs, "value": of_values, "buffers": buffers}
        tensors = [*zip(repeat.body.placeholders, repeat.reads(), strict=True)]
        tensors += [(repeat.body.results[index], at) for index, at in repeat.writes(of_values).items()]
        result: dict[Tensor, Address] = {}
        for tensor, at in tensors:
            array = arrays[at.array][at.index]
            start = around.get(array) or Address(array, names[array])
            result[tensor] = start if at.counter is None else start.behind(self.name(at.counter), tensor.shape)
        return result
