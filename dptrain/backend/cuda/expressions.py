"""Elements of tensors as C++: the statements that compute an element from stored tensors, at an index.

`Writer.value(tensor, index)` writes the computation of an element: views become index arithmetic, elementwise ops an
expression, other ops a function of `kernels/`; stored tensors are loaded. Each statement stands in the outermost scope
that has its operands, and equal expressions are computed once.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program.codegen.cpp import Ex, cast, ctype, element, index_text, is_word, known_number, literal, numel_text
from dptrain.program.codegen.index_expr import (
    ONE,
    ZERO_INDEX,
    Axis,
    IndexExpr,
    numel,
    offset_by,
    ravel,
    symbol,
    unravel,
)
from dptrain.program.codegen.kernels import reduced_axes
from dptrain.program.codegen.statements import ALWAYS, ZERO, Statements
from dptrain.program.dims import Dim
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
from dptrain.program.program import ROWS
from dptrain.program.shapes import Shape, is_one
from dptrain.program.sharding.mesh import ALL_REDUCE
from dptrain.program.tensor import DType, Tensor

# Index of an element along each axis of a tensor.
Index = Sequence[IndexExpr]


@dataclass
class Quads:
    """Groups of four adjacent elements that a map's threads load and store, with the C++ index of the current element.

    `loaded` and `stored` map pointers to the variable that holds four elements, and their type.
    """

    index: str
    loaded: dict[str, tuple[str, str]] = field(default_factory=dict)
    stored: dict[str, tuple[str, str]] = field(default_factory=dict)


class Writer(Statements):
    """Writes the statements of one function.

    Args:
        is_stored: whether a tensor is in memory when the function runs.
        name: returns a stored tensor's pointer, and records that the function needs it.
        number: returns the name of a number that differs by run, and records it, given tensor, attribute ("" for a
            constant), value and type. By default numbers are literals.

    `known`: elements in variables, by tensor and flat index; `loads`: flat indices at which stored tensors are loaded,
    None for all; `needs`: headers and special arguments; `quads`: elements loaded and stored in fours, None if singly.
    """

    def __init__(
        self,
        is_stored: Callable[[Tensor], bool],
        name: Callable[[Tensor], str],
        number: Callable[[Tensor, str, Any, DType], str] | None = None,
    ) -> None:
        super().__init__()
        self._is_stored, self._name, self._number_name = is_stored, name, number
        self._drawn: dict[str, str] = {}
        self.known: dict[Tensor, dict[IndexExpr, Ex]] = {}
        self.loads: dict[Tensor, set[IndexExpr | None]] = {}
        self.needs: set[str] = set()
        self.quads: Quads | None = None

    def drawn(self, numbers: str) -> str:
        """Return the variable of random numbers drawn with these arguments, declared outside all loops."""
        if numbers not in self._drawn:
            self._drawn[numbers] = self.fresh("drawn")
            self.write(f"Drawn {self._drawn[numbers]};", depth=0)
        return self._drawn[numbers]

    def value(self, tensor: Tensor, index: Index) -> Ex:
        """Return an element of a tensor; ConfigError if its op has no kernel."""
        if tensor in self.known and (variable := self.known[tensor].get(ravel(index, tensor.shape))) is not None:
            return variable
        if self._is_stored(tensor):
            return self.load(tensor, index)
        return self.computed(tensor, index)._replace(computed=tensor.op is not None)

    def computed(self, tensor: Tensor, index: Index) -> Ex:
        """Return an element, computed even if the tensor is stored."""
        return self.kept((tensor, *index), lambda: self._computed(tensor, index))

    def _computed(self, tensor: Tensor, index: Index) -> Ex:
        if tensor.op is None:
            number = known_number(tensor, functools.partial(self.number, tensor))
            assert number is not None, f"{tensor} is neither stored nor known"
            return Ex(number)
        if tensor.op is ALL_REDUCE:
            return self.value(tensor.inputs[0], index)
        if isinstance(tensor.op.lowering, Element):
            return self._element(tensor.op.lowering, tensor, index)
        if type(tensor.op.lowering) in _RULES:
            return _RULES[type(tensor.op.lowering)](self, tensor, index)
        raise ConfigError(f"op {tensor.op.name!r} has no kernel: use --device cpu")

    def load(self, tensor: Tensor, index: Index) -> Ex:
        """Load an element."""
        place = ravel(index, tensor.shape)
        self.loads.setdefault(tensor, set()).add(place)
        if tensor.name == ROWS and tensor.variable is None:  # each step has its own rows
            self.needs.add("step")
            place += symbol(Axis(self.let("Index", "(Index)starts[*step]", 0, "start").text))
        at, pointer, kind = self.at(place), self._name(tensor), ctype(tensor.dtype)
        if self.quads is None or at.text != self.quads.index:
            return self.let(kind, f"{pointer}[{at.text}]", at.depth)
        quad, _ = self.quads.loaded.setdefault(pointer, (self.fresh("quad"), kind))
        return self.let(kind, f"{quad}.of[own]", at.depth)

    def number(self, tensor: Tensor, attribute: str, value: Any, dtype: DType) -> str:
        """Return a constant or attribute: by name if it may differ by run, else as a literal."""
        return self.own(tensor, attribute, value, dtype) if differs_by_run(value, dtype) else literal(value, dtype)

    def own(self, tensor: Tensor, attribute: str, value: Any, dtype: DType) -> str:
        """Return the name of a number that differs by run."""
        if self._number_name is None:
            return literal(value, dtype)
        return self._number_name(tensor, attribute, value, dtype)

    def _element(self, lowering: Element, tensor: Tensor, index: Index) -> Ex:
        last = ZERO
        if lowering.by_last:
            *index, place = index
            index, last = _reshaped(index, tensor.shape[:-1], tensor.inputs[0].shape), self.at(place)
        operands = [
            Ex(literal(operand.numpy(), operand.dtype))  # compilers have shorter forms: x * x
            if n in lowering.exponents and _is_whole(operand)
            else self.value(operand, _spread(index, operand.shape))
            for n, operand in enumerate(tensor.inputs)
        ]
        text = self._text_of(tensor, operands, last)
        return self.let(ctype(tensor.dtype), text, max(operand.depth for operand in (last, *operands)))

    def _text_of(self, tensor: Tensor, operands: Sequence[Ex], last: Ex) -> str:
        return element(tensor, operands, functools.partial(self.number, tensor), last.text)

    def pointer(self, tensor: Tensor) -> str:
        """Return the pointer of a tensor that a function reads in its own order."""
        self.loads.setdefault(tensor, set()).add(None)
        return self._name(tensor)

    def joined(self, kind: str, join: str, lengths: Shape, term: Callable[[IndexExpr], Ex]) -> Ex:
        """Reduce terms in a loop."""
        result, at = self.fresh("sum"), self.fresh("k")
        with self.scope() as inner:
            term_value = term(symbol(Axis(at, numel(lengths), self.depth)))
            inner.append(f"{result} = {join}::join({result}, ({kind}){term_value.text});")
        self.lines.extend(
            [
                f"{kind} {result} = {join}::identity<{kind}>();",
                f"for (Index {at} = 0; {at} < {numel_text(lengths)}; ++{at}) {{",
                *(f"    {line}" for line in inner),
                "}",
            ]
        )
        return Ex(result, self.depth)


class Reading(Writer):
    """Records what a function loads without writing it; equal values have one name."""

    def __init__(self, is_stored: Callable[[Tensor], bool]) -> None:
        super().__init__(is_stored, lambda tensor: "")
        self._called: dict[Any, str] = {}

    def _call(self, *key: Any) -> str:
        return self._called.setdefault(key, f"x{len(self._called)}")

    def kept(self, key: Any, make: Callable[[], Ex]) -> Ex:
        """See `Statements`; in a single scope."""
        if (value := self._made.get(key)) is None:
            value = self._made[key] = make()
        return value

    def let(self, kind: str, text: str, depth: int, name: str = "v") -> Ex:
        """See `Statements`."""
        return Ex(self._call(kind, text), depth)

    def at(self, place: IndexExpr) -> Ex:
        """See `Statements`."""
        return Ex(self._call(place), place.depth)

    def load(self, tensor: Tensor, index: Index) -> Ex:
        """See `Writer`."""
        place = ravel(index, tensor.shape)
        self.loads.setdefault(tensor, set()).add(place)
        return Ex(self._call(tensor, place), place.depth)

    def chosen(self, kind: str, conditions: Sequence[Ex], values: Sequence[Callable[[], Ex]], otherwise: str) -> Ex:
        """See `Statements`."""
        return Ex(self._call(*(make().text for make in values), *conditions), self.depth)

    def joined(self, kind: str, join: str, lengths: Shape, term: Callable[[IndexExpr], Ex]) -> Ex:
        """See `Writer`."""
        return term(symbol(Axis(self.fresh("k"), numel(lengths), self.depth)))

    def _text_of(self, tensor: Tensor, operands: Sequence[Ex], last: Ex) -> str:
        return self._call(tensor, last, *operands)


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


def differs_by_run(value: Any, dtype: DType) -> bool:
    """Whether a number may differ between runs of one program: rates, seeds, thresholds of random bits.

    0, 1, -1 and small integers belong to formulas. The text does not contain numbers that may differ, so that runs
    which differ only in these share kernels and launches.
    """
    number = np.asarray(value).astype(dtype)[()]
    if dtype.kind == "f":
        return bool(np.isfinite(number) and abs(number) not in (0, 1))
    return dtype.kind == "u" and int(number) >= _LEAST_THRESHOLD


# Unsigned numbers from here on are thresholds of random bits or seeds.
_LEAST_THRESHOLD = 2**16


def same(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether shapes are equal for every number of rows."""
    return len(a) == len(b) and all(numel((n,)) == numel((m,)) for n, m in zip(a, b, strict=True))


# Elements of other ops: functions of a writer, the tensor and an index.

Rule = Callable[[Writer, Tensor, Index], Ex]


def _view(w: Writer, t: Tensor, index: Index) -> Ex:
    x, view_map = t.inputs[0], lowering_of(t)
    assert isinstance(view_map, ViewMap)
    if view_map.maps is None:
        return w.value(x, _reshaped(index, t.shape, x.shape))
    maps = zip(view_map.maps(t), x.shape, strict=True)
    return w.value(x, [ZERO_INDEX if is_one(n) else index_map.at(index) for index_map, n in maps])


def _with_parts(w: Writer, t: Tensor, index: Index) -> Ex:
    """An element of the operand whose part of the result it belongs to, else 0."""
    lowering = lowering_of(t)
    assert isinstance(lowering, Insert | Join)
    conditions, values = list[Ex](), list[Callable[[], Ex]]()
    before = [ZERO_INDEX] * t.ndim  # where the part before ends
    for operand, maps in zip(t.inputs, lowering.parts(t), strict=True):
        inner, tests, depths = [ZERO_INDEX] * operand.ndim, list[str](), list[int]()
        for axis, (index_map, place, n) in enumerate(zip(maps, index, t.shape, strict=True)):
            length = ONE if index_map.axis is None else numel((operand.shape[index_map.axis],))
            first, step = index_map.first, index_map.step
            end = first + offset_by(length).times((step, 0)) - offset_by((step - 1, 0))
            is_all = not first.terms and step == 1 and end == offset_by(numel((n,)))
            at = place
            if not is_all:
                here = w.at(place)
                start = index_text(first)
                steps = f"{here.text} - {start if is_word(start) else f'({start})'}" if first.terms else here.text
                tests += [f"{here.text} >= {start}"] if first.terms and first != before[axis] else []
                tests += [f"{here.text} < {index_text(end)}"] if end != offset_by(numel((n,))) else []
                tests += [f"({steps}) % {step} == 0"] if step != 1 else []
                depths.append(here.depth)
                at = w.bound(f"({steps}) / {step}" if step != 1 else steps, length, here)
            before[axis] = end
            if index_map.axis is not None:
                inner[index_map.axis] = at
        conditions.append(Ex(" && ".join(tests), min(depths)) if tests else ALWAYS)
        values.append(lambda operand=operand, inner=inner: _converted(w, t, operand, inner))  # type: ignore[misc]
    if conditions == [ALWAYS]:
        return values[0]()
    return w.chosen(ctype(t.dtype), conditions, values, "0")


def _converted(w: Writer, t: Tensor, operand: Tensor, index: Index) -> Ex:
    value = w.value(operand, index)
    return value._replace(text=cast(value, operand.dtype, t.dtype))


def _take_rows(w: Writer, t: Tensor, index: Index) -> Ex:
    table, places = t.inputs
    gather = lowering_of(t)
    batch = gather.batch if isinstance(gather, Gather) else 0
    row_number, lengths = w.value(places, index[: places.ndim]), table.shape[batch : batch + 1]
    length = numel_text(lengths)
    if table.op is None and table.variable is None and table.value is None and not isinstance(lengths[0], Dim):
        # Data: another set, such as the validation's, has other rows and the same kernels.
        length = w.own(table, "stored", int(lengths[0]), np.dtype(np.int64))
    noted = ""
    if places.op is not None or places.name != ROWS:  # the samples' numbers are not a user's ids
        w.needs.add("outside")
        noted = ", outside"
    row = w.bound(f"row_at({row_number.text}, {length}{noted})", numel(lengths), row_number)
    return w.value(table, [*index[:batch], row, *index[places.ndim :]])


def _random_bits(w: Writer, t: Tensor, index: Index) -> Ex:
    rows, features = t.shape
    row, feature = map(w.at, index)
    w.needs |= {"random.cuh"}
    at = f"(Word){row.text}"
    if isinstance(rows, Dim):
        at = f"(Word)({row.text} + {rows.scale} * (Word)first_row)"
    count = w.value(t.inputs[0], ())
    seed, number = (w.own(t, name, t.attributes[name], np.dtype(np.uint64)) for name in ("seed", "number"))
    numbers = [seed, f"{int(t.attributes['purpose'])}ull", count.text, number, at, feature.text, str(features)]
    variable = w.drawn(", ".join(numbers))
    return w.let("unsigned int", f"{variable}.bits({', '.join(numbers)})", max(row.depth, feature.depth, count.depth))


def _batch_matmul(w: Writer, t: Tensor, index: Index) -> Ex:
    """Products of types without tiled kernels: a plain loop."""
    a, b = t.inputs
    *batch, m, n = index

    def term(k: IndexExpr) -> Ex:
        x = w.value(a, [*_spread(batch, a.shape[:-2]), m, k])
        y = w.value(b, [*_spread(batch, b.shape[:-2]), k, n])
        return Ex(f"({cast(x, a.dtype, t.dtype)} * {cast(y, b.dtype, t.dtype)})", max(x.depth, y.depth))

    return w.joined(ctype(t.dtype), "Sum", a.shape[-1:], term)


_JOINS = {"sum": "Sum", "max": "Greatest", "argmax": "First"}


def join_of(t: Tensor) -> str | None:
    """Return the C++ reduction of a tensor; None for other ops."""
    reduction = lowering_of(t)
    return _JOINS[reduction.join] if isinstance(reduction, Reduction) else None


def join_type(t: Tensor) -> str:
    """Return the C++ type of a thread's accumulator."""
    return f"Best<{ctype(t.inputs[0].dtype)}>" if join_of(t) == "First" else ctype(t.dtype)


def _reduce(w: Writer, t: Tensor, index: Index) -> Ex:
    """A reduction that one thread computes alone."""
    x, axes, join_name, kind = t.inputs[0], reduced_axes(t), join_of(t), join_type(t)
    assert join_name is not None
    lengths = [x.shape[axis] for axis in axes]
    keepdims = t.attributes.get("keepdims")

    def term(at: IndexExpr) -> Ex:
        outer = iter([place for axis, place in enumerate(index) if not keepdims or axis not in axes])
        inner = iter(unravel(at, lengths))
        value = w.value(x, [next(inner) if axis in axes else next(outer) for axis in range(x.ndim)])
        if join_name != "First":
            return value
        place = w.at(at)  # an argmax reduces elements with their indices
        return Ex(f"{kind}{{{value.text}, {place.text}}}", max(value.depth, place.depth))

    total = w.joined(kind, join_name, tuple(lengths), term)
    return Ex(f"{total.text}.place", total.depth) if join_name == "First" else total


def _windows(w: Writer, t: Tensor, index: Index) -> Ex:
    """An op of kernels/windows.cuh, which takes whole inputs and an index."""
    assert t.op is not None
    assert isinstance(t.op.lowering, Windows)
    w.needs.add("windows.cuh")
    parts = [w.at(place) for place in index]
    window = f"Window{{{', '.join(map(str, t.op.lowering.numbers(t)))}}}"
    arguments = [
        *(w.pointer(operand) for operand in t.inputs),
        window,
        numel_text(t.shape[-1:]),
        *(place.text for place in parts),
    ]
    return w.let(ctype(t.dtype), f"{t.op.name}({', '.join(arguments)})", max(part.depth for part in parts))


def _convolution(w: Writer, t: Tensor, index: Index) -> Ex:
    """Convolutions of types without tiled kernels: a plain loop."""
    lowering = lowering_of(t)
    assert isinstance(lowering, ConvolutionLowering)
    names = {lowering.image: "bhwi", lowering.places: "bpqo", lowering.kernel: "rsio"}
    lengths = dict(zip("bhwibpqorsio", itertools.chain(*lowering.shapes(t)), strict=True))
    summed = {"images": "rso", "places": "rsi", "kernel": "bpq"}[lowering.makes]
    *_, strides_h, strides_w, dilation_h, dilation_w, before_h, before_w = lowering.numbers(t)
    axes = (("h", "p", "r"), strides_h, dilation_h, before_h), (("w", "q", "s"), strides_w, dilation_w, before_w)

    def term(k: IndexExpr) -> Ex:
        at = dict(zip(names[-1], index, strict=True))
        at |= dict(zip(summed, unravel(k, [lengths[axis] for axis in summed]), strict=True))
        tests, depths = list[str](), list[int]()
        for (pixel, place, tap), stride, dilation, before in axes:
            shift = w.at(at[tap].times((dilation, 0)) - offset_by((before, 0)))
            if lowering.makes == "images":
                unknown, base = place, w.at(at[pixel])
                steps = w.index(f"{base.text} - ({shift.text})", base, shift)
                tests += [f"{steps.text} >= 0", f"{steps.text} % {stride} == 0"]
                position = w.index(f"{steps.text} / {stride}", steps)
            else:
                unknown, base = pixel, w.at(at[place].times((stride, 0)))
                position = w.index(f"{base.text} + {shift.text}", base, shift)
                tests.append(f"{position.text} >= 0")
            tests.append(f"{position.text} < {lengths[unknown]}")
            at[unknown] = symbol(Axis(position.text, numel((lengths[unknown],)), position.depth))
            depths.append(position.depth)

        def product() -> Ex:
            values = [w.value(operand, [at[name] for name in names[number]]) for number, operand in enumerate(t.inputs)]
            factors = (cast(value, read.dtype, t.dtype) for value, read in zip(values, t.inputs, strict=True))
            return Ex(f"({' * '.join(factors)})", max(value.depth for value in values))

        return w.chosen(ctype(t.dtype), [Ex(" && ".join(tests), min(depths))], [product], "0")

    return w.joined(ctype(t.dtype), "Sum", tuple(lengths[axis] for axis in summed), term)


def _add_rows(w: Writer, t: Tensor, index: Index) -> Ex:
    values, places = t.inputs
    features = tuple(t.shape[1:])
    w.needs |= {"windows.cuh", "outside"}
    row, feature = w.at(index[0]), w.at(ravel(index[1:], features))
    arguments = [
        w.pointer(values),
        w.pointer(places),
        numel_text(places.shape),
        numel_text(t.shape[:1]),
        numel_text(features),
        "outside",
    ]
    call = f"add_rows({', '.join(arguments)}, {row.text}, {feature.text})"
    return w.let(ctype(t.dtype), call, max(row.depth, feature.depth))


def _row_chain(w: Writer, t: Tensor, index: Index) -> Ex:
    w.needs.add("windows.cuh")
    lowering = lowering_of(t)
    assert isinstance(lowering, RowChain)
    length = numel_text((t.attributes["length"],))
    if lowering.part == "sum":
        values, first, following = t.inputs
        features = tuple(t.shape[1:])
        row, feature = w.at(index[0]), w.at(ravel(index[1:], features))
        pointers = ", ".join(w.pointer(read) for read in (values, first, following))
        call = f"add_chained_rows({pointers}, {numel_text(features)}, {row.text}, {feature.text})"
        return w.let(ctype(t.dtype), call, max(row.depth, feature.depth))
    (places,) = t.inputs
    at = w.at(ravel(index, tuple(t.shape)))
    noted = ""
    if lowering.part == "next":  # it looks at each place once
        w.needs.add("outside")
        noted = ", outside"
    call = f"{lowering.part}_place({w.pointer(places)}, {numel_text(places.shape)}, {length}{noted}, {at.text})"
    return w.let(ctype(t.dtype), call, at.depth)


_RULES: dict[type, Rule] = {
    ViewMap: _view,
    Insert: _with_parts,
    Join: _with_parts,
    Gather: _take_rows,
    RandomBits: _random_bits,
    Product: _batch_matmul,
    Reduction: _reduce,
    Scatter: _add_rows,
    RowChain: _row_chain,
    Windows: _windows,
    ConvolutionLowering: _convolution,
}
