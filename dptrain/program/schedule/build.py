"""Builds the statements that compute an element of a tensor: the only place that knows how ops compute theirs.

`Builder.value(tensor, index)` pulls an element from stored tensors: views become index arithmetic, elementwise ops a
`Compute`, and so on. Each statement stands in the outermost scope that has its operands, and is built once as long as
that scope lasts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program.codegen.index_expr import (
    ONE,
    ZERO_INDEX,
    Axis,
    IndexExpr,
    Numel,
    numel,
    offset_by,
    ravel,
    symbol,
    unravel,
)
from dptrain.program.codegen.kernels import reduced_axes
from dptrain.program.lowering import (
    ConvolutionLowering,
    Element,
    Gather,
    Insert,
    Join,
    Product,
    RandomBits,
    Reduction,
    RowChain,
    Scatter,
    ViewMap,
    Windows,
    lowering_of,
)
from dptrain.program.schedule.statements import (
    At,
    Case,
    Choose,
    Compute,
    Convert,
    Draw,
    Guard,
    Known,
    Load,
    Multiply,
    Reduce,
    Row,
    Statement,
    Tap,
    Total,
    Value,
    Whole,
    Within,
)
from dptrain.program.shapes import Shape, is_one
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.tensor import Tensor

# Index of an element along each axis of a tensor.
Index = Sequence[IndexExpr]


@dataclass
class _Scope:
    """Depth from which on a value is of this scope, and the keys of those that end with it."""

    threshold: int
    keys: list[tuple[object, ...]] = field(default_factory=list)


class Builder:
    """Builds the statements of one function.

    Args:
        is_stored: whether a tensor is in memory when the function runs.

    `known`: elements that the function has in variables, by tensor and flat index; `statements`: all, in order.
    """

    def __init__(self, is_stored: Callable[[Tensor], bool]) -> None:
        self._is_stored = is_stored
        self.known: dict[Tensor, dict[IndexExpr, Value]] = {}
        self.statements: list[Statement] = []
        self._body = self.statements  # of the innermost case or loop
        self._scopes = [_Scope(0)]
        self._made: dict[tuple[object, ...], Value] = {}
        self._count = 0

    # Scopes

    @contextmanager
    def scope(self, threshold: int | None = None) -> Iterator[None]:
        """Forget at its end the values of this depth and deeper, by default of a new depth."""
        self._scopes.append(_Scope(self.depth + 1 if threshold is None else threshold))
        yield
        for key in self._scopes.pop().keys:
            del self._made[key]

    @property
    def depth(self) -> int:
        """Depth of the innermost scope."""
        return self._scopes[-1].threshold

    @contextmanager
    def block(self, threshold: int | None = None) -> Iterator[list[Statement]]:
        """Collect the statements of a case, a loop or a part of a nest."""
        outer, self._body = self._body, []
        with self.scope(threshold):
            yield self._body
        self._body = outer

    def append(self, statement: Statement) -> None:
        """Append a statement to the innermost block."""
        self._body.append(statement)

    def know(self, tensor: Tensor, position: IndexExpr, depth: int) -> None:
        """Use what a frame has computed for a tensor's element at a flat index, and for no other of this tensor."""
        self.append(total := Total(self.new(depth), tensor))
        self.known[tensor] = {position: total.to}

    def new(self, depth: int, computed: bool = False) -> Value:
        """Return a value that nothing has computed yet."""
        self._count += 1
        return Value(self._count, depth, computed)

    def _index(self, length: Numel, depth: int) -> Axis:
        """Return an index that a statement is to compute."""
        self._count += 1
        return Axis(f"%{self._count}", length, depth)

    # Elements

    def value(self, tensor: Tensor, index: Index) -> Value:
        """Return an element of a tensor; ConfigError if its op has no kernel."""
        if tensor in self.known and (value := self.known[tensor].get(ravel(index, tensor.shape))) is not None:
            return value
        if self._is_stored(tensor):
            return self._loaded(tensor, index)
        return self.computed(tensor, index)._replace(computed=tensor.op is not None)

    def computed(self, tensor: Tensor, index: Index) -> Value:
        """Return an element, computed even if the tensor is stored."""
        key = (tensor, *index)
        if (value := self._made.get(key)) is None:
            value = self._made[key] = self._computed(tensor, index)
            scope = next(scope for scope in reversed(self._scopes) if value.depth >= scope.threshold)
            scope.keys.append(key)
        return value

    def at(self, position: IndexExpr) -> Value:
        """Return an index as a value."""
        statement = At(self.new(position.depth), position)
        self._body.append(statement)
        return statement.to

    def _loaded(self, tensor: Tensor, index: Index) -> Value:
        position = ravel(index, tensor.shape)
        statement = Load(self.new(position.depth), tensor, position)
        self._body.append(statement)
        return statement.to

    def _computed(self, tensor: Tensor, index: Index) -> Value:
        if tensor.op is None:
            return self._number(tensor)
        if tensor.op is ALL_REDUCE:
            return self.value(tensor.inputs[0], index)
        if (rule := _RULES.get(type(tensor.op.lowering))) is None:
            raise ConfigError(f"op {tensor.op.name!r} has no kernel: use --device cpu")
        return rule(self, tensor, index)

    def _number(self, tensor: Tensor, exact: bool = False) -> Value:
        statement = Known(self.new(0), tensor, exact)
        self._body.append(statement)
        return statement.to

    # By lowering

    def _element(self, tensor: Tensor, index: Index) -> Value:
        lowering, last = lowering_of(tensor), None
        assert isinstance(lowering, Element)
        if lowering.by_last:
            *index, position = index
            index, last = _reshaped(index, tensor.shape[:-1], tensor.inputs[0].shape), self.at(position)
        operands = tuple(
            self._number(operand, exact=True)  # compilers have shorter forms: x * x
            if n in lowering.exponents and _is_whole(operand)
            else self.value(operand, _spread(index, operand.shape))
            for n, operand in enumerate(tensor.inputs)
        )
        depth = max((operand.depth for operand in (*operands, *([last] if last else []))), default=0)
        self._body.append(statement := Compute(self.new(depth), tensor, operands, last))
        return statement.to

    def _view(self, tensor: Tensor, index: Index) -> Value:
        x, view_map = tensor.inputs[0], lowering_of(tensor)
        assert isinstance(view_map, ViewMap)
        if view_map.maps is None:
            return self.value(x, _reshaped(index, tensor.shape, x.shape))
        maps = zip(view_map.maps(tensor), x.shape, strict=True)
        return self.value(x, [ZERO_INDEX if is_one(n) else index_map.at(index) for index_map, n in maps])

    def _with_parts(self, tensor: Tensor, index: Index) -> Value:
        """An element of the operand whose part of the result it belongs to, else 0."""
        lowering = lowering_of(tensor)
        assert isinstance(lowering, Insert | Join)
        parts: list[tuple[Tensor, list[Guard], Index]] = []
        before = [ZERO_INDEX] * tensor.ndim  # where the part before ends
        for operand, maps in zip(tensor.inputs, lowering.parts(tensor), strict=True):
            inner, guards = [ZERO_INDEX] * operand.ndim, list[Guard]()
            for axis, (index_map, position, n) in enumerate(zip(maps, index, tensor.shape, strict=True)):
                length = ONE if index_map.axis is None else numel((operand.shape[index_map.axis],))
                first, step = index_map.first, index_map.step
                end, whole = first + offset_by(length).times((step, 0)) - offset_by((step - 1, 0)), numel((n,))
                if first.terms or step != 1 or end != offset_by(whole):
                    from_first = bool(first.terms) and first != before[axis]
                    until = None if end == offset_by(whole) else end
                    guard = Within(self._index(length, position.depth), position, first, step, from_first, until)
                    guards.append(guard)
                    self._body.append(guard)
                    position = symbol(guard.index)
                before[axis] = end
                if index_map.axis is not None:
                    inner[index_map.axis] = position
            parts.append((operand, guards, inner))

        def value(operand: Tensor, inner: Index) -> Value:
            element = self.value(operand, inner)
            if operand.dtype == tensor.dtype:
                return element
            converted = self.new(element.depth, element.computed)
            self._body.append(Convert(converted, element, operand.dtype, tensor.dtype))
            return converted

        return self._chosen(tensor, [(guards, partial(value, x, inner)) for x, guards, inner in parts])

    def _chosen(self, tensor: Tensor, cases: Sequence[tuple[Sequence[Guard], Callable[[], Value]]]) -> Value:
        """Return the value of the first case that holds.

        The depth of a case is that of its outermost guard: what outer scopes know is computed there, whatever it says.
        """
        tested = [[guard.depth for guard in guards] for guards, _ in cases if any(guard.is_test for guard in guards)]
        if not tested and len(cases) == 1:
            return cases[0][1]()
        threshold = min((min(depths) for depths in tested), default=0)
        built: list[Case] = []
        for guards, value in cases:
            with self.block(min(threshold, self.depth)) as body:
                built.append(Case(guards, body, value()))
        self._body.append(statement := Choose(self.new(self.depth), tensor.dtype, built))
        return statement.to

    def _taken_row(self, tensor: Tensor, index: Index) -> Value:
        table, rows = tensor.inputs
        gather = lowering_of(tensor)
        batch = gather.batch if isinstance(gather, Gather) else 0
        row_number = self.value(rows, index[: rows.ndim])
        row = self._index(numel(table.shape[batch : batch + 1]), row_number.depth)
        self._body.append(Row(row, tensor, row_number))
        return self.value(table, [*index[:batch], symbol(row), *index[rows.ndim :]])

    def _random_bits(self, tensor: Tensor, index: Index) -> Value:
        row, feature = map(self.at, index)
        count = self.value(tensor.inputs[0], ())
        depth = max(row.depth, feature.depth, count.depth)
        self._body.append(statement := Draw(self.new(depth), tensor, row, feature, count))
        return statement.to

    def _whole(self, tensor: Tensor, positions: Sequence[IndexExpr]) -> Value:
        depth = max(position.depth for position in positions)
        self._body.append(statement := Whole(self.new(depth), tensor, tuple(positions)))
        return statement.to

    def _window(self, tensor: Tensor, index: Index) -> Value:
        return self._whole(tensor, index)

    def _added_row(self, tensor: Tensor, index: Index) -> Value:
        return self._whole(tensor, [index[0], ravel(index[1:], tensor.shape[1:])])

    def _chained_row(self, tensor: Tensor, index: Index) -> Value:
        lowering = lowering_of(tensor)
        assert isinstance(lowering, RowChain)
        return (
            self._added_row(tensor, index)
            if lowering.part == "sum"
            else self._whole(tensor, [ravel(index, tensor.shape)])
        )

    # One thread alone

    def _reduced(self, tensor: Tensor, lengths: Shape, term: Callable[[IndexExpr], Value]) -> Value:
        """Join terms in a loop."""
        with self.block() as body:
            index = self._index(numel(lengths), self.depth)
            value = term(symbol(index))
        self._body.append(statement := Reduce(self.new(self.depth), tensor, index, numel(lengths), body, value))
        return statement.to

    def _reduction(self, tensor: Tensor, index: Index) -> Value:
        x, axes = tensor.inputs[0], reduced_axes(tensor)
        lengths = tuple(x.shape[axis] for axis in axes)
        kept = [place for axis, place in enumerate(index) if not tensor.attributes.get("keepdims") or axis not in axes]

        def term(position: IndexExpr) -> Value:
            outer, inner = iter(kept), iter(unravel(position, lengths))
            return self.value(x, [next(inner) if axis in axes else next(outer) for axis in range(x.ndim)])

        return self._reduced(tensor, lengths, term)

    def _multiplied(self, tensor: Tensor, indices: Sequence[Index]) -> Value:
        factors = tuple(self.value(operand, index) for operand, index in zip(tensor.inputs, indices, strict=True))
        depth = max(factor.depth for factor in factors)
        self._body.append(statement := Multiply(self.new(depth), tensor, factors))
        return statement.to

    def _product(self, tensor: Tensor, index: Index) -> Value:
        """Products of types without tiled kernels: a plain loop."""
        a, b = tensor.inputs
        *batch, m, n = index

        def term(k: IndexExpr) -> Value:
            of_a, of_b = ([*_spread(batch, x.shape[:-2]), *last] for x, last in ((a, (m, k)), (b, (k, n))))
            return self._multiplied(tensor, [of_a, of_b])

        return self._reduced(tensor, a.shape[-1:], term)

    def _convolution(self, tensor: Tensor, index: Index) -> Value:
        """Convolutions of types without tiled kernels: a plain loop."""
        lowering = lowering_of(tensor)
        assert isinstance(lowering, ConvolutionLowering)
        names = {lowering.image: "bhwi", lowering.places: "bpqo", lowering.kernel: "rsio"}
        lengths = dict(zip("bhwibpqorsio", itertools.chain(*lowering.shapes(tensor)), strict=True))
        summed = {"images": "rso", "places": "rsi", "kernel": "bpq"}[lowering.makes]
        *_, stride_h, stride_w, dilation_h, dilation_w, before_h, before_w = lowering.numbers(tensor)
        axes = (("h", "p", "r"), stride_h, dilation_h, before_h), (("w", "q", "s"), stride_w, dilation_w, before_w)

        def term(k: IndexExpr) -> Value:
            at = dict(zip(names[-1], index, strict=True))
            at |= dict(zip(summed, unravel(k, [lengths[axis] for axis in summed]), strict=True))
            taps: list[Guard] = []
            for (pixel, place, tap), stride, dilation, before in axes:
                of_images = lowering.makes == "images"
                unknown, base = (place, at[pixel]) if of_images else (pixel, at[place].times((stride, 0)))
                shift = at[tap].times((dilation, 0)) - offset_by((before, 0))
                found = self._index(numel((lengths[unknown],)), max(base.depth, shift.depth))
                guard = Tap(found, base, shift, stride if of_images else None, lengths[unknown])
                self._body.append(guard)
                taps.append(guard)
                at[unknown] = symbol(found)
            operands = [[at[name] for name in names[number]] for number in range(len(tensor.inputs))]
            return self._chosen(tensor, [(taps, lambda: self._multiplied(tensor, operands))])

        return self._reduced(tensor, tuple(lengths[axis] for axis in summed), term)


_RULES: dict[type, Callable[[Builder, Tensor, Index], Value]] = {
    Element: Builder._element,
    ViewMap: Builder._view,
    Insert: Builder._with_parts,
    Join: Builder._with_parts,
    Gather: Builder._taken_row,
    RandomBits: Builder._random_bits,
    Scatter: Builder._added_row,
    RowChain: Builder._chained_row,
    Windows: Builder._window,
    Product: Builder._product,
    Reduction: Builder._reduction,
    ConvolutionLowering: Builder._convolution,
}


def _spread(index: Index, shape: Shape) -> Index:
    """Return the index in a broadcast operand."""
    return [
        ZERO_INDEX if is_one(n) else place for place, n in zip(index[len(index) - len(shape) :], shape, strict=True)
    ]


def _reshaped(index: Index, old: Shape, new: Shape) -> Index:
    """Return the index of the same element in another shape."""
    return unravel(ravel(index, old), new)


def _is_whole(tensor: Tensor) -> bool:
    value = tensor.value
    if tensor.op is not None or value is None or value.size != 1 or tensor.counts_rows:
        return False
    return bool(value > 0 and value == np.floor(value))
