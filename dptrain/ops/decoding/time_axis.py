"""Where the positions of a sequence lie in the tensors of a program: the axis of time, followed through the ops.

An op's sharding rule says along which axes its elements are independent of each other: along a lower-case letter it may
compute the positions of a part. So the same rules that divide a program among ranks divide it among positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dptrain.ops.nn.attention import attend_heads
from dptrain.ops.scan import SCAN
from dptrain.program.body import body_of
from dptrain.program.codegen.index_expr import ONE, Numel, exact_quotient, numel, numel_product
from dptrain.program.dims import Dim
from dptrain.program.lowering import ViewMap, lowering_of
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Tensor


@dataclass(frozen=True)
class TimeAxis:
    """An axis with the positions of a sequence, each of `inner` consecutive indices: 1 of (rows * time)."""

    axis: int
    inner: Numel = ONE

    def part(self, shape: Shape, length: int, count: int) -> Shape:
        """Return the shape with `count` of the `length` positions."""
        n: Any = shape[self.axis]
        scaled = n.times(n.scale // length * count) if isinstance(n, Dim) else int(n) // length * count
        return (*shape[: self.axis], scaled, *shape[self.axis + 1 :])


def axis_behind(tensor: Tensor, operand: int, time: TimeAxis, length: int) -> TimeAxis | None:
    """Return the time axis of an op's value, given that of an operand; None if the op does not keep positions apart."""
    if tensor.op is SCAN:
        body = body_of(tensor)
        count = len(body.begun)
        is_slice = count <= operand < count + len(body.slices) and tensor.index >= len(body.carries)
        return time if is_slice and time == TimeAxis(0) else None
    if tensor.op is attend_heads:
        return time if operand == 0 and time == TimeAxis(1) else None
    if _keeps_order(tensor):
        return _reshaped(tensor.inputs[0].shape, time, tensor.shape, length)
    assert tensor.op is not None
    rule = tensor.op.sharding_rule(tensor)
    letter = rule.inputs[operand][time.axis]
    return TimeAxis(rule.output.index(letter), time.inner) if letter.islower() and letter in rule.output else None


def axes_before(tensor: Tensor, time: TimeAxis, length: int) -> Sequence[TimeAxis | None]:
    """Return the time axis of each operand, given that of an op's value; None for operands of all positions."""
    if tensor.op is attend_heads:
        masks = tensor.inputs[3:]
        return [time, None, None, *(TimeAxis(2) if mask.shape[2] == length else None for mask in masks)]
    if tensor.op is SCAN:
        body = body_of(tensor)
        slices = range(len(body.begun), len(body.begun) + len(body.slices))
        return [TimeAxis(0) if operand in slices else None for operand in range(len(tensor.inputs))]
    if _keeps_order(tensor):
        return [_reshaped(tensor.shape, time, tensor.inputs[0].shape, length)]
    assert tensor.op is not None
    rule = tensor.op.sharding_rule(tensor)
    letter = rule.output[time.axis]
    return [
        TimeAxis(letters.index(letter), time.inner) if letter.islower() and letter in letters else None
        for letters in rule.inputs
    ]


def _keeps_order(tensor: Tensor) -> bool:
    return lowering_of(tensor) == ViewMap()


def _reshaped(old: Shape, time: TimeAxis, new: Shape, length: int) -> TimeAxis | None:
    """Return the axis of time after a reshape: the order of elements stays."""
    step = numel_product(numel(old[time.axis + 1 :]), time.inner)  # elements of a position
    for axis, n in enumerate(new):
        inner = exact_quotient(step, numel(new[axis + 1 :]))
        if inner is not None and exact_quotient(numel([n]), numel_product((length, 0), inner)) is not None:
            return TimeAxis(axis, inner)
    return None


def is_alone(shape: Shape, time: TimeAxis, length: int) -> bool:
    """Whether an axis has the positions of one sequence and nothing else, unlike (rows * time)."""
    n: Any = shape[time.axis]
    return time.inner == ONE and not isinstance(n, Dim) and int(n) == length
