"""The statements of one function in C++ or CUDA C++, each in the outermost scope in which its operands are known."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from dptrain.program.codegen.cpp import Ex, is_word, length_text, sum_text
from dptrain.program.codegen.index_expr import Axis, FloorDiv, Index, IndexExpr, Numel, symbol

ZERO = Ex("0")


class Scope(NamedTuple):
    """Statements that are executed together.

    Attributes:
        threshold: those of this depth and deeper ones stand here.
        lines: the statements.
        made: what can be used again until the scope ends.
    """

    threshold: int
    lines: list[str]
    made: list[Any]


class Statements:
    """Writes the statements of one function. What is written once is used again."""

    def __init__(self) -> None:
        self._scopes = [Scope(0, [], [])]
        self._made: dict[Any, Ex] = {}
        self._count = 0

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

    def write(self, *lines: str, depth: int | None = None) -> None:
        """Add statements to the innermost scope, or to that of a depth."""
        self._scope_of(self.depth if depth is None else depth).lines.extend(lines)

    def _scope_of(self, depth: int) -> Scope:
        found: Scope = next(one for one in reversed(self._scopes) if depth >= one.threshold)
        return found

    def kept(self, key: Any, make: Callable[[], Ex]) -> Ex:
        """Return what was made for a key, or make it: it is known as long as its scope lasts."""
        if key not in self._made:
            found = make()
            self._scope_of(found.depth).made.append(key)
            self._made[key] = found
        return self._made[key]

    def let(self, kind: str, text: str, depth: int, name: str = "v") -> Ex:
        """Return a variable of this value."""

        def make() -> Ex:
            found = Ex(self.fresh(name), depth)
            self.write(f"const {kind} {found.text} = {text};", depth=depth)
            return found

        return self.kept((kind, text), make)

    def fresh(self, name: str) -> str:
        """Return a name that nothing else has."""
        self._count += 1
        return f"{name}{self._count}"

    def index(self, text: str, *operands: Ex) -> Ex:
        """Return an index that is computed of others."""
        return self.let("Index", text, max((one.depth for one in operands), default=0), "i")

    def bound(self, text: str, length: Numel, *operands: Ex) -> IndexExpr:
        """Return the place at an index that is computed of others and stays below a length."""
        found = self.index(text, *operands)
        return symbol(Axis(found.text, length, found.depth))

    def at(self, place: IndexExpr) -> Ex:
        """Return a place as C++: what outer scopes know of it is computed there."""
        found, depths = ZERO, dict[int, list[tuple[Numel, str]]]()
        for (index, power), count in place.terms.items():
            depths.setdefault(0 if index is None else index.depth, []).append(((count, power), self._name_of(index)))
        for depth, terms in sorted(depths.items()):
            text = sum_text(terms, "" if found is ZERO else found.text)
            found = Ex(text, depth) if is_word(text) else self.index(text, Ex("", depth))
        return found

    def _name_of(self, index: Index) -> str:
        if isinstance(index, FloorDiv):
            place, by = self.at(index.dividend), length_text(index.divisor)
            return self.index(f"{place.text} / {by if is_word(by) else f'({by})'}", place).text
        return "" if index is None else str(index.name)

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
