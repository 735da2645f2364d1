"""The next token: the most probable one, or one drawn from the most probable ones.

Nothing is sorted: the least probability that counts is found by bisection, so that a step of generation is compiled.

Source: A. Holtzman et al., "The curious case of neural text degeneration", ICLR 2020 (top-p); A. Fan et al.,
"Hierarchical neural story generation", ACL 2018 (top-k).
"""

from collections.abc import Callable
from typing import Any

from dptrain.ops.elementwise import cast, exp, greater, greater_equal, less_equal, logical_or, minimum, where
from dptrain.ops.loops import fori_loop
from dptrain.ops.manipulation import expand_dims
from dptrain.ops.math.cumulative import cumsum
from dptrain.ops.reduction import argmax, max, sum
from dptrain.program.tensor import Tensor

# Gaps to the greatest score at which a probability is 0 in float32 and float64.
_GAPS = {"float32": 104.0, "float64": 746.0}
# Halvings of the gaps, of which the last are below the resolution of scores.
_HALVINGS = 40


def most_probable(logits: Tensor) -> Tensor:
    """Return the index of each row's greatest logit, the first of equal ones: (rows,) int32 of (rows, classes)."""
    return cast(argmax(logits, -1), "int32")


def sampled(
    logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> Tensor:
    """Return an index for each row, drawn with the probabilities softmax(logits / temperature).

    All in the type of `uniform`, float32 or float64.

    Args:
        logits: (rows, classes).
        uniform: (rows,) numbers in [0, 1): an index is the first one up to which the probabilities exceed it.
        temperature: (rows,); rows with 0 take the most probable index.
        top_k: (rows,) integers: only this many of the most probable ones count, and those that equal the last of them.
        top_p: (rows,), 0 to 1: of these only as many of the most probable ones count as have this part of the
            probability together.

    Returns:
        (rows,) int32.
    """
    scores = cast(logits, uniform.dtype)
    rates = expand_dims(where(greater(temperature, 0), temperature, 1), -1)
    greatest = max(scores, -1, keepdims=True)
    gaps = minimum((greatest - scores) / rates, _GAPS[uniform.dtype.name])
    powers = exp(-gaps)
    if top_k is not None:
        wanted = expand_dims(cast(top_k, "int32"), -1)
        powers = _within(gaps, powers, lambda kept: greater_equal(sum(cast(kept, "int32"), -1, keepdims=True), wanted))
    if top_p is not None:
        part = expand_dims(top_p, -1)
        mass = sum(powers, -1, keepdims=True) * part

        def has_mass(kept: Tensor) -> Tensor:
            return greater_equal(sum(where(kept, powers, 0), -1, keepdims=True), mass)

        powers = where(greater_equal(part, 1), powers, _within(gaps, powers, has_mass))
    total = cumsum(powers, -1)
    whole = total[:, -1:]
    reached = logical_or(greater(total, expand_dims(uniform, -1) * whole), greater_equal(total, whole))
    drawn = cast(argmax(cast(reached, "int32"), -1), "int32")
    return where(greater(temperature, 0), drawn, most_probable(logits))


def _within(gaps: Tensor, powers: Tensor, suffices: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the powers of the smallest gaps that suffice together, 0 for the others."""

    def halve(_: Any, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        low, high = bounds
        middle = (low + high) / 2
        enough = suffices(less_equal(gaps, middle))
        return where(enough, low, middle), where(enough, middle, high)

    most = max(gaps, -1, keepdims=True)
    _, bound = fori_loop(0, _HALVINGS, halve, (most * 0 - 1, most))
    return where(less_equal(gaps, bound), powers, 0)
