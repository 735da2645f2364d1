"""Executes statements one by one, for one element: what they say, whatever a backend makes of them."""

from collections.abc import Mapping, Sequence

import numpy as np

from dptrain.program.codegen.index_expr import FloorDiv, IndexExpr
from dptrain.program.lowering import Gather, Product, Reduction, lowering_of
from dptrain.program.schedule.statements import (
    At,
    Choose,
    Compute,
    Convert,
    Known,
    Load,
    Multiply,
    Reduce,
    Row,
    Statement,
    Tap,
    Value,
    Within,
)
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
        else:
            self._values[statement.to.number] = np.asarray(self._value(statement))

    def _index(self, statement: Row | Within | Tap) -> int:
        if isinstance(statement, Row):
            lowering, table = lowering_of(statement.tensor), self._arrays[statement.tensor.inputs[0]]
            axis = lowering.batch if isinstance(lowering, Gather) else 0
            return int(self.of(statement.of)) % max(table.shape[axis], 1)
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
        lowering, dtype = lowering_of(reduce.tensor), reduce.tensor.dtype
        join = "sum" if not isinstance(lowering, Reduction) else lowering.join
        if join == "sum" or isinstance(lowering, Product):
            return np.sum(np.array(terms, np.float64 if dtype.kind in "fV" else dtype)).astype(dtype)
        return np.asarray((np.argmax if join == "argmax" else np.max)(np.array(terms))).astype(dtype)
