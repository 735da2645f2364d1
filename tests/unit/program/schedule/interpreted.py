"""Executes statements one by one, of an element or of nests: what they say, whatever a backend makes of them."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from dptrain.program.codegen.index_expr import ONE, FloorDiv, IndexExpr, Numel, numel
from dptrain.program.lowering import Gather, Product, Reduction, lowering_of
from dptrain.program.schedule.nest import Nest
from dptrain.program.schedule.statements import (
    At,
    Choose,
    Compute,
    Convert,
    For,
    Join,
    Known,
    Load,
    Multiply,
    Reduce,
    Row,
    Statement,
    Store,
    Tap,
    Total,
    Value,
    Within,
)
from dptrain.program.shapes import local, size
from dptrain.program.tensor import Array, Tensor


class Interpreter:
    """Values and computed indices of statements, given the arrays of stored tensors and a rank's rows."""

    def __init__(self, arrays: Mapping[Tensor, Array], rows: int) -> None:
        self._arrays, self._rows = arrays, rows
        self._values: dict[int, Array] = {}
        self._indices: dict[str | int, int] = {}
        self._holds: dict[Within | Tap, bool] = {}

    def run(self, statements: Sequence[Statement]) -> None:
        """Execute statements in order."""
        for statement in statements:
            self._run(statement)

    def of(self, value: Value) -> Array:
        """Return a value."""
        return self._values[value.number]

    def position(self, position: IndexExpr) -> int:
        """Evaluate an index expression."""
        total = 0
        for (index, power), count in position.terms.items():
            factor = 1
            if isinstance(index, FloorDiv):
                number, by = index.divisor
                factor = self.position(index.dividend) // (number * self._rows**by)
            elif index is not None:
                factor = self._indices.get(index.name, 0)  # the first row is 0
            total += count * self._rows**power * factor
        return total

    def _run(self, statement: Statement) -> None:
        if isinstance(statement, Row | Within | Tap):
            self._indices[statement.index.name] = self._index(statement)
        elif not isinstance(statement, For | Join | Store):
            self._values[statement.to.number] = np.asarray(self._value(statement))

    def _index(self, statement: Row | Within | Tap) -> int:
        if isinstance(statement, Row):
            lowering, table = lowering_of(statement.tensor), statement.tensor.inputs[0]
            axis = lowering.batch if isinstance(lowering, Gather) else 0
            return int(self.of(statement.of)) % max(size(local(table.shape[axis : axis + 1], self._rows)), 1)
        if isinstance(statement, Within):
            offset = self.position(statement.position) - self.position(statement.first)
            starts = not statement.from_first or offset >= 0
            ends = statement.end is None or self.position(statement.position) < self.position(statement.end)
            self._holds[statement] = starts and ends and offset % statement.step == 0
            return offset // statement.step
        base, shift = self.position(statement.base), self.position(statement.shift)
        steps = base + shift if statement.stride is None else base - shift
        index = steps // (statement.stride or 1)
        self._holds[statement] = steps >= 0 and steps % (statement.stride or 1) == 0 and index < statement.length
        return index

    def _value(self, statement: Statement) -> Array:
        match statement:
            case Known(tensor=tensor):
                if tensor.counts_rows:
                    return np.asarray(self._rows * tensor.attributes["rows"], tensor.dtype)
                assert tensor.value is not None
                return np.asarray(tensor.value).reshape(())
            case Load(tensor=tensor, position=position):
                return self._arrays[tensor].reshape(-1)[self.position(position)]
            case At(position=position):
                return np.asarray(self.position(position))
            case Compute(tensor=tensor):
                return self._computed(statement)
            case Convert(value=value, to_dtype=dtype):
                return self.of(value).astype(dtype)
            case Multiply(tensor=tensor, factors=factors):
                return np.prod([self.of(factor).astype(np.float64) for factor in factors]).astype(tensor.dtype)
            case Choose(dtype=dtype, cases=cases):
                for case in cases:
                    if all(self._holds[guard] for guard in case.guards):
                        self.run(case.body)
                        return self.of(case.value)
                return np.zeros((), dtype)
            case Reduce():
                return self._reduced(statement)
        raise AssertionError(f"no interpretation: {statement}")

    def _computed(self, compute: Compute) -> Array:
        tensor, operands = compute.tensor, [self.of(operand) for operand in compute.operands]
        assert tensor.op is not None
        attributes = tensor.op.local_attributes(tensor, self._rows, 0)
        out = np.empty(() if compute.last is None else tensor.shape[-1:], tensor.dtype)
        tensor.op.compute(*operands, **attributes, out=out)
        return out if compute.last is None else out[int(self.of(compute.last))]

    def _reduced(self, reduce: Reduce) -> Array:
        number, power = reduce.length
        terms = []
        for index in range(number * self._rows**power):
            self._indices[reduce.index.name] = index
            self.run(reduce.body)
            terms.append(self.of(reduce.term))
        return _joined(reduce.tensor, terms)


NEVER = 77


class NestInterpreter(Interpreter):
    """Executes nests, in the order of their levels, where elements of externs are those of `expected`."""

    def __init__(self, arrays: Mapping[Tensor, Array], expected: Mapping[Tensor, Array], rows: int) -> None:
        self._stored = dict(arrays)
        super().__init__(self._stored, rows)
        self._expected = expected

    def execute(self, nests: Sequence[Nest]) -> dict[Tensor, Array]:
        """Return all arrays that nests store, elements that none stores being `NEVER`."""
        written: dict[Tensor, Array] = {}
        for nest in nests:
            self._nest, self._terms = nest, dict[tuple[Tensor, int], dict[int, Array]]()
            self._new = {tensor: np.full(self._expected[tensor].shape, NEVER, tensor.dtype) for tensor in nest.writes}
            self._new |= {tensor: np.ascontiguousarray(self._expected[tensor]) for tensor in nest.results}
            columns = self._count(numel(nest.inner))
            for self._indices["c"] in range(columns if nest.frame in ("columns", "totals") else 1):
                self.run(nest.body)
            for self._indices["c"] in range(columns if nest.by_column else 1):
                self.run(nest.finals)
            self._stored |= self._new
            written |= self._new
        return written

    def _count(self, length: Numel) -> int:
        return length[0] * self._rows ** length[1]

    def _run(self, statement: Statement) -> None:
        match statement:
            case For(indices=indices, body=body):
                counts = [range(self._count(index.length or ONE)) for index in indices]
                for values in itertools.product(*counts):
                    self._indices |= dict(zip((index.name for index in indices), values, strict=True))
                    self.run(body)
            case Join(tensor=tensor, term=term, position=position):
                index = self.position(position)
                terms = self._terms.setdefault(self._key(tensor), {})
                assert index not in terms, "it has joined before"
                terms[index] = self.of(term)
            case Store(tensor=tensor, position=position, value=value):
                self._new[tensor].reshape(-1)[self.position(position)] = self.of(value)
        super()._run(statement)

    def _key(self, tensor: Tensor) -> tuple[Tensor, int]:
        return tensor, self.position(self._nest.position(self._nest.members[tensor]))

    def _value(self, statement: Statement) -> Array:
        if not isinstance(statement, Total):
            return super()._value(statement)
        tensor = statement.tensor
        if self._nest.frame == "product" and self._nest.members[tensor] == "main":
            return self._expected[tensor].reshape(-1)[self.position(self._nest.element)]
        return _joined(tensor, [term for _, term in sorted(self._terms.get(self._key(tensor), {}).items())])


def _joined(tensor: Tensor, terms: Sequence[Array]) -> Array:
    lowering, dtype = lowering_of(tensor), tensor.dtype
    join = "sum" if not isinstance(lowering, Reduction) else lowering.join
    if join == "sum" or isinstance(lowering, Product):
        return np.sum(np.array(terms, np.float64 if dtype.kind in "fV" else dtype)).astype(dtype)
    return np.asarray((np.argmax if join == "argmax" else np.max)(np.array(terms))).astype(dtype)
