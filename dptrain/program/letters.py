"""The axes of an op's operands and output as letters, as einsum names them: `mk,kn->mn`.

- A lower-case letter may be sharded: ranks that take their parts of every operand that has the letter compute a part of
  the output. If the output has not the letter, each has a summand of it, or a candidate (`Op.joins`).
- A capital letter is an axis that must be whole. One that stands several times need not be of one length: `aX,aX->aX`
  concatenates.
- `1` is an axis of length 1 that is repeated along the others', or that stands for no element of an operand in
  particular: `ab,1b->ab`, `ab->a1`.

What an op makes along a letter of the output that no operand has, it makes of the shape alone: `1b->ab` repeats, and
`->ab` fills.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.shapes import Shape

# Of an op of a fixed number of axes the text itself; else a function of the operands' shapes, the output's shape and
# the attributes.
Letters = str | Callable[[Sequence[Shape], Shape, Mapping[str, Any]], str]

# Letters of axes in order; x, y and z are those of matrices.
_NAMES = "abcdefghijklmnopqrstuvw"
_FORM = re.compile(r"[a-zA-Z1]*(,[a-zA-Z1]*)*->[a-zA-Z1]*")


@dataclass(frozen=True)
class Named:
    """Letters of each operand's axes and of the output's, a character each.

    Attributes:
        inputs: of the operands.
        output: as above.
    """

    inputs: tuple[str, ...]
    output: str

    def __str__(self) -> str:
        return f"{','.join(self.inputs)}->{self.output}"

    def own(self) -> str:
        """Return the output's letters that no operand has."""
        return "".join(letter for letter in self.output if letter.islower() and not _has(self.inputs, letter))


def names(rank: int) -> str:
    """Return a letter for each of so many axes; those behind the 23rd must be whole."""
    return _NAMES[:rank].ljust(rank, "X")


def parsed(text: str, op: str, operands: int | None = None) -> Named:
    """Return what letters say.

    Args:
        text: such as "mk,kn->mn".
        op: its name, for messages.
        operands: how many the op takes, or None.

    Raises:
        ConfigError: the text is none, or not for so many operands.
    """

    def refusal(fault: str) -> ConfigError:
        return ConfigError(f"op {op!r}: letters = {text!r}: {fault}")

    if not isinstance(text, str) or not _FORM.fullmatch(text):
        raise refusal("expected those of each operand's axes and of the output's, such as 'mk,kn->mn'")
    given, _, output = text.partition("->")
    inputs = tuple(given.split(",")) if given or operands != 0 else ()
    if operands is not None and len(inputs) != operands:
        raise refusal(f"{len(inputs)} operands; expected {operands}")
    for one in (*inputs, output):
        if twice := [letter for letter in one if letter.islower() and one.count(letter) > 1]:
            raise refusal(f"{twice[0]!r} names two axes of one tensor; capitals may, which must be whole")
    return Named(inputs, output)


def parsed_for_any_shape(text: str, op: str, operands: int | None) -> Named:
    """As `parsed`, of text that stands in a record.

    Raises:
        ConfigError: as there, or the output has a letter that no operand has, though operands have letters.
    """
    found = parsed(text, op, operands)
    if any(found.inputs) and (unknown := found.own()):
        raise ConfigError(f"op {op!r}: letters = {text!r}: no operand has the output's {unknown[0]!r}")
    return found


def _has(inputs: Sequence[str], letter: str) -> bool:
    return any(letter in one for one in inputs)
