"""Executes programs whose loops are in memory as their addresses say, whatever an executor makes of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dptrain.program.body import has_body
from dptrain.program.gradient import topological
from dptrain.program.schedule.loops import BUFFERS, Address, Repeat, repeat_of
from dptrain.program.shapes import local
from dptrain.program.sharding.mesh import constant_of
from dptrain.program.tensor import Array, Node, Tensor

# The most steps of a loop of unknown length: a wrong condition may never end it.
_MOST_STEPS = 50


class MemoryOfLoops:
    """Computes tensors, for some rows, with each loop's inputs, values and buffers in arrays of their own.

    Args:
        rows: of the batch.
        derive: returns a loop's data.
        shares: whether carries lie where they are stacked.
        rng: draws the order in which a step stores its results, each computed from what memory holds then.
    """

    def __init__(
        self,
        rows: int,
        derive: Callable[[Node], Repeat] = repeat_of,
        shares: bool = False,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._rows, self._derive, self._shares = rows, derive, shares
        self._rng = np.random.default_rng(0) if rng is None else rng
        self.loops = 0

    def values(self, results: Iterable[Tensor], leaves: Mapping[Tensor, Array]) -> dict[Tensor, Array]:
        """Return the values of all tensors that results depend on."""
        values = dict(leaves)
        order = topological(list(results), lambda tensor: () if tensor in values else tensor.inputs)
        read: dict[Node, set[int]] = {}
        for tensor in order:
            if has_body(tensor):
                read.setdefault(tensor.node, set()).add(tensor.index)
        loops: dict[Node, dict[int, Array]] = {}
        for tensor in order:
            if tensor in values:
                continue
            inputs = [values[operand] for operand in tensor.inputs]
            if tensor.op is None:
                values[tensor] = np.asarray(constant_of(tensor, self._rows, self._rows))
            elif has_body(tensor):
                if tensor.node not in loops:
                    loops[tensor.node] = self._loop(tensor.node, inputs, read[tensor.node])
                values[tensor] = loops[tensor.node][tensor.index]
            else:
                values[tensor] = self._computed(tensor, inputs)
        return values

    def _computed(self, tensor: Tensor, inputs: Sequence[Array]) -> Array:
        op = tensor.op
        assert op is not None
        assert not op.has_values, "only loops have several values here"
        attributes = op.local_attributes(tensor, self._rows, 0)
        if op.is_view:
            return np.asarray(op.compute(*inputs, **attributes))
        out = np.empty(local(tensor.shape, self._rows), tensor.dtype)
        op.compute(*inputs, **attributes, out=out)
        return out

    def _loop(self, node: Node, inputs: Sequence[Array], read: set[int]) -> dict[int, Array]:
        repeat = self._derive(node)
        body, self.loops = repeat.body, self.loops + 1
        shapes = body.shapes(repeat.length or 0)
        values = {index: self._garbage(shapes[index], body.results[index]) for index in read}
        if repeat.guard is not None and not inputs[repeat.guard]:
            return {index: np.zeros_like(value) for index, value in values.items()}
        buffers = [self._garbage((BUFFERS, *carry.leaf.shape), carry.leaf) for carry in repeat.carries]
        for carry, of_carry in zip(repeat.carries, buffers, strict=True):
            of_carry[0] = 0 if carry.input is None else inputs[carry.input]
        stacked = self._stacked(repeat, read)
        reads, writes = repeat.reads(stacked), repeat.writes(read, stacked)
        arrays: dict[str, Any] = {"input": inputs, "value": values, "buffers": buffers}

        def part(at: Address, step: int) -> Array:
            """Return what lies at an address in a step, as a view."""
            if at.first is not None and step == 0:
                return buffers[at.first][0, ...]
            array: Array = arrays[at.array][at.index]
            return array if at.counter is None else array[repeat.counters(step)[at.counter], ...]

        def goes_on(step: int) -> bool:
            assert step < _MOST_STEPS, "a loop that does not end"
            return bool(part(reads[repeat.condition.value], step))

        count = 0
        for step in repeat.steps(goes_on):
            for index in self._rng.permutation(sorted(writes)):
                leaves = {leaf: np.array(part(at, step)) for leaf, at in zip(body.placeholders, reads, strict=True)}
                result = body.results[index]
                part(writes[index], step)[...] = self.values([result], leaves)[result]
            count = step + 1
        for carry in repeat.carries:
            last = part(reads[carry.value], count)
            if carry.value not in stacked and repeat.length is not None:
                last = buffers[carry.value][repeat.last_buffer, ...]
            if carry.value in read:
                values[carry.value][...] = last
        return values

    def _stacked(self, repeat: Repeat, read: set[int]) -> dict[int, int]:
        stacks = [stack for stack in repeat.stacks if stack.value in read and self._shares]
        return {
            carry.value: stack.value for carry in repeat.carries for stack in stacks if stack.result is carry.result
        }

    def _garbage(self, shape: Sequence[Any], like: Tensor) -> Array:
        return np.full(local(tuple(shape), self._rows), np.nan if like.dtype.kind in "fV" else 1, like.dtype)
