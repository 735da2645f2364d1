"""Statements of a nest as CUDA C++.

`Renderer.render(statements)` writes statements (`program/schedule`) as loads, expressions, and functions of `kernels/`.
Each stands in the outermost scope that has its operands; statements with equal text are one. What is reduced, by whom
and when it is complete, the frame around them says (`frames/`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dptrain.program.codegen.cpp import (
    Ex,
    cast,
    ctype,
    element,
    index_text,
    is_word,
    known_number,
    length_text,
    literal,
    numel_text,
)
from dptrain.program.codegen.index_expr import Axis, FloorDiv, symbol
from dptrain.program.codegen.index_expr import Index as IndexTerm
from dptrain.program.codegen.statements import ALWAYS, Statements
from dptrain.program.dims import Dim
from dptrain.program.lowering import Gather, Reduction, RowChain, Scatter, Windows, lowering_of
from dptrain.program.program import ROWS
from dptrain.program.schedule.statements import (
    At,
    Case,
    Choose,
    Compute,
    Convert,
    Draw,
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
    Whole,
    Within,
)
from dptrain.program.tensor import DType, Tensor
from dptrain.runtime.types import is_floating


@dataclass
class Quads:
    """Groups of four adjacent elements that a map's threads load and store, with the C++ index of the current element.

    `stores`: whether elements are stored in fours too. `loaded` and `stored` map pointers to the variable that holds
    four elements, and their type.
    """

    index: str
    stores: bool = True
    loaded: dict[str, tuple[str, str]] = field(default_factory=dict)
    stored: dict[str, tuple[str, str]] = field(default_factory=dict)


class Renderer(Statements):
    """Writes the statements of one function.

    Args:
        name: returns a stored tensor's pointer, and records that the function needs it.
        number: returns the name of a number that differs by run, and records it, given tensor, attribute ("" for a
            constant), value and type.

    `needs`: headers and special arguments; `quads`: elements loaded and stored in fours, None if singly;
    `accumulators`: what terms of reductions are joined to, if `joins_if` is true; `totals`: complete reductions and
    products; `effects`: where joins and stores are written, None for where they stand.
    """

    def __init__(self, name: Callable[[Tensor], str], number: Callable[[Tensor, str, Any, DType], str]) -> None:
        super().__init__()
        self._name, self._own = name, number
        self._texts: dict[int, Ex] = {}  # of values
        self._indices: dict[str | int, str] = {}  # of computed indices, by their names
        self._tests: dict[Within | Tap, list[str]] = {}
        self._drawn: dict[str, str] = {}
        self.needs: set[str] = set()
        self.quads: Quads | None = None
        self.accumulators: dict[Tensor, str] = {}
        self.joins_if = ""
        self.totals: dict[Tensor, Ex] = {}
        self.effects: list[str] | None = None

    def pointer(self, tensor: Tensor) -> str:
        """Return the pointer of a stored tensor."""
        return self._name(tensor)

    def render(self, statements: Sequence[Statement]) -> None:
        """Write statements."""
        for statement in statements:
            text = _RULES[type(statement)](self, statement)
            if not isinstance(statement, Row | Within | Tap | For | Join | Store):  # those compute no value
                self._texts[statement.to.number] = text

    def _text(self, value: Value) -> Ex:
        return self._texts[value.number]._replace(computed=value.computed)

    def _name_of(self, index: IndexTerm) -> str:
        if isinstance(index, FloorDiv) or index is None:
            return super()._name_of(index)
        return self._indices.get(index.name) or str(index.name)

    # Numbers

    def _number(self, tensor: Tensor, attribute: str, value: Any, dtype: DType) -> str:
        """Return a constant or attribute: by name if it may differ by run, else as a literal."""
        return self._own(tensor, attribute, value, dtype) if differs_by_run(value, dtype) else literal(value, dtype)

    def _known(self, known: Known) -> Ex:
        tensor = known.tensor
        if known.exact:
            return Ex(literal(tensor.numpy(), tensor.dtype))
        number = known_number(tensor, functools.partial(self._number, tensor))
        assert number is not None, f"{tensor} is neither stored nor known"
        return Ex(number)

    # Elements

    def _load(self, load: Load) -> Ex:
        tensor, position = load.tensor, load.position
        if tensor.name == ROWS and tensor.variable is None:  # each step has its own rows
            self.needs.add("step")
            position += symbol(Axis(self.let("Index", "(Index)starts[*step]", 0, "start").text))
        at, pointer, kind = self.at(position), self._name(tensor), ctype(tensor.dtype)
        if self.quads is None or at.text != self.quads.index or at.depth == 0:  # no columns: outside of the loop
            return self.let(kind, f"{pointer}[{at.text}]", at.depth)
        quad, _ = self.quads.loaded.setdefault(pointer, (self.fresh("quad"), kind))
        return self.let(kind, f"{quad}.of[own]", at.depth)

    def _at(self, at: At) -> Ex:
        return self.at(at.position)

    def _compute(self, compute: Compute) -> Ex:
        tensor, operands = compute.tensor, [self._text(operand) for operand in compute.operands]
        last = "0" if compute.last is None else self._text(compute.last).text
        text = element(tensor, operands, functools.partial(self._number, tensor), last)
        return self.let(ctype(tensor.dtype), text, compute.to.depth)

    def _convert(self, convert: Convert) -> Ex:
        value = self._text(convert.value)
        return value._replace(text=cast(value, convert.dtype, convert.to_dtype))

    def _multiply(self, multiply: Multiply) -> Ex:
        tensor = multiply.tensor
        pairs = zip(multiply.factors, tensor.inputs, strict=True)
        factors = (cast(self._text(value), operand.dtype, tensor.dtype) for value, operand in pairs)
        return Ex(f"({' * '.join(factors)})", multiply.to.depth)

    def _draw(self, draw: Draw) -> Ex:
        tensor, (rows, features) = draw.tensor, draw.tensor.shape
        row, feature, count = (self._text(value).text for value in (draw.row, draw.feature, draw.count))
        self.needs |= {"random.cuh"}
        at = f"(Word){row}"
        if isinstance(rows, Dim):
            at = f"(Word)({row} + {rows.scale} * (Word)first_row)"
        seed, number = (
            self._own(tensor, name, tensor.attributes[name], np.dtype(np.uint64)) for name in ("seed", "number")
        )
        numbers = ", ".join(
            [seed, f"{int(tensor.attributes['purpose'])}ull", count, number, at, feature, str(features)]
        )
        return self.let("unsigned int", f"{self._drawn_once(numbers)}.bits({numbers})", draw.to.depth)

    def _drawn_once(self, numbers: str) -> str:
        """Return the variable of random numbers drawn with these arguments, declared outside all loops."""
        if numbers not in self._drawn:
            self._drawn[numbers] = self.fresh("drawn")
            self.write(f"Drawn {self._drawn[numbers]};", depth=0)
        return self._drawn[numbers]

    # Functions of kernels/windows.cuh, which take whole operands and an index

    def _call(self, whole: Whole) -> Ex:
        tensor, parts = whole.tensor, [self.at(position).text for position in whole.positions]
        self.needs.add("windows.cuh")
        return self.let(ctype(tensor.dtype), _CALLS[type(lowering_of(tensor))](self, tensor, parts), whole.to.depth)

    def _window(self, tensor: Tensor, parts: Sequence[str]) -> str:
        lowering = lowering_of(tensor)
        assert tensor.op is not None
        assert isinstance(lowering, Windows)
        window = f"Window{{{', '.join(map(str, lowering.numbers(tensor)))}}}"
        pointers = map(self.pointer, tensor.inputs)
        return f"{tensor.op.name}({', '.join([*pointers, window, numel_text(tensor.shape[-1:]), *parts])})"

    def _add_rows(self, tensor: Tensor, parts: Sequence[str]) -> str:
        rows = tensor.inputs[1]
        self.needs.add("outside")
        lengths = map(numel_text, (rows.shape, tensor.shape[:1], tensor.shape[1:]))
        return f"add_rows({', '.join([*map(self.pointer, tensor.inputs), *lengths, 'outside', *parts])})"

    def _row_chain(self, tensor: Tensor, parts: Sequence[str]) -> str:
        lowering = lowering_of(tensor)
        assert isinstance(lowering, RowChain)
        pointers = ", ".join(map(self.pointer, tensor.inputs))
        if lowering.part == "sum":
            return f"add_chained_rows({pointers}, {numel_text(tensor.shape[1:])}, {', '.join(parts)})"
        noted = ""
        if lowering.part == "next":  # it looks at each place once
            self.needs.add("outside")
            noted = ", outside"
        lengths = f"{numel_text(tensor.inputs[0].shape)}, {numel_text((tensor.attributes['length'],))}"
        return f"{lowering.part}_place({pointers}, {lengths}{noted}, {parts[0]})"

    # Indices

    def _row(self, row: Row) -> None:
        table, rows = row.tensor.inputs
        gather, of = lowering_of(row.tensor), self._text(row.of)
        batch = gather.batch if isinstance(gather, Gather) else 0
        lengths = table.shape[batch : batch + 1]
        length = numel_text(lengths)
        if table.op is None and table.variable is None and table.value is None and not isinstance(lengths[0], Dim):
            # Data: another set, such as the validation's, has other rows and the same kernels.
            length = self._own(table, "stored", int(lengths[0]), np.dtype(np.int64))
        noted = ""
        if rows.op is not None or rows.name != ROWS:  # the samples' numbers are not a user's ids
            self.needs.add("outside")
            noted = ", outside"
        self._indices[row.index.name] = self.index(f"row_at({of.text}, {length}{noted})", of).text

    def _within(self, within: Within) -> None:
        here, first, step = self.at(within.position), index_text(within.first), within.step
        steps = here.text
        if within.first.terms:
            steps += f" - {first if is_word(first) else f'({first})'}"
        tests = [f"{here.text} >= {first}"] if within.from_first else []
        tests += [f"{here.text} < {index_text(within.end)}"] if within.end is not None else []
        tests += [f"({steps}) % {step} == 0"] if step != 1 else []
        self._tests[within] = tests
        self._indices[within.index.name] = self.index(f"({steps}) / {step}" if step != 1 else steps, here).text

    def _tap(self, tap: Tap) -> None:
        shift, base = self.at(tap.shift), self.at(tap.base)
        if tap.stride is None:
            position = self.index(f"{base.text} + {shift.text}", base, shift)
            tests = [f"{position.text} >= 0"]
        else:
            steps = self.index(f"{base.text} - ({shift.text})", base, shift)
            tests = [f"{steps.text} >= 0", f"{steps.text} % {tap.stride} == 0"]
            position = self.index(f"{steps.text} / {tap.stride}", steps)
        self._tests[tap] = [*tests, f"{position.text} < {tap.length}"]
        self._indices[tap.index.name] = position.text

    # Blocks

    def _choose(self, choose: Choose) -> Ex:
        def value(case: Case) -> Ex:
            self.render(case.body)
            return self._text(case.value)

        conditions = [
            ALWAYS
            if case.always
            else Ex(
                " && ".join(test for guard in case.guards for test in self._tests[guard]),
                min(guard.depth for guard in case.guards),
            )
            for case in choose.cases
        ]
        values = [functools.partial(value, case) for case in choose.cases]
        return self.chosen(ctype(choose.dtype), conditions, values, "0")

    def _reduce(self, reduce: Reduce) -> Ex:
        tensor, result, at = reduce.tensor, self.fresh("sum"), self.fresh("k")
        kind, join = join_type(tensor), join_of(tensor) or "Sum"
        self._indices[reduce.index.name] = at
        with self.scope() as inner:
            self.render(reduce.body)
            term = self._text(reduce.term).text
            if join == "First":  # an argmax reduces elements with their indices
                term = f"{kind}{{{term}, {self.at(symbol(reduce.index)).text}}}"
            inner.append(f"{result} = {join}::join({result}, ({kind}){term});")
        self.lines.extend(
            [
                f"{kind} {result} = {join}::identity<{kind}>();",
                f"for (Index {at} = 0; {at} < {length_text(reduce.length)}; ++{at}) {{",
                *(f"    {line}" for line in inner),
                "}",
            ]
        )
        return Ex(f"{result}.place" if join == "First" else result, self.depth)

    # Effects

    def _effect(self, line: str) -> None:
        if self.effects is None:
            self.write(line)
        else:
            self.effects.append(line)

    def _join(self, join: Join) -> None:
        tensor, name = join.tensor, self.accumulators[join.tensor]
        if join_type(tensor).startswith("Best"):
            term = f"{join_type(tensor)}{{{self._text(join.term).text}, {self.at(join.position).text}}}"
        else:
            term = cast(self._text(join.term), tensor.inputs[0].dtype, tensor.dtype)
        guard = f"if ({self.joins_if}) " if self.joins_if else ""
        self._effect(f"{guard}{name} = {join_of(tensor)}::join({name}, {term});")

    def _total(self, total: Total) -> Ex:
        return self.totals[total.tensor]

    def _store(self, store: Store) -> None:
        pointer, at = self._name(store.tensor), self.at(store.position).text
        target = f"{pointer}[{at}]"
        if self.quads is not None and self.quads.stores and at == self.quads.index:
            quad = self.fresh("quad")
            self.quads.stored[pointer] = quad, ctype(store.tensor.dtype)
            target = f"{quad}.of[own]"
        self._effect(f"{target} = {self._text(store.value).text};")


_RULES: Mapping[type, Callable[[Renderer, Any], Any]] = {
    Known: Renderer._known,
    Load: Renderer._load,
    At: Renderer._at,
    Compute: Renderer._compute,
    Convert: Renderer._convert,
    Multiply: Renderer._multiply,
    Draw: Renderer._draw,
    Whole: Renderer._call,
    Row: Renderer._row,
    Within: Renderer._within,
    Tap: Renderer._tap,
    Choose: Renderer._choose,
    Reduce: Renderer._reduce,
    Join: Renderer._join,
    Total: Renderer._total,
    Store: Renderer._store,
}
_CALLS: Mapping[type, Callable[[Renderer, Tensor, Sequence[str]], str]] = {
    Windows: Renderer._window,
    Scatter: Renderer._add_rows,
    RowChain: Renderer._row_chain,
}


def differs_by_run(value: Any, dtype: DType) -> bool:
    """Whether a number may differ between runs of one program: rates, seeds, thresholds of random bits.

    0, 1, -1 and small integers belong to formulas. The text does not contain numbers that may differ, so that runs
    which differ only in these share kernels and launches.
    """
    number = np.asarray(value).astype(dtype)[()]
    if is_floating(dtype):
        return bool(np.isfinite(number) and abs(number) not in (0, 1))
    return dtype.kind == "u" and int(number) >= _LEAST_THRESHOLD


# Unsigned numbers from here on are thresholds of random bits or seeds.
_LEAST_THRESHOLD = 2**16


_JOINS = {"sum": "Sum", "max": "Greatest", "argmax": "First"}


def join_of(t: Tensor) -> str | None:
    """Return the C++ reduction of a tensor; None for other ops."""
    reduction = lowering_of(t)
    return _JOINS[reduction.join] if isinstance(reduction, Reduction) else None


def join_type(t: Tensor) -> str:
    """Return the C++ type of a thread's accumulator."""
    return f"Best<{ctype(t.inputs[0].dtype)}>" if join_of(t) == "First" else ctype(t.dtype)
