"""Loops whose rows need no others: each row of what steps store is made of the same row alone, so that none waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dptrain.program.codegen.index_expr import IndexExpr, numel, unravel
from dptrain.program.lowering import Reduction, lowering_of
from dptrain.program.operand import OPERATORS
from dptrain.program.schedule.loops import Carry, Repeat
from dptrain.program.schedule.nest import Nest
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor


@dataclass(frozen=True, eq=False)
class RowLoop:
    """The nests of a loop's step, by the rows of the batch."""

    repeat: Repeat
    nests: Sequence[Nest]

    @cached_property
    def sums(self) -> dict[Tensor, Carry]:
        """Sums over the rows, with the carry that each is added to, which nothing else reads.

        Whoever has some rows adds up the terms of these, and all are added after the last step.
        """
        sums: dict[Tensor, Carry] = {}
        for nest in self.nests:
            for carry in self.repeat.carries:
                total = carry.result
                if nest.frame != "columns" or nest.members.get(total) != "final" or total.op is not OPERATORS["+"]:
                    continue
                others = [read for read in total.inputs if read is not carry.leaf]
                readers = [reader for reader in self.nests if {carry.leaf, total} & reader.reads.keys()]
                if len(others) == 1 and readers == [nest] and _is_sum(others[0], nest):
                    sums[others[0]] = carry
        return sums

    @cached_property
    def rows(self) -> Shape:
        """The length of the rows, of what steps change; () if they change sums alone."""
        return next((carry.result.shape[:1] for carry in self.repeat.carries if carry.result in self._changing), ())

    @cached_property
    def are_apart(self) -> bool:
        """Whether each row of what steps store is made of the same row of what steps store, but for `sums`."""
        return bool(self.rows) and all(map(self._is_by_rows, self.nests))

    @cached_property
    def _changing(self) -> set[Tensor]:
        """What a step writes and a later one, or another nest, reads."""
        written = (tensor for nest in self.nests for tensor in nest.writes)
        added = {tensor for carry in self.sums.values() for tensor in (carry.leaf, carry.result)}
        return {*self.repeat.body.carries, *written} - added

    def _is_by_rows(self, nest: Nest) -> bool:
        if nest.axes[0][0] != "row" or numel(nest.lead[:1]) != numel(self.rows):
            return False
        totals = {carry.result for carry in self.sums.values()}
        if not (self.sums.keys() >= set(nest.of("sum")) and totals >= set(nest.of("final"))):
            return False
        row = unravel(nest.element, (*nest.lead, *nest.inner))[0]
        positions = [(tensor, position) for tensor, each in nest.reads.items() for position in each]
        positions += nest.writes.items()
        return all(
            self._is_at(tensor, position, row, nest) for tensor, position in positions if tensor in self._changing
        )

    def _is_at(self, tensor: Tensor, position: IndexExpr | None, row: IndexExpr, nest: Nest) -> bool:
        """Whether a position of a tensor lies in a row."""
        columns = numel(tensor.shape[1:])
        if numel(tensor.shape[:1]) != numel(self.rows):
            return False
        if position is None:
            return tensor is nest.row_operand
        return (position - row.times(columns)).is_below(columns)


def _is_sum(tensor: Tensor, nest: Nest) -> bool:
    lowering = lowering_of(tensor)
    return nest.members.get(tensor) == "sum" and isinstance(lowering, Reduction) and lowering.join == "sum"
