"""Loops on a GPU: the kernels of a step, generated once, and launched once for each step.

A launch gets three numbers for each loop: the slice, and which of each carry's two slots holds the carry and which the
next one. Pointers move, so nothing is copied between steps, and what every step reads stays in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dptrain.program.body import body_of, steps_of
from dptrain.program.codegen.cpp import numel_text
from dptrain.program.codegen.memory import MemoryPlan
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Node, Tensor

if TYPE_CHECKING:
    from dptrain.backend.cuda.backend import CudaBackend
    from dptrain.backend.cuda.generate import Kernel
    from dptrain.backend.cuda.memory import DeviceArray
    from dptrain.backend.cuda.packs import RunTable

# Slots of a carry: the one that a step reads, and the one that it writes.
CARRY_PLACES = 2


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

    `carries` are both slots of each carry, the condition first; `steps` queue a step from either. The last carries are
    in the first slots.
    """

    def __init__(
        self,
        backend: "CudaBackend",
        carries: "Sequence[Sequence[DeviceArray]]",
        steps: Sequence[Callable[[], None]],
    ) -> None:
        self._backend, self._carries, self._steps = backend, carries, steps

    def __call__(self, table: "RunTable", runs: int) -> None:
        """Queue the steps, each after all queued work."""
        assert runs == 1, "a loop of unknown length is never part of a pack"
        place = 0
        while self._backend.fetched(self._carries[0][place]):
            self._steps[place]()
            place = 1 - place
        for first, second in self._carries if place else ():
            self._backend.copy(first, second)


@dataclass(eq=False)
class LoopCall:
    """The steps of a loop: kernels, memory plan, and `counters`, the numbers of a launch; carries begin with inputs."""

    node: Node
    counters: tuple[str, str, str]
    kernels: list["Kernel"] = field(default_factory=list)
    plan: MemoryPlan = field(default_factory=lambda: MemoryPlan(0, {}, 0))

    @property
    def length(self) -> int | None:
        """Number of steps, if it is known."""
        return steps_of(self.node)

    @property
    def is_reverse(self) -> bool:
        """Whether the last slice comes first."""
        return bool(self.node.attributes.get("reverse"))

    def steps(self) -> Iterator[dict[str, int]]:
        """Yield the counters of each step; of the first two where their number is not known."""
        length = CARRY_PLACES if self.length is None else self.length
        for number in range(length):
            place = length - 1 - number if self.is_reverse else number
            yield dict(zip(self.counters, (place, number % 2, 1 - number % 2), strict=True))

    @property
    def first_carries(self) -> tuple[Tensor, ...]:
        """Initial carries, in whose memory all carries are stored."""
        return self.node.inputs[: len(body_of(self.node).carries)]

    def last_carries(self, values: Sequence[Tensor]) -> dict[Tensor, tuple[Tensor, int]]:
        """Return the initial carry and the slot that hold each last carry among values."""
        firsts = self.first_carries
        return {value: (firsts[value.index], (self.length or 0) % 2) for value in values if value.index < len(firsts)}

    def addresses(
        self, values: Sequence[Tensor], names: Mapping[Tensor, str], around: Mapping[Tensor, Address]
    ) -> dict[Tensor, Address]:
        """Return the addresses of what a step reads and computes, given those of the steps `around` this loop."""
        body, (place, now, following) = body_of(self.node), self.counters

        def address(tensor: Tensor) -> Address:
            return around.get(tensor) or Address(tensor, names[tensor])

        count, ends = len(body.carries), len(body.carries) + len(body.slices)
        firsts, stacks, captured = self.first_carries, self.node.inputs[count:ends], self.node.inputs[ends:]
        result = {leaf: address(outer) for leaf, outer in zip(body.captures, captured, strict=True)}
        for carry, outer in zip(body.slices, stacks, strict=True):
            result[carry] = address(outer).behind(place, carry.shape)
        for carry, new, first in zip(body.carries, body.following, firsts, strict=True):
            result[carry] = address(first).behind(now, carry.shape)
            result[new] = address(first).behind(following, carry.shape)
        for leaf in values:
            if leaf.index >= count:
                stacked_value = body.stacked[leaf.index - count]
                result[stacked_value] = address(leaf).behind(place, stacked_value.shape)
        return result
