"""Sharding rules: the axes of an op's operands and output as letters, as in einsum: `mk,kn->mn`.

- A lower-case letter may be sharded: each rank takes its part of every operand with the letter, and computes its part
  of the output. If the output lacks the letter, each rank's result is partial: a summand, or a candidate for the
  maximum (`Op.partial_reduce`).
- A capital letter must be whole. It may stand for axes of different lengths: `aX,aX->aX` concatenates.
- `1` is an axis of length 1 that is broadcast (`ab,1b->ab`), or that a reduction leaves (`ab->a1`).

Several values of one op follow each other: `aB->aB,a`.

An output letter that no operand has is made from the shape alone: `1b->ab` repeats, `->ab` fills.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dptrain.errors import ConfigError
from dptrain.program.shapes import Shape

# Text if the number of axes is fixed; else a function of the operands' shapes, the output's shape and attributes.
RuleText = str | Callable[[Sequence[Shape], Shape, Mapping[str, Any]], str]

# RuleText of axes in order; x, y and z are those of matrices.
_NAMES = "abcdefghijklmnopqrstuvw"
_FORM = re.compile(r"[a-zA-Z1]*(,[a-zA-Z1]*)*->[a-zA-Z1]*(,[a-zA-Z1]*)*")


@dataclass(frozen=True)
class ShardingRule:
    """A parsed rule, one character an axis; `others` are the letters of all values where there are several."""

    inputs: tuple[str, ...]
    output: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{','.join(self.inputs)}->{','.join(self.others or (self.output,))}"

    def own(self) -> str:
        """Return the lower-case letters that only the output has."""
        letters = dict.fromkeys("".join(self.others or (self.output,)))
        return "".join(letter for letter in letters if letter.islower() and not _has(self.inputs, letter))

    def of(self, index: int) -> "ShardingRule":
        """Return the rule of one value."""
        return replace(self, output=self.others[index]) if self.others else self


def names(rank: int) -> str:
    """Return a letter for each axis; axes after the 23rd must be whole."""
    return _NAMES[:rank].ljust(rank, "X")


def parse_rule(rule: str, op: str, operands: int | None = None) -> ShardingRule:
    """Parse "mk,kn->mn" of an op; ConfigError if malformed or if a tensor has a lower-case letter twice."""

    def refusal(fault: str) -> ConfigError:
        return ConfigError(f"op {op!r}: letters = {rule!r}: {fault}")

    if not isinstance(rule, str) or not _FORM.fullmatch(rule):
        raise refusal("expected a letter for each axis of the operands and of the output, such as 'mk,kn->mn'")
    operand_letters, _, output = rule.partition("->")
    inputs = tuple(operand_letters.split(",")) if operand_letters or operands != 0 else ()
    if operands is not None and len(inputs) != operands:
        raise refusal(f"{len(inputs)} operands; expected {operands}")
    outputs = tuple(output.split(","))
    for axes in (*inputs, *outputs):
        if repeated := [letter for letter in axes if letter.islower() and axes.count(letter) > 1]:
            raise refusal(
                f"{repeated[0]!r} names two axes of one tensor; only capitals may, whose axes are never sharded"
            )
    return ShardingRule(inputs, outputs[0], outputs if outputs[1:] else ())


def parse_fixed_rule(rule: str, op: str, operands: int | None) -> ShardingRule:
    """Parse a record's rule for any shape; ConfigError as in `parse_rule`, or for an output letter in no operand."""
    named = parse_rule(rule, op, operands)
    if any(named.inputs) and (unknown := named.own()):
        raise ConfigError(f"op {op!r}: letters = {rule!r}: no operand has the output's letter {unknown[0]!r}")
    return named


def _has(inputs: Sequence[str], letter: str) -> bool:
    return any(letter in axes for axes in inputs)
