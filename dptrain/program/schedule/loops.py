"""Loops as data: what steps carry, read and stack, in which order they run, and where in memory all of that lies.

`repeat_of` derives it from a loop's op, and `carries_of` what is carried. The reference executor and passes read what
inputs and values are to a step; generators read also the address of each tensor, whose counters differ between steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Literal

from dptrain.program.body import Body, body_of, steps_of
from dptrain.program.gradient import topological
from dptrain.program.tensor import Node, Tensor

# Buffers of a carry: the one that a step reads, and the one that it writes.
BUFFERS = 2

# What differs between steps: the slice that a step takes and stacks, the slice of the step before, and the buffers that
# hold a carry and the next one.
Counter = Literal["slice", "before", "now", "next"]


@dataclass(frozen=True, eq=False)
class Carry:
    """A tensor that each step passes to the next.

    Attributes:
        leaf: the placeholder that a step reads.
        result: what a step computes for the next one.
        input: index of the node's input with which it begins; None for zeros.
        value: index of the node's value that is the last one.
    """

    leaf: Tensor
    result: Tensor
    input: int | None
    value: int


@dataclass(frozen=True, eq=False)
class Operand:
    """What a step reads of an input of the node: a slice or, if it is a capture, all."""

    leaf: Tensor
    input: int


@dataclass(frozen=True, eq=False)
class Stack:
    """What a step computes, and the index of the node's value of which that is a slice."""

    result: Tensor
    value: int


@dataclass(frozen=True)
class Address:
    """Where a tensor of a step lies: so many of its sizes behind the start of an array as a counter says.

    Attributes:
        array: an input or a value of the node, or the buffers of a carry.
        index: of the input or value; of a carry that of its last value.
        counter: None for an array that is not divided.
        first: the carry in whose first buffer the tensor lies in the first step; None for all else.
    """

    array: Literal["input", "value", "buffers"]
    index: int
    counter: Counter | None = None
    first: int | None = None


@dataclass(frozen=True, eq=False)
class Repeat:
    """The steps of a loop.

    Attributes:
        length: number of steps; None for as many as begin with a true `condition`.
        reverse: whether the first step takes the last slice.
    """

    body: Body
    length: int | None
    reverse: bool
    carries: tuple[Carry, ...]
    slices: tuple[Operand, ...]
    captures: tuple[Operand, ...]
    stacks: tuple[Stack, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What steps read of inputs with which no carry begins: slices and captures."""
        return self.slices + self.captures

    @property
    def guard(self) -> int | None:
        """Index of the input without which a branch has no step, and zeros as values; None for other loops."""
        return self.captures[0].input if self.body.guarded else None

    @property
    def condition(self) -> Carry:
        """Of a loop of unknown length the carry that is true as long as there are further steps."""
        return self.carries[0]

    def carry_of(self, value: int) -> Carry | None:
        """Return the carry of which a value of the node is the last one; None if steps stack the value."""
        return next((carry for carry in self.carries if carry.value == value), None)

    # Steps in order

    def steps(self, goes_on: Callable[[int], bool]) -> Iterator[int]:
        """Yield the index of each step; `goes_on` tells the condition before one, if the number is not known."""
        return takewhile(goes_on, count()) if self.length is None else iter(range(self.length))

    def position(self, step: int) -> int:
        """Return the index of the slice that a step takes and stacks."""
        return self.length - 1 - step if self.reverse and self.length is not None else step

    def position_in_c(self, step: str, length: str) -> str:
        """Return `position` in C++."""
        return f"{length} - 1 - {step}" if self.reverse else step

    def counters(self, step: int) -> dict[Counter, int]:
        """Return the counters of a step; that of the slice before means nothing in the first."""
        buffer = step % BUFFERS
        return {"slice": self.position(step), "before": self.position(step - 1), "now": buffer, "next": 1 - buffer}

    def counters_in_c(self, step: str, length: str, name: Callable[[Counter], str]) -> list[str]:
        """Return C++ that declares the counters of a step, but for that of the step before, by these names."""
        now = name("now")
        return [
            f"const int {name('slice')} = {self.position_in_c(step, length)};",
            f"const int {now} = {step} % {BUFFERS}, {name('next')} = 1 - {now};",
        ]

    @property
    def last_buffer(self) -> int:
        """The buffer of the last carries, where a further step would read them.

        Behind a loop of unknown length it is the first, to which they are moved.
        """
        return self.counters(self.length or 0)["now"]

    # Addresses

    def reads(self, stacked: Mapping[int, int] | None = None) -> list[Address]:
        """Return the address of each placeholder of the body, in order.

        `stacked` are values of the node that stack a next carry, by the value that is the last one. Such a carry lies
        in the slice of the step before.
        """
        lies = stacked or {}
        carries = (
            Address("value", lies[carry.value], "before", carry.value)
            if carry.value in lies
            else Address("buffers", carry.value, "now")
            for carry in self.carries
        )
        slices = (Address("input", part.input, "slice") for part in self.slices)
        return [*carries, *slices, *(Address("input", capture.input) for capture in self.captures)]

    def writes(self, values: Iterable[int], stacked: Mapping[int, int] | None = None) -> dict[int, Address]:
        """Return the address of each next carry, and of what is stacked in these values, by index of the value."""
        lies, wanted = stacked or {}, set(values)
        carries = {
            carry.value: Address("value", lies[carry.value], "slice")
            if carry.value in lies
            else Address("buffers", carry.value, "next")
            for carry in self.carries
        }
        stacks = [stack.value for stack in self.stacks if stack.value in wanted]
        return carries | {value: Address("value", value, "slice") for value in stacks}


def carries_of(body: Body) -> tuple[Carry, ...]:
    """Return what a loop carries from step to step."""
    inputs = {leaf: index for index, leaf in enumerate(body.inputs)}
    pairs = zip(body.carries, body.following, strict=True)
    return tuple(Carry(leaf, result, inputs.get(leaf), value) for value, (leaf, result) in enumerate(pairs))


def repeat_of(loop: Tensor | Node) -> Repeat:
    """Return the steps of a loop."""
    body = body_of(loop)
    inputs = {leaf: index for index, leaf in enumerate(body.inputs)}
    slices, captures = ([Operand(leaf, inputs[leaf]) for leaf in leaves] for leaves in (body.slices, body.captures))
    stacks = (Stack(result, value) for value, result in enumerate(body.stacked, len(body.carries)))
    reverse = bool(loop.attributes.get("reverse"))
    return Repeat(body, steps_of(loop), reverse, carries_of(body), tuple(slices), tuple(captures), tuple(stacks))


def operations_of(value: Tensor) -> int:
    """Return the operations of all steps, of one if their number is not known, if this value is to count them."""
    body, length = body_of(value), steps_of(value)
    order = topological(body.results) if value.index == body.counted else []
    total = sum(tensor.op.operations(tensor) for tensor in order if tensor.op is not None and not tensor.op.is_view)
    return total if length is None else length * total
