"""Tensors as C++: the statements that compute an element of one at an index, pulled from what is in memory.

`Writer.value(tensor, index)` writes what computes one element: views become arithmetic on indices, ops of single
elements their expression, other ops a function of `kernels/`. What is stored is loaded. A statement stands in the
outermost scope in which its operands are known, and what is written once is used again.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from dptrain.errors import ConfigError
from dptrain.program.cpp import Ex, cast, ctype, element, known_number, length_text, literal, offset_text
from dptrain.program.dims import Dim
from dptrain.program.kernels import reduced_axes
from dptrain.program.lowering import (
    Element,
    Gather,
    Insert,
    Join,
    Product,
    RandomBits,
    Reduction,
    Scatter,
    ViewMap,
    Windows,
    lowering_of,
)
from dptrain.program.mesh import ALL_REDUCE
from dptrain.program.program import ROWS
from dptrain.program.shapes import Shape, is_one
from dptrain.program.tensor import DType, Tensor
from dptrain.program.views import ONE, Extent, IndexMap, Offset, extent

ZERO = Ex("0")


def extents(shape: Sequence[int]) -> str:
    """Return a product of lengths."""
    return length_text(extent(shape))


def aligned(first: Sequence[Shape], second: Sequence[Shape]) -> list[tuple[int, int]] | None:
    """Return how many of two lists of lengths are one block, in order: as few as have as many elements in both.

    None where both cannot be cut into such blocks.
    """
    if not first and not second:
        return []
    for count in range(1, len(second) + 1):
        wanted = extent([n for shape in second[:count] for n in shape])
        for own in range(len(first) + 1):
            if extent([n for shape in first[:own] for n in shape]) == wanted:
                rest = aligned(first[own:], second[count:])
                if rest is not None:
                    return [(own, count), *rest]
    return None


class Index:
    """A place in a tensor: segments of axes, each with the place that it has when they are taken as one axis."""

    def __init__(self, *segments: tuple[Ex, Shape]) -> None:
        self.segments = [one for one in segments if one[1]]

    @property
    def shape(self) -> Shape:
        """Of the tensor."""
        return tuple(n for _, shape in self.segments for n in shape)


class Scope(NamedTuple):
    """Statements that are executed together.

    Attributes:
        threshold: those of this depth and deeper ones stand here.
        lines: the statements.
        made: what can be used again until the scope ends.
    """

    threshold: int
    lines: list[str]
    made: list[tuple[str, str]]


class Writer:
    """Writes the statements of one function.

    Args:
        is_stored: whether a tensor is in memory when the function runs.
        name: what a stored tensor's pointer is called there; asking notes that the function needs it.
        number: what a number is called there that each run has its own of, by the tensor that has it, the attribute
            ("" for a constant), value and type; asking notes it. By default numbers are written as they are.

    Attributes:
        known: elements that are in a variable, by their tensor's `id` and flat index.
        loads: flat indices by which stored tensors are read, by their `id`.
        needs: headers and arguments that the statements name.
    """

    def __init__(
        self,
        is_stored: Callable[[Tensor], bool],
        name: Callable[[Tensor], str],
        number: Callable[[Tensor, str, Any, DType], str] | None = None,
    ) -> None:
        self._is_stored, self._name, self._number_name = is_stored, name, number
        self._scopes = [Scope(0, [], [])]
        self._made: dict[tuple[str, str], Ex] = {}
        # Numbers that were taken apart, by their parts, and the parts of those that were put together.
        self._wholes: dict[tuple[tuple[str, Extent], ...], Ex] = {}
        self._segments: dict[str, list[tuple[Ex, Shape]]] = {}
        self._drawn: dict[str, str] = {}
        self._number = 0
        self.known: dict[tuple[int, str], Ex] = {}
        self.loads: dict[int, set[str]] = {}
        self.needs: set[str] = set()

    # Statements

    @contextmanager
    def scope(self, threshold: int | None = None) -> Iterator[list[str]]:
        """Collect statements of this depth and deeper ones; by default of a depth of their own."""
        one = Scope(self._scopes[-1].threshold + 1 if threshold is None else threshold, [], [])
        self._scopes.append(one)
        yield one.lines
        self._scopes.pop()
        for key in one.made:
            del self._made[key]

    @property
    def depth(self) -> int:
        """Of the innermost scope."""
        return self._scopes[-1].threshold

    @property
    def lines(self) -> list[str]:
        """Statements of the innermost scope."""
        return self._scopes[-1].lines

    def write(self, *lines: str) -> None:
        """Add statements to the innermost scope."""
        self._scopes[-1].lines.extend(lines)

    def let(self, kind: str, text: str, depth: int, name: str = "v") -> Ex:
        """Return a variable of this value."""
        key = (kind, text)
        if key not in self._made:
            place = next(one for one in reversed(self._scopes) if depth >= one.threshold)
            self._made[key] = found = Ex(self.fresh(name), depth)
            place.lines.append(f"const {kind} {found.text} = {text};")
            place.made.append(key)
        return self._made[key]

    def drawn(self, numbers: str) -> str:
        """Return the name of the random numbers that were drawn last for such arguments, beyond all loops."""
        if numbers not in self._drawn:
            self._drawn[numbers] = self.fresh("drawn")
            self._scopes[0].lines.append(f"Drawn {self._drawn[numbers]};")
        return self._drawn[numbers]

    def fresh(self, name: str) -> str:
        """Return a name that nothing else has."""
        self._number += 1
        return f"{name}{self._number}"

    # Indices

    def place(self, text: str, *operands: Ex) -> Ex:
        """Return an index that is computed of others."""
        return self.let("Index", text, max((one.depth for one in operands), default=0), "i")

    def flat(self, index: Index) -> Ex:
        """Return the place of an element in memory."""
        own = [(ex, shape) for ex, shape in index.segments if extent(shape) != ONE]
        if (whole := self._wholes.get(_key(own))) is not None:
            return whole
        found = ZERO
        for ex, shape in own:
            if found.text == "0":
                found = ex
            elif ex.text == "0":
                found = self.place(f"{found.text} * ({extents(shape)})", found)
            else:
                found = self.place(f"{found.text} * ({extents(shape)}) + {ex.text}", found, ex)
        if len(own) > 1 and all(ex.text != "0" for ex, _ in own):
            self._segments.setdefault(found.text, own)
        return found

    def parts(self, index: Index) -> list[Ex]:
        """Return the place along each axis."""
        return [part for ex, shape in index.segments for part in self.split(ex, [(n,) for n in shape])]

    def split(self, ex: Ex, shapes: Sequence[Shape]) -> list[Ex]:
        """Return the places within shapes whose elements are numbered through, of which `ex` is such a number."""
        found = [ZERO] * len(shapes)
        long = [n for n, shape in enumerate(shapes) if extent(shape) != ONE]
        if len(long) > 1 and (made := self._taken_apart(ex, shapes)) is not None:
            return made
        rest = ex
        for n in reversed(long):
            if n == long[0]:
                found[n] = rest
            else:
                found[n] = self.place(f"{rest.text} % ({extents(shapes[n])})", rest)
                rest = self.place(f"{rest.text} / ({extents(shapes[n])})", rest)
        if len(long) > 1:
            self._wholes.setdefault(_key([(found[n], shapes[n]) for n in long]), ex)
        return found

    def _taken_apart(self, ex: Ex, shapes: Sequence[Shape]) -> list[Ex] | None:
        """Return what `split` does where the number was put together of places that can be dealt out to the shapes."""
        segments = self._segments.get(ex.text, [])
        counts = aligned([shape for _, shape in segments], shapes)
        if not segments or counts is None or any(count > 1 < own for count, own in counts):
            return None
        found, own, rest = list[Ex](), list(segments), list(shapes)
        for count, some in counts:
            whole = self.flat(Index(*own[:count]))
            found += [whole] if some == 1 else self.split(whole, rest[:some])
            own, rest = own[count:], rest[some:]
        return found

    def reshaped(self, index: Index, shape: Shape) -> Index:
        """Return the place of the same element in another shape."""
        if tuple(index.shape) == tuple(shape):
            return index
        split = Index(*((ex, (n,)) for ex, n in zip(self.parts(index), index.shape, strict=True)))
        for candidate in (index, split):
            if (found := _matched(candidate, shape)) is not None:
                return found
        return Index((self.flat(index), shape))

    def spread(self, index: Index, shape: Shape) -> Index:
        """Return the place in an input that is broadcast to an output of this index."""
        if same(index.shape, shape):
            return index
        missing, found, axis = len(index.shape) - len(shape), list[tuple[Ex, Shape]](), 0
        for ex, lengths in index.segments:
            own = shape[max(axis - missing, 0) : max(axis + len(lengths) - missing, 0)]
            axis += len(lengths)
            if len(own) == len(lengths) and same(own, lengths):
                found.append((ex, lengths))
            elif extent(own) == ONE:
                found.append((ZERO, own))
            else:
                parts = self.parts(Index((ex, lengths)))[len(lengths) - len(own) :]
                outer = lengths[len(lengths) - len(own) :]
                found += [
                    (ZERO if extent((n,)) == ONE and extent((m,)) != ONE else part, (n,))
                    for part, n, m in zip(parts, own, outer, strict=True)
                ]
        return Index(*found)

    # Values

    def value(self, tensor: Tensor, index: Index) -> Ex:
        """Return an element of a tensor.

        Raises:
            ConfigError: its op has no kernel.
        """
        if any(one == id(tensor) for one, _ in self.known):
            found = self.known.get((id(tensor), self.flat(index).text))
            if found is not None:
                return found
        if self._is_stored(tensor):
            return self.load(tensor, index)
        return self.computed(tensor, index)._replace(computed=tensor.op is not None)

    def computed(self, tensor: Tensor, index: Index) -> Ex:
        """Return an element, computed even if the tensor is stored; as `value`."""
        key = ("", f"{id(tensor)} {[(ex.text, shape) for ex, shape in index.segments]}")
        if key not in self._made:
            found = self._computed(tensor, index)
            next(one for one in reversed(self._scopes) if found.depth >= one.threshold).made.append(key)
            self._made[key] = found
        return self._made[key]

    def _computed(self, tensor: Tensor, index: Index) -> Ex:
        if tensor.op is None:
            known = known_number(tensor, functools.partial(self.number, tensor))
            assert known is not None, f"{tensor} is neither stored nor known"
            return Ex(known)
        if tensor.op is ALL_REDUCE:
            return self.value(tensor.inputs[0], index)
        if isinstance(tensor.op.lowering, Element):
            return self._element(tensor.op.lowering, tensor, index)
        if type(tensor.op.lowering) in _RULES:
            return _RULES[type(tensor.op.lowering)](self, tensor, index)
        raise ConfigError(f"op {tensor.op.name!r} has no kernel: use --device cpu")

    def load(self, tensor: Tensor, index: Index) -> Ex:
        """Return an element of what is in memory."""
        place = self.flat(index)
        self.loads.setdefault(id(tensor), set()).add(place.text)
        if tensor.name == ROWS and tensor.variable is None:  # of which each step has its own
            self.needs.add("step")
            start = self.let("Index", "(Index)starts[*step]", 0, "start")
            place = self.place(f"{start.text} + {place.text}", start, place)
        return self.let(ctype(tensor.dtype), f"{self._name(tensor)}[{place.text}]", place.depth)

    def number(self, tensor: Tensor, attribute: str, value: Any, dtype: DType) -> str:
        """Return a number of a constant or an attribute: its name where each run has its own, else as it is."""
        return self.own(tensor, attribute, value, dtype) if differs_by_run(value, dtype) else literal(value, dtype)

    def own(self, tensor: Tensor, attribute: str, value: Any, dtype: DType) -> str:
        """Return the name of a number that each run has its own of."""
        if self._number_name is None:
            return literal(value, dtype)
        return self._number_name(tensor, attribute, value, dtype)

    def _element(self, lowering: Element, tensor: Tensor, index: Index) -> Ex:
        """Return what an op of single elements makes."""
        last = ZERO
        if lowering.by_last:
            *parts, last = self.parts(index)
            index = self.reshaped(_split(parts, index.shape[:-1]), tensor.inputs[0].shape)
        found = [
            Ex(literal(one.numpy(), one.dtype))  # compilers know shorter ways: x * x
            if n in lowering.exponents and _is_whole(one)
            else self.value(one, index if lowering.by_last else self.spread(index, one.shape))
            for n, one in enumerate(tensor.inputs)
        ]
        text = element(tensor, found, functools.partial(self.number, tensor), last.text)
        return self.let(ctype(tensor.dtype), text, max(one.depth for one in (last, *found)))

    def pointer(self, tensor: Tensor) -> str:
        """Return the name of what a function reads in its own order."""
        self.loads.setdefault(id(tensor), set()).add("everywhere")
        return self._name(tensor)

    def chosen(self, kind: str, conditions: Sequence[Ex], values: Sequence[Callable[[], Ex]], otherwise: str) -> Ex:
        """Return the value whose condition is the first that holds; the others are not computed."""
        threshold = min((one.depth for one in conditions), default=0)
        result, lines = self.fresh("v"), list[str]()
        for number, (condition, make) in enumerate(zip(conditions, values, strict=True)):
            with self.scope(min(threshold, self.depth)) as inner:
                found = make()
                inner.append(f"{result} = {found.text};")
            lines += [f"{'else ' if number else ''}if ({condition.text}) {{", *(f"    {one}" for one in inner), "}"]
        self.lines.extend([f"{kind} {result} = {otherwise};", *lines])
        return Ex(result, self.depth)

    def joined(self, kind: str, join: str, lengths: Shape, term: Callable[[Ex], Ex]) -> Ex:
        """Return the sum (or another join) of terms, in a loop."""
        result, at = self.fresh("sum"), self.fresh("k")
        with self.scope() as inner:
            found = term(Ex(at, self.depth))
            inner.append(f"{result} = {join}::join({result}, ({kind}){found.text});")
        self.lines.extend(
            [
                f"{kind} {result} = {join}::identity<{kind}>();",
                f"for (Index {at} = 0; {at} < {extents(lengths)}; ++{at}) {{",
                *(f"    {one}" for one in inner),
                "}",
            ]
        )
        return Ex(result, self.depth)


def _key(segments: Sequence[tuple[Ex, Shape]]) -> tuple[tuple[str, Extent], ...]:
    return tuple((ex.text, extent(shape)) for ex, shape in segments)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is a positive whole number that is known."""
    value = tensor.value
    if tensor.op is not None or value is None or value.size != 1 or tensor.counts_rows:
        return False
    return bool(value > 0 and value == np.floor(value))


def differs_by_run(value: Any, dtype: DType) -> bool:
    """Whether runs of one program may have another number there: rates, seeds, thresholds of random bits.

    0, 1 and -1 belong to formulas, and so do whole numbers of few digits. The text of a program depends on neither
    value of a number that may differ, so that runs which differ in these alone share kernels, and launches.
    """
    number = np.asarray(value).astype(dtype)[()]
    if dtype.kind == "f":
        return bool(np.isfinite(number) and abs(number) not in (0, 1))
    return dtype.kind == "u" and int(number) >= _LEAST_THRESHOLD


# Unsigned numbers from here on are thresholds of random bits or seeds.
_LEAST_THRESHOLD = 2**16


def same(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether shapes are the same for every number of rows."""
    return len(a) == len(b) and all(extent((n,)) == extent((m,)) for n, m in zip(a, b, strict=True))


def _matched(index: Index, shape: Shape) -> Index | None:
    """Return the place in another shape whose axes can be dealt out to the segments, or None."""
    rest, found = list(shape), list[tuple[Ex, Shape]]()
    for ex, lengths in index.segments:
        wanted, own = extent(lengths), list[int]()
        while rest and extent(own) != wanted:
            own.append(rest.pop(0))
        if extent(own) != wanted:
            return None
        found.append((ex, tuple(own)))
    return Index(*found, (ZERO, tuple(rest))) if extent(rest) == ONE else None


# What other ops make: functions of a writer, the tensor and the index of one of its elements.

Rule = Callable[[Writer, Tensor, Index], Ex]


def _split(parts: Sequence[Ex], shape: Shape) -> Index:
    return Index(*((part, (n,)) for part, n in zip(parts, shape, strict=True)))


def _view(w: Writer, t: Tensor, index: Index) -> Ex:
    x, shown = t.inputs[0], lowering_of(t)
    assert isinstance(shown, ViewMap)
    if shown.maps is None:
        return w.value(x, w.reshaped(index, x.shape))
    maps, missing = shown.maps(t), t.ndim - x.ndim
    if missing >= 0 and all(
        is_one(n) or (one == IndexMap(axis + missing) and same((n,), (t.shape[axis + missing],)))
        for axis, (one, n) in enumerate(zip(maps, x.shape, strict=True))
    ):
        return w.value(x, w.spread(index, x.shape))
    parts = w.parts(index)
    return w.value(x, _split([_mapped(w, one, parts) for one in maps], x.shape))


def _mapped(w: Writer, one: IndexMap, parts: Sequence[Ex]) -> Ex:
    """Return the place along an axis of what a view shows, whose own places these are."""
    part = None if one.axis is None else parts[one.axis]
    if part is not None and one == IndexMap(one.axis):
        return part
    if part is None:
        return Ex(f"({offset_text(one.first)})" if one.first.rows or one.first.first else offset_text(one.first))
    moved = part.text if one.step == 1 else f"{part.text} * {one.step}"
    return w.place(moved if one.first == Offset() else f"{offset_text(one.first)} + {moved}", part)


def _put(w: Writer, t: Tensor, index: Index) -> Ex:
    x, tests, found, depth = t.inputs[0], list[str](), list[Ex](), 0
    for one, part, n in zip(t.attributes["key"], w.parts(index), t.shape, strict=True):
        start, stop, step = one if isinstance(one, tuple) else (one, one + 1, 1)
        own = []
        if not (isinstance(start, int) and start == 0 and not isinstance(start, Dim)):
            own.append(f"{part.text} >= {extents((start,))}")
        if not (same((stop,), (n,))):
            own.append(f"{part.text} < {extents((stop,))}")
        if step != 1:
            own.append(f"({part.text} - {extents((start,))}) % {step} == 0")
        tests, depth = tests + own, max(depth, part.depth if own else 0)
        if isinstance(one, tuple):
            found.append(w.place(f"({part.text} - {extents((start,))}) / {step}", part) if own else part)
    if not tests:
        return w.value(x, _split(found, x.shape))
    condition = Ex(" && ".join(tests), depth)
    return w.chosen(ctype(t.dtype), [condition], [lambda: w.value(x, _split(found, x.shape))], "0")


def _concatenate_along(w: Writer, t: Tensor, index: Index) -> Ex:
    axis, parts = t.attributes["axis"], w.parts(index)
    at, ends, values, before = parts[axis], list[Ex](), list[Callable[[], Ex]](), list[str]()

    def element(one: Tensor, start: str) -> Ex:
        own = [*parts[:axis], w.place(f"{at.text} - ({start})", at), *parts[axis + 1 :]]
        found = w.value(one, _split(own, one.shape))
        return found._replace(text=cast(found, one.dtype, t.dtype))

    for one in t.inputs:
        start = " + ".join(before) or "0"
        before.append(extents((one.shape[axis],)))
        ends.append(Ex(f"{at.text} < {' + '.join(before)}", at.depth))
        values.append(lambda one=one, start=start: element(one, start))  # type: ignore[misc]
    return w.chosen(ctype(t.dtype), ends, values, "0")


def _take_rows(w: Writer, t: Tensor, index: Index) -> Ex:
    table, places = t.inputs
    parts = w.parts(index)
    place = w.value(places, w.reshaped(_split(parts[: places.ndim], places.shape), places.shape))
    row = w.place(f"row_at({place.text}, {extents((table.shape[0],))})", place)
    rest = parts[places.ndim :]
    return w.value(table, Index((row, table.shape[:1]), *zip(rest, ((n,) for n in table.shape[1:]), strict=True)))


def _random_bits(w: Writer, t: Tensor, index: Index) -> Ex:
    rows, features = t.shape
    row, feature = w.parts(index)
    w.needs |= {"random.cuh"}
    at = f"(Word){row.text}"
    if isinstance(rows, Dim):
        at = f"(Word)({row.text} + {rows.scale} * (Word)first_row)"
    count = w.value(t.inputs[0], Index())
    seed, number = (w.own(t, name, t.attributes[name], np.dtype(np.uint64)) for name in ("seed", "number"))
    numbers = [seed, f"{int(t.attributes['purpose'])}ull", count.text, number, at, feature.text, str(features)]
    drawn = w.drawn(", ".join(numbers))
    return w.let("unsigned int", f"{drawn}.bits({', '.join(numbers)})", max(row.depth, feature.depth, count.depth))


def _batch_matmul(w: Writer, t: Tensor, index: Index) -> Ex:
    """Of other types than the tiled kernels': a plain loop."""
    a, b = t.inputs
    *batch, m, n = w.parts(index)
    outer = _split(batch, t.shape[:-2])

    def term(k: Ex) -> Ex:
        x = w.value(a, Index(*w.spread(outer, a.shape[:-2]).segments, (m, a.shape[-2:-1]), (k, a.shape[-1:])))
        y = w.value(b, Index(*w.spread(outer, b.shape[:-2]).segments, (k, b.shape[-2:-1]), (n, b.shape[-1:])))
        factors = cast(x, a.dtype, t.dtype), cast(y, b.dtype, t.dtype)
        return Ex(f"({factors[0]} * {factors[1]})", max(x.depth, y.depth))

    return w.joined(ctype(t.dtype), "Sum", a.shape[-1:], term)


def operand(w: Writer, t: Tensor, index: Index, at: Ex) -> Ex:
    """Return the element of a reduction's input that stands at a place of its output and one along what is reduced."""
    x = t.inputs[0]
    axes = reduced_axes(t)
    kept = iter(
        w.parts(index)
        if not t.attributes.get("keepdims")
        else [one for axis, one in enumerate(w.parts(index)) if axis not in axes]
    )
    inner = iter(w.parts(Index((at, tuple(x.shape[axis] for axis in axes)))))
    return w.value(x, _split([next(inner) if axis in axes else next(kept) for axis in range(x.ndim)], x.shape))


_JOINS = {"sum": "Sum", "max": "Greatest", "argmax": "First"}


def join_of(t: Tensor) -> str | None:
    """Return what joins a reduction's terms in C++; None for other tensors."""
    reduction = lowering_of(t)
    return _JOINS[reduction.join] if isinstance(reduction, Reduction) else None


def join_type(t: Tensor) -> str:
    """Return the C++ type in which a reduction joins its terms within a thread."""
    return f"Best<{ctype(t.inputs[0].dtype)}>" if join_of(t) == "First" else ctype(t.dtype)


def term(w: Writer, t: Tensor, index: Index, at: Ex) -> Ex:
    """Return what a reduction joins: the element, for an argmax with its place."""
    found = operand(w, t, index, at)
    if join_of(t) != "First":
        return found
    return Ex(f"{join_type(t)}{{{found.text}, {at.text}}}", max(found.depth, at.depth))


def _reduce(w: Writer, t: Tensor, index: Index) -> Ex:
    """A reduction whose element one thread computes alone."""
    lengths, how = tuple(t.inputs[0].shape[axis] for axis in reduced_axes(t)), join_of(t)
    assert how is not None
    found = w.joined(join_type(t), how, lengths, lambda at: term(w, t, index, at))
    return Ex(f"{found.text}.place", found.depth) if how == "First" else found


def _windows(w: Writer, t: Tensor, index: Index) -> Ex:
    """An op of kernels/windows.cuh, which takes whole inputs, and the place of an element."""
    assert t.op is not None
    assert isinstance(t.op.lowering, Windows)
    image, places, kernel = t.op.lowering.shapes(t)
    w.needs.add("windows.cuh")
    parts, own = w.parts(index), t.attributes
    size = kernel[:2] or own["window"]
    numbers = [*image[1:3], *places[1:3], *size, *own["strides"], *own.get("dilation", (1, 1)), *own["before"]]
    window = f"Window{{{', '.join(str(int(n)) for n in numbers)}}}"
    counts = [extents((n,)) for n in kernel[2:] or t.shape[-1:]]
    if t.op.lowering.kernel == -1:  # a sum over all images
        counts.insert(0, extents((image[0],)))
    arguments = [*(w.pointer(one) for one in t.inputs), window, *counts, *(one.text for one in parts)]
    return w.let(ctype(t.dtype), f"{t.op.name}({', '.join(arguments)})", max(one.depth for one in parts))


def _add_rows(w: Writer, t: Tensor, index: Index) -> Ex:
    values, places = t.inputs
    features = tuple(t.shape[1:])
    parts = w.parts(index)
    w.needs.add("windows.cuh")
    feature = w.flat(_split(parts[1:], features))
    arguments = [w.pointer(values), w.pointer(places), extents(places.shape), extents((t.shape[0],)), extents(features)]
    call = f"add_rows({', '.join(arguments)}, {parts[0].text}, {feature.text})"
    return w.let(ctype(t.dtype), call, max(parts[0].depth, feature.depth))


_RULES: dict[type, Rule] = {
    ViewMap: _view,
    Insert: _put,
    Join: _concatenate_along,
    Gather: _take_rows,
    RandomBits: _random_bits,
    Product: _batch_matmul,
    Reduction: _reduce,
    Scatter: _add_rows,
    Windows: _windows,
}
