"""One library for programs whose C++ differs in numbers alone, as a model's for sequences of other lengths does.

The text of the first program is compiled as it is. Where that of another differs from it in literals alone, these
become parameters: the library is compiled once more, and each program passes its own numbers in the `Context` of
`kernels/native.h`. Operations and their order stay those of the program's own text, and no option lets the compiler
change them (`compile.OPTIONS`), so the bits are the same. What must be a constant in C++, such as an argument of a
template, is never a parameter: programs that differ in it have a library each.
"""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dptrain.program.dims import Dim
from dptrain.program.program import Program

# The longest buffered row, `codegen._BLOCK`, and a line of the cache more: buffers one page apart would share sets.
LONGEST = 1024
_ROOM = str(LONGEST + 16)
# Kinds of programs that are remembered, and texts of each.
_MOST_KINDS, _MOST_TEXTS, _MOST_UNPARSED = 32, 32, 4
_FUNCTION = re.compile(r'^(?:static|extern "C") void \w+\(Context &(\w+)[^\n]*\{\n(.*?)^\}', re.DOTALL | re.MULTILINE)
# An argument list of a template; the bound of a buffered row; any other literal.
_TOKEN = re.compile(
    r"\w<[\w:, *]*>| [rq]\d+\[(?P<bound>\d+)\];"
    r"|(?<![\w.])(?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?P<suffix>\w*)(?![\w.])"
)
_SUFFIXES = {"f": "float", "ll": "long long", "ull": "unsigned long long"}
_BOUND = "bound"


class Literal(NamedTuple):
    """A literal: its C++ type, or that it is a buffer's bound, and its text."""

    kind: str
    text: str


class Text(NamedTuple):
    """The C++ of a program: what surrounds its literals, a piece more than these.

    A zero character with the context's name stands where a function begins.
    """

    pieces: Sequence[str]
    literals: Sequence[Literal]

    @property
    def digest(self) -> str:
        """A name of all texts that differ in literals alone."""
        kinds = "\0".join(literal.kind for literal in self.literals)
        return hashlib.sha256("\1".join((*self.pieces, kinds)).encode()).hexdigest()


def parsed(source: str) -> Text:
    """Split a program's C++ at the literals that may be parameters."""
    pieces, literals, piece, last = list[str](), list[Literal](), "", 0
    for function in _FUNCTION.finditer(source):
        begin = function.start(2)
        piece += f"{source[last:begin]}\0{function[1]}\0"
        last = begin
        for token in _TOKEN.finditer(source, begin, function.end(2)):
            literal, group = _literal(token)
            if literal is not None:
                pieces.append(piece + source[last : token.start(group)])
                literals.append(literal)
                piece, last = "", token.end("suffix" if group == "number" else group)
    return Text([*pieces, piece + source[last:]], literals)


def _literal(token: re.Match[str]) -> tuple[Literal | None, str]:
    """Return what may be a parameter of a token, and the group where it begins."""
    if (bound := token["bound"]) is not None:
        return Literal(_BOUND, bound) if int(bound) <= LONGEST else None, _BOUND
    if (number := token["number"]) is None:
        return None, ""
    kind = _SUFFIXES.get(token["suffix"])
    if not token["suffix"]:
        kind = "double" if not number.isdigit() else "int" if int(number) < 2**31 else "long"
    literal = None if kind is None else Literal(kind, number)
    return None if literal is None or _bits(literal) is None else literal, "number"


def _bits(literal: Literal) -> int | None:
    """Return a literal's 64 bits in the table of parameters, a float's as a double's; None if they may not be its."""
    if literal.kind in ("float", "double"):
        number = np.float64(literal.text)
        rounded = np.float32(number) if literal.kind == "float" else number
        # Else a compiler, which rounds the text once, may have another float.
        is_exact = rounded == number or np.float64(str(rounded)) == number
        return int(np.float64(rounded).view(np.uint64)) if is_exact else None
    return int(literal.text) if int(literal.text) < 2**63 else None


class Version:
    """A text with parameters, for all programs whose literals are equal wherever those of `examples` are.

    Attributes:
        source: its C++.
        examples: the literals of some programs.
    """

    def __init__(self, pieces: Sequence[str], examples: Sequence[Sequence[Literal]]) -> None:
        self.examples = examples
        self._slots: dict[tuple[Literal, ...], int] = {}
        self._columns = list(zip(*examples, strict=True))
        words = [self._word(column) for column in self._columns]
        self.source = _declared("".join(part for pair in zip(pieces, (*words, ""), strict=True) for part in pair), self)

    def _word(self, column: tuple[Literal, ...]) -> str:
        """Return a literal, or the name of a parameter, for those at one place in all examples."""
        kind, text = column[0]
        if all(literal.text == text for literal in column):
            return text + next((suffix for suffix, name in _SUFFIXES.items() if name == kind), "")
        return _ROOM if kind == _BOUND else f"d{self._slots.setdefault(column, len(self._slots))}"

    def declared(self, slot: int, context: str) -> str:
        """Return the declaration of a parameter at the head of a function."""
        kind = list(self._slots)[slot][0].kind
        return f"  const {kind} d{slot} = dp_parameter<{kind}>({context}, {slot});\n"

    def parameters(self, literals: Sequence[Literal]) -> list[int] | None:
        """Return the bits of a program's parameters; None if it is not one of those that the text is for."""
        texts: list[Literal | None] = [None] * len(self._slots)
        for column, literal in zip(self._columns, literals, strict=True):
            slot = self._slots.get(column)
            if slot is None:
                if literal != column[0] and (literal.kind != _BOUND or len(set(column)) == 1):
                    return None
            elif texts[slot] not in (None, literal):
                return None
            else:
                texts[slot] = literal
        bits = [None if literal is None else _bits(literal) for literal in texts]
        assert None not in bits
        return [number for number in bits if number is not None]


def _declared(text: str, version: Version) -> str:
    """Declare in each function the parameters that it names."""
    first, *functions = re.split("\0(\\w+)\0", text)
    parts = [first]
    for context, body in zip(functions[::2], functions[1::2], strict=True):
        slots = sorted({int(slot) for slot in re.findall(r"(?<![\w.])d(\d+)\b", body)})
        parts += [*(version.declared(slot, context) for slot in slots), body]
    return "".join(parts)


@dataclass
class _Family:
    """Programs whose texts differ in literals alone: those of the first one, and the latest version."""

    text: Text
    lengths: Hashable
    version: Version | None = None
    fails: bool = False  # its parameters are none to the compiler


@dataclass
class _Known:
    """Programs that may differ in lengths alone: texts of the first lengths, not yet parsed, and families."""

    unparsed: list[tuple[Hashable, str]] = field(default_factory=list)
    families: OrderedDict[str, _Family] = field(default_factory=OrderedDict)

    def family(self, text: Text, lengths: Hashable) -> _Family:
        """Return the family of a text, perhaps a new one."""
        for others, source in self.unparsed:
            other = parsed(source)
            self.families.setdefault(other.digest, _Family(other, others))
        self.unparsed.clear()
        family = self.families.setdefault(text.digest, _Family(text, lengths))
        self.families.move_to_end(text.digest)
        if len(self.families) > _MOST_TEXTS:
            self.families.popitem(last=False)
        return family


_KNOWN: OrderedDict[Hashable, _Known] = OrderedDict()


class Parameterized:
    """The C++ of a program as it is compiled: `source`, and the bits of its `parameters`, if it has any.

    Attributes:
        is_shared: whether its text is for other lengths too.
    """

    def __init__(self, source: str, program: Program) -> None:
        self.source, self.parameters, self.is_shared = source, list[int](), False
        self._family: _Family | None = None
        key, lengths = _kind(program)
        known = _KNOWN.setdefault(key, _Known())
        _KNOWN.move_to_end(key)
        if len(_KNOWN) > _MOST_KINDS:
            _KNOWN.popitem(last=False)
        if not known.families and all(others == lengths for others, _ in known.unparsed):
            known.unparsed = [*known.unparsed, (lengths, source)][-_MOST_UNPARSED:]
            return
        text = parsed(source)
        family = known.family(text, lengths)
        if family.lengths != lengths and not family.fails:
            self._choose(family, text)

    def _choose(self, family: _Family, text: Text) -> None:
        version = family.version
        parameters = None if version is None else version.parameters(text.literals)
        if version is None or parameters is None:
            examples = [family.text.literals] if version is None else version.examples
            version = family.version = Version(text.pieces, [*examples, text.literals])
            parameters = version.parameters(text.literals)
            assert parameters is not None
        self._family, self.source, self.parameters, self.is_shared = family, version.source, parameters, True

    def refuse(self, source: str) -> None:
        """Compile the program's own text, and each of its family's, as the text with parameters does not compile."""
        assert self._family is not None
        self._family.fails = True
        self.source, self.parameters, self.is_shared = source, [], False


def parameter_count(source: str, other: str) -> int | None:
    """Return by how many numbers two programs' texts differ if they can share a library; None if they cannot."""
    texts = parsed(source), parsed(other)
    if texts[0].digest != texts[1].digest:
        return None
    parameters = Version(texts[0].pieces, [text.literals for text in texts]).parameters(texts[1].literals)
    return None if parameters is None else len(parameters)


def _kind(program: Program) -> tuple[Hashable, Hashable]:
    """Return what programs that differ in lengths alone have in common, and the lengths."""
    inputs = program.inputs.items()
    key = (
        tuple((name, tensor.ndim, tensor.dtype) for name, tensor in inputs),
        tuple((_lengths(tensor.shape), tensor.dtype) for tensor in program.state.values()),
        tuple(program.outputs),
    )
    rows = program.rows if program.shape_specialised else None
    return key, (rows, *(_lengths(tensor.shape) for _, tensor in inputs))


def _lengths(shape: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(None if isinstance(n, Dim) else n for n in shape)
