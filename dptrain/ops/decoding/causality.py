"""Proof that no position reads a later one: what a tensor holds at sources after its position, op by op.

A cache holds whatever was written at later positions. Scores of these are replaced by low numbers, whose exponentials
are zeros, which contribute nothing to a sum: an op may reduce an axis of sources only after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dptrain.ops.decoding.time_axis import TimeAxis, axes_before, is_alone
from dptrain.ops.elementwise import add, divide, exp, logical_and, logical_or, multiply, subtract, where
from dptrain.program.lowering import Element, Product, Reduction, ViewMap, lowering_of
from dptrain.program.tensor import Tensor, untraced

# Numbers whose exponentials are 0 beside that of a score, whatever is added.
_LOW = -1e4


@dataclass(frozen=True)
class Later:
    """What a tensor holds at later sources: one known `value`, or numbers that are known to be `low`, or anything."""

    value: float | None = None
    low: bool = False

    @property
    def is_zero(self) -> bool:
        """Whether they contribute nothing to a sum."""
        return self.value == 0

    @property
    def is_low(self) -> bool:
        """Whether their exponentials are zeros, and they are no maximum."""
        return self.low or (self.value is not None and self.value <= _LOW)


ANYTHING, LOW = Later(), Later(low=True)


def later_of_constant(tensor: Tensor, target: TimeAxis | None, source: TimeAxis | None, length: int) -> Later | None:
    """Return what a tensor that does not depend on tokens holds at sources after targets; None without such an axis."""
    if tensor.value is not None and tensor.value.size == 1:
        return Later(float(tensor.value.reshape(-1)[0]))
    if source is None:
        return None
    if tensor.value is None:
        if not (isinstance(lowering_of(tensor), ViewMap) or _converts(tensor)):
            return ANYTHING
        targets = (None,) if target is None else axes_before(tensor, target, length)
        return later_of_constant(tensor.inputs[0], targets[0], axes_before(tensor, source, length)[0], length)
    array = np.moveaxis(np.asarray(tensor.value), source.axis, -1)
    if target is None or not all(is_alone(tensor.shape, axis, length) for axis in (target, source)):
        values = array
    else:
        axis = target.axis - (target.axis > source.axis)
        values = np.moveaxis(array, axis, -2)[..., np.triu(np.ones((length, length), np.bool_), 1)]
    least, most = float(values.min()), float(values.max())
    return Later(least) if least == most else LOW if most <= _LOW else ANYTHING


def kept_later(tensor: Tensor, operands: Sequence[Later | None]) -> Later:
    """Return what an op's value holds at later sources, given its operands; None for one without that axis."""
    lowering = lowering_of(tensor)
    if isinstance(lowering, ViewMap):
        return operands[0] or ANYTHING
    if isinstance(lowering, Reduction):  # along another axis
        return operands[0] if operands[0] and (operands[0].is_zero or lowering.join == "max") else ANYTHING
    if isinstance(lowering, Product):
        return Later(0.0) if any(later and later.is_zero for later in operands) else ANYTHING
    if not isinstance(lowering, Element):
        return ANYTHING
    known = [None if later is None else later.value for later in operands]
    if all(value is not None for value in known) and not lowering.by_last:
        return Later(_computed(tensor, known))
    if tensor.op is where and operands[0] is not None and operands[0].value is not None:
        return operands[1 if operands[0].value else 2] or ANYTHING
    if tensor.op in (multiply, divide) and any(
        later and later.is_zero for later in operands[: 2 if tensor.op is multiply else 1]
    ):
        return Later(0.0)
    if tensor.op is exp and operands[0] and operands[0].is_low:
        return Later(0.0)
    if tensor.op in (add, subtract) and _sums_to_low(tensor, operands):
        return LOW
    if _converts(tensor) and operands[0] is not None:
        return operands[0]
    if tensor.op is logical_and and 0 in known:
        return Later(0.0)
    if tensor.op is logical_or and any(known):
        return Later(1.0)
    return ANYTHING


def _sums_to_low(tensor: Tensor, operands: Sequence[Later | None]) -> bool:
    """Whether a sum or difference has a low summand, and none that outweighs it."""
    first, second = operands
    if tensor.op is subtract:
        is_subtracted_low = second is not None and second.value is not None and second.value >= -_LOW
        return is_subtracted_low or bool(first and first.is_low and not (second and second.is_low))
    return any(later is not None and later.is_low for later in operands)


def lost_later(tensor: Tensor, operands: Sequence[Later | None]) -> bool:
    """Whether an op that reduces an axis of sources reads nothing of the later ones."""
    lowering = lowering_of(tensor)
    known = [later for later in operands if later is not None]
    if isinstance(lowering, Product):
        return any(later.is_zero for later in known)
    if isinstance(lowering, Reduction):
        return known[0].is_zero if lowering.join == "sum" else known[0].is_low or _is_false(tensor, known[0])
    return False


def _is_false(tensor: Tensor, later: Later) -> bool:
    return tensor.inputs[0].dtype == np.bool_ and later.is_zero


def _converts(tensor: Tensor) -> bool:
    lowering = lowering_of(tensor)
    return isinstance(lowering, Element) and lowering.converts


def _computed(tensor: Tensor, values: Sequence[Any]) -> float:
    """Return an op's value of known numbers."""
    assert tensor.op is not None
    with untraced():
        operands = [np.asarray(value, read.dtype) for value, read in zip(values, tensor.inputs, strict=True)]
        return float(tensor.op(*operands, **tensor.attributes).numpy())
