"""The axes of an op's operands and output as letters, as einsum names them: `mk,kn->mn`.

- A lower-case letter may be sharded: each rank takes its part of every operand that has the letter, and computes its
  part of the output. If the output lacks the letter, each rank's result is a summand, or a candidate (`Op.joins`).
- A capital letter is an axis that must be whole. It may stand for axes of different lengths: `aX,aX->aX` concatenates.
- `1` is an axis of length 1 that is broadcast (`ab,1b->ab`), or that a reduction leaves behind (`ab->a1`).

Several values of one op are named one after the other: `aB->aB,a`.

An output letter that no operand has is made from the shape alone: `1b->ab` repeats, `->ab` fills.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.shapes import Shape

# Text where the number of axes is fixed; else a function of the operands' shapes, the output's shape and attributes.
Letters = str | Callable[[Sequence[Shape], Shape, Mapping[str, Any]], str]

# Letters of axes in order; x, y and z are those of matrices.
_NAMES = "abcdefghijklmnopqrstuvw"
_FORM = re.compile(r"[a-zA-Z1]*(,[a-zA-Z1]*)*->[a-zA-Z1]*(,[a-zA-Z1]*)*")


@dataclass(frozen=True)
class Named:
    """Parsed letters, one character an axis.

    Attributes:
        inputs: of each operand.
        output: of the output.
        others: of all values, where there are several.
    """

    inputs: tuple[str, ...]
    output: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{','.join(self.inputs)}->{','.join(self.others or (self.output,))}"

    def own(self) -> str:
        """Return the lower-case letters that only the output has."""
        every = dict.fromkeys("".join(self.others or (self.output,)))
        return "".join(letter for letter in every if letter.islower() and not _has(self.inputs, letter))

    def of(self, index: int) -> "Named":
        """Return the letters of one value."""
        return replace(self, output=self.others[index]) if self.others else self


def names(rank: int) -> str:
    """Return a letter for each axis; axes after the 23rd must be whole."""
    return _NAMES[:rank].ljust(rank, "X")


def parsed(text: str, op: str, operands: int | None = None) -> Named:
    """Parse letters.

    Args:
        text: such as "mk,kn->mn".
        op: the op's name, for messages.
        operands: how many the op takes; None for any number.

    Raises:
        ConfigError: the text is malformed, has another number of operands, or repeats a lower-case letter.
    """

    def refusal(fault: str) -> ConfigError:
        return ConfigError(f"op {op!r}: letters = {text!r}: {fault}")

    if not isinstance(text, str) or not _FORM.fullmatch(text):
        raise refusal("expected those of each operand's axes and of the output's, such as 'mk,kn->mn'")
    given, _, output = text.partition("->")
    inputs = tuple(given.split(",")) if given or operands != 0 else ()
    if operands is not None and len(inputs) != operands:
        raise refusal(f"{len(inputs)} operands; expected {operands}")
    outputs = tuple(output.split(","))
    for one in (*inputs, *outputs):
        if twice := [letter for letter in one if letter.islower() and one.count(letter) > 1]:
            raise refusal(f"{twice[0]!r} names two axes of one tensor; capitals may, which must be whole")
    return Named(inputs, outputs[0], outputs if outputs[1:] else ())


def parsed_for_any_shape(text: str, op: str, operands: int | None) -> Named:
    """Parse the letters of a record, see `parsed`.

    Raises:
        ConfigError: as there, or a letter of the output is missing in the operands, though these have letters.
    """
    found = parsed(text, op, operands)
    if any(found.inputs) and (unknown := found.own()):
        raise ConfigError(f"op {op!r}: letters = {text!r}: no operand has the output's {unknown[0]!r}")
    return found


def _has(inputs: Sequence[str], letter: str) -> bool:
    return any(letter in one for one in inputs)
