"""Statements of a function as data: how elements of tensors are computed from what is stored.

`build.py` writes them, from ops; a backend's renderer turns each into text. Everything that is asked of generated code,
such as what it loads at which index, is a walk over its statements.

Statements follow in the order in which they are needed. Each has the depth of the innermost scope that knows its
operands, where it is executed: outside a loop what does not change in it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dptrain.program.codegen.index_expr import Axis, IndexExpr, Numel
from dptrain.program.tensor import DType, Tensor


class Value(NamedTuple):
    """What a statement computes: its number, and the scope that knows it; `computed`: not loaded from memory."""

    number: int
    depth: int = 0
    computed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A number of the program; `exact`: the text shows it, whether or not it differs between runs."""

    to: Value
    tensor: Tensor
    exact: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """An element of a stored tensor, at a flat index."""

    to: Value
    tensor: Tensor
    position: IndexExpr


@dataclass(frozen=True, slots=True, eq=False)
class At:
    """An index as a value."""

    to: Value
    position: IndexExpr


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """An elementwise op's element, from the operands' elements; `last`: the index along the last axis, for some ops."""

    to: Value
    tensor: Tensor
    operands: tuple[Value, ...]
    last: Value | None


@dataclass(frozen=True, slots=True, eq=False)
class Convert:
    """An element in another type."""

    to: Value
    value: Value
    dtype: DType
    to_dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Multiply:
    """The product of elements of a tensor's operands, in the tensor's type."""

    to: Value
    tensor: Tensor
    factors: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Random bits of a row and a feature, after `count` draws."""

    to: Value
    tensor: Tensor
    row: Value
    feature: Value
    count: Value


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """An element computed by a function of whole operands, at these indices."""

    to: Value
    tensor: Tensor
    positions: tuple[IndexExpr, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The checked index of a table's row, of the op that gathers it."""

    index: Axis
    tensor: Tensor
    of: Value


@dataclass(frozen=True, slots=True, eq=False)
class Within:
    """The index in a part of a tensor, which is at `first`, `first` + `step` and so on up to `end`.

    `from_first`: it is to be tested that the part has begun; `end` is None where the tensor ends with the part.
    """

    index: Axis
    position: IndexExpr
    first: IndexExpr
    step: int
    from_first: bool
    end: IndexExpr | None

    @property
    def depth(self) -> int:
        """The scope that knows the index in the whole tensor."""
        return self.position.depth

    @property
    def is_test(self) -> bool:
        """Whether the part lacks indices of the tensor."""
        return self.from_first or self.end is not None or self.step != 1


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """The pixel or place that meets another at a tap of a window: `base` + `shift`, or (`base` - `shift`) / `stride`.

    It is to be tested that it exists, below `length`.
    """

    index: Axis
    base: IndexExpr
    shift: IndexExpr
    stride: int | None
    length: int

    @property
    def depth(self) -> int:
        """The scope that knows both."""
        return self.index.depth

    @property
    def is_test(self) -> bool:
        """See `Within`."""
        return True


Guard = Within | Tap


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A value and its statements, where all guards hold."""

    guards: Sequence[Guard]
    body: Sequence["Statement"]
    value: Value

    @property
    def always(self) -> bool:
        """Whether nothing is tested."""
        return not any(guard.is_test for guard in self.guards)


@dataclass(frozen=True, slots=True, eq=False)
class Choose:
    """The value of the first case that holds, else 0; other cases are not computed."""

    to: Value
    dtype: DType
    cases: Sequence[Case]


@dataclass(frozen=True, slots=True, eq=False)
class Reduce:
    """The join of a term for each index below `length`, one after the other; an argmax has the index itself."""

    to: Value
    tensor: Tensor
    index: Axis
    length: Numel
    body: Sequence["Statement"]
    term: Value


# Statements of a nest


@dataclass(frozen=True, slots=True, eq=False)
class For:
    """Statements at each value of these indices; those that need none of them are executed outside."""

    indices: tuple[Axis, ...]
    body: Sequence["Statement"]

    @property
    def depth(self) -> int:
        """Depth of its scope."""
        return min(index.depth for index in self.indices)


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A term joins a reduction of the nest; `position` is its index among the terms, for an argmax."""

    tensor: Tensor
    term: Value
    position: IndexExpr


@dataclass(frozen=True, slots=True, eq=False)
class Total:
    """A complete reduction, or an element of a product, which the frame computes."""

    to: Value
    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """An element is stored, at a flat index."""

    tensor: Tensor
    position: IndexExpr
    value: Value


Statement = (
    Known
    | Load
    | At
    | Compute
    | Convert
    | Multiply
    | Draw
    | Whole
    | Row
    | Within
    | Tap
    | Choose
    | Reduce
    | For
    | Join
    | Total
    | Store
)


def walk(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Yield statements, and those within them."""
    for statement in statements:
        yield statement
        if isinstance(statement, Reduce | For):
            yield from walk(statement.body)
        elif isinstance(statement, Choose):
            for case in statement.cases:
                yield from walk(case.body)


def stores(statements: Iterable[Statement]) -> dict[Tensor, IndexExpr]:
    """Return the flat index at which each tensor is stored."""
    return {statement.tensor: statement.position for statement in walk(statements) if isinstance(statement, Store)}


def loads(statements: Iterable[Statement]) -> dict[Tensor, set[IndexExpr | None]]:
    """Return the flat indices at which stored tensors are read, None for all of them."""
    positions: dict[Tensor, set[IndexExpr | None]] = {}
    for statement in walk(statements):
        if isinstance(statement, Load):
            positions.setdefault(statement.tensor, set()).add(statement.position)
        elif isinstance(statement, Whole):
            for operand in statement.tensor.inputs:
                positions.setdefault(operand, set()).add(None)
    return positions
