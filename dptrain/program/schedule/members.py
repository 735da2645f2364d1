"""Statements of a nest, from its members: what each computes, joins and stores, in which loop.

    rows: For(row: For(column: ..., Join), Total, For(column: ..., Join, Store), ..., Store), finals: Total, ..., Store
    others: For(element: ..., Join, Store), finals: Total, ..., Store

Elements are stored after all have been computed, since other members may read the old values. A backend that binds
these loops otherwise, such as a CPU to threads and vectors, reads the same statements.
"""

from collections.abc import Callable, Sequence
from functools import partial

from dptrain.program.codegen.index_expr import ONE, IndexExpr, numel
from dptrain.program.schedule.build import Builder
from dptrain.program.schedule.nest import Nest, Role
from dptrain.program.schedule.statements import For, Join, Store, Value, loads
from dptrain.program.tensor import Tensor


def loads_of(
    nest: Nest, tensor: Tensor, role: Role, is_stored: Callable[[Tensor], bool]
) -> dict[Tensor, set[IndexExpr | None]]:
    """Return the flat indices at which a member in this role would read stored tensors."""
    builder = Builder(lambda read: read is not tensor and is_stored(read))
    if role in ("reduce", "sum"):
        builder.value(*nest.term(tensor))
    else:
        builder.computed(tensor, nest.index(tensor.shape, role))
    return loads(builder.statements)


def write(nest: Nest, is_stored: Callable[[Tensor], bool], written: set[Tensor]) -> None:
    """Give a nest its statements: `is_stored` tells what other nests have computed, `written` what it is to store."""
    _Members(nest, is_stored, written).write()


class _Members:
    def __init__(self, nest: Nest, is_stored: Callable[[Tensor], bool], written: set[Tensor]) -> None:
        self._nest, self._written = nest, written
        self._builder = Builder(lambda tensor: tensor not in nest.members and is_stored(tensor))

    def write(self) -> None:
        nest, builder = self._nest, self._builder
        if nest.frame == "map" and numel(nest.lead) == ONE:
            self._elements(nest.of("sum"))
        else:
            with builder.block(1) as body:
                self._rows() if nest.frame == "rows" else self._elements(nest.of("sum"))
            tile = (nest.column_axis,) if nest.frame == "product" else ()
            builder.append(For((nest.row_axis, *tile), body))
        nest.body = builder.statements
        with builder.block(0) as nest.finals:
            for tensor in nest.of("sum"):
                builder.know(tensor, nest.final, 0)
            self._stores(self._values("sum") + self._values("final"), "final")

    def _values(self, role: Role) -> list[tuple[Tensor, Value]]:
        nest = self._nest
        return [(tensor, self._builder.value(tensor, nest.index(tensor.shape, role))) for tensor in nest.of(role)]

    def _joins(self, reductions: Sequence[Tensor]) -> None:
        for tensor in reductions:
            term = self._builder.value(*self._nest.term(tensor))
            self._builder.append(Join(tensor, term, self._nest.position_of_term(tensor)))

    def _stores(self, values: Sequence[tuple[Tensor, Value]], role: Role) -> None:
        for tensor, value in values:
            if tensor in self._written:
                self._builder.append(Store(tensor, self._nest.position(role), value))

    def _elements(self, sums: Sequence[Tensor]) -> None:
        if self._nest.frame == "product":
            self._builder.know(next(iter(self._nest.members)), self._nest.element, 2)
        values = self._values("main")
        self._joins(sums)
        self._stores(values, "main")

    def _rows(self) -> None:
        """Write a row: passes along it for reductions, one for its elements, and what it has once."""
        nest = self._nest
        for reductions in _passes(nest):
            self._columns(partial(self._joins, reductions))
            for tensor in reductions:
                self._builder.know(tensor, nest.row, 1)
        of_rows, others = list[Tensor](), list[Tensor]()
        for tensor in nest.of("sum"):
            (of_rows if nest.has_term_of_row(tensor) else others).append(tensor)
        self._columns(partial(self._elements, others))
        values = self._values("reduce") + self._values("row")
        self._joins(of_rows)
        self._stores(values, "row")

    def _columns(self, write_element: Callable[[], None]) -> None:
        with self._builder.block(2) as body:
            write_element()
        if body:
            self._builder.append(For((self._nest.column_axis,), body))


def _passes(nest: Nest) -> list[list[Tensor]]:
    """Group a row's reductions into passes of independent ones."""
    passes: list[list[Tensor]] = []
    for tensor in nest.of("reduce"):
        if passes and not _needs(tensor, set(passes[-1])):
            passes[-1].append(tensor)
        else:
            passes.append([tensor])
    return passes


def _needs(tensor: Tensor, targets: set[Tensor]) -> bool:
    visited: set[Tensor] = set()
    stack = list(tensor.inputs)
    while stack:
        read = stack.pop()
        if read in targets:
            return True
        if read not in visited:
            visited.add(read)
            stack += read.inputs
    return False
