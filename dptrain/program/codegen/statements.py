"""Writes the statements of a C++ or CUDA function, each in the outermost scope that knows its operands."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from dptrain.program.codegen.cpp import Ex, is_word, length_text, sum_text
from dptrain.program.codegen.index_expr import Axis, FloorDiv, Index, IndexExpr, Numel, symbol

ZERO, ALWAYS = Ex("0"), Ex("true")


class Scope(NamedTuple):
    """Statements of this depth and deeper, and the keys of values that can be reused until the scope ends."""

    threshold: int
    lines: list[str]
    made: list[Any]


class Statements:
    """Writes the statements of one function; equal expressions are computed once."""

    def __init__(self) -> None:
        self._scopes = [Scope(0, [], [])]
        self._made: dict[Any, Ex] = {}
        self._count = 0

    @contextmanager
    def scope(self, threshold: int | None = None) -> Iterator[list[str]]:
        """Collect statements of this depth and deeper, by default of a new depth."""
        inner = Scope(self._scopes[-1].threshold + 1 if threshold is None else threshold, [], [])
        self._scopes.append(inner)
        yield inner.lines
        self._scopes.pop()
        for key in inner.made:
            del self._made[key]

    @property
    def depth(self) -> int:
        """Depth of the innermost scope."""
        return self._scopes[-1].threshold

    @property
    def lines(self) -> list[str]:
        """Statements of the innermost scope."""
        return self._scopes[-1].lines

    def write(self, *lines: str, depth: int | None = None) -> None:
        """Append statements to the innermost scope, or to that of a depth."""
        self._scope_of(self.depth if depth is None else depth).lines.extend(lines)

    def _scope_of(self, depth: int) -> Scope:
        scope: Scope = next(scope for scope in reversed(self._scopes) if depth >= scope.threshold)
        return scope

    def kept(self, key: Any, make: Callable[[], Ex]) -> Ex:
        """Return the value of a key, made at most once as long as its scope lasts."""
        if key not in self._made:
            value = make()
            self._scope_of(value.depth).made.append(key)
            self._made[key] = value
        return self._made[key]

    def let(self, kind: str, text: str, depth: int, name: str = "v") -> Ex:
        """Declare a constant with this value."""

        def make() -> Ex:
            variable = Ex(self.fresh(name), depth)
            self.write(f"const {kind} {variable.text} = {text};", depth=depth)
            return variable

        return self.kept((kind, text), make)

    def fresh(self, name: str) -> str:
        """Return an unused name."""
        self._count += 1
        return f"{name}{self._count}"

    def index(self, text: str, *operands: Ex) -> Ex:
        """Declare an index computed from others."""
        return self.let("Index", text, max((operand.depth for operand in operands), default=0), "i")

    def bound(self, text: str, length: Numel, *operands: Ex) -> IndexExpr:
        """Declare an index below a length; return its expression."""
        index = self.index(text, *operands)
        return symbol(Axis(index.text, length, index.depth))

    def at(self, place: IndexExpr) -> Ex:
        """Write an index expression; the part that outer scopes know is computed there."""
        total, depths = ZERO, dict[int, list[tuple[Numel, str]]]()
        for (index, power), count in place.terms.items():
            depths.setdefault(0 if index is None else index.depth, []).append(((count, power), self._name_of(index)))
        for depth, terms in sorted(depths.items()):
            text = sum_text(terms, "" if total is ZERO else total.text)
            total = Ex(text, depth) if is_word(text) else self.index(text, Ex("", depth))
        return total

    def _name_of(self, index: Index) -> str:
        if isinstance(index, FloorDiv):
            place, by = self.at(index.dividend), length_text(index.divisor)
            return self.index(f"{place.text} / {by if is_word(by) else f'({by})'}", place).text
        return "" if index is None else str(index.name)

    def chosen(self, kind: str, conditions: Sequence[Ex], values: Sequence[Callable[[], Ex]], otherwise: str) -> Ex:
        """Return the value of the first true condition; the other values are not computed.

        A condition's depth is that of its outermost test: what outer scopes know is computed there, whatever it says.
        """
        threshold = min((condition.depth for condition in conditions if condition != ALWAYS), default=0)
        result, lines = self.fresh("v"), list[str]()
        for number, (condition, make) in enumerate(zip(conditions, values, strict=True)):
            with self.scope(min(threshold, self.depth)) as inner:
                value = make()
                inner.append(f"{result} = {value.text};")
            head = "else" if number and condition == ALWAYS else f"{'else ' if number else ''}if ({condition.text})"
            lines += [f"{head} {{", *(f"    {line}" for line in inner), "}"]
        self.lines.extend([f"{kind} {result} = {otherwise};", *lines])
        return Ex(result, self.depth)
