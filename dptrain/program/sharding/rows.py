"""Lengths in placed programs: which rows of the batch a rank has along an axis.

A length is a `Dim` if and only if `BATCH` shards that axis by rows. Along any other axis a rank has all rows, and the
length is a number, so such a program holds for one batch size.

The blocks of a `Dim` tell which rows are a rank's: its part of each block, one after the other. A concatenation has a
block for each of its parts, `repeat(x, 2)` one block of twice the rows. Where operands meet, their blocks are equal;
else the order of rows would differ between ranks.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from dptrain.program.dims import Dim, counting, number_of
from dptrain.program.lowering import Join
from dptrain.program.shapes import Shape
from dptrain.program.sharding.sharding_rule import ShardingRule
from dptrain.program.tensor import Tensor


def same_rows(a: Shape, b: Shape) -> bool:
    """Whether a rank has the same rows along each axis of two shapes."""
    return [_blocks(n) for n in a] == [_blocks(n) for n in b]


def _blocks(length: Any) -> tuple[int, ...] | None:
    return length.blocks if isinstance(length, Dim) else None


def as_numbers(value: Any) -> Any:
    """Replace dims by their numbers, in tuples too."""
    if isinstance(value, tuple):
        return tuple(map(as_numbers, value))
    return value.number if isinstance(value, Dim) else value


def whole_along(shape: Shape, axis: int) -> Shape:
    """Return a shape with all rows along an axis."""
    return (*shape[:axis], number_of(shape[axis]), *shape[axis + 1 :])


def attributes_with_rows(tensor: Tensor, shapes: Sequence[Shape], out: Shape) -> dict[str, Any]:
    """Return an op's attributes for operands and a result of these shapes: numbers where a rank has all rows."""
    attributes = {name: value if name == "body" else as_numbers(value) for name, value in tensor.attributes.items()}
    if "key" in attributes:
        old, new = (tensor.shape, out) if "shape" in attributes else (tensor.inputs[0].shape, shapes[0])
        attributes["key"] = tuple(
            (0, n, 1) if selection == (0, length, 1) else selection if isinstance(n, Dim) else as_numbers(selection)
            for selection, length, n in zip(tensor.attributes["key"], old, new, strict=True)
        )
    return attributes | ({"shape": out} if "shape" in attributes else {})


class RowAxis:
    """The axes of an op that a letter names, if `BATCH` shards it by rows.

    Args:
        tensor: an unplaced value of the op.
        rule: its sharding rule.
        letter: of rows.
        placed: the dims of operands that are sharded along it; None for the others.
        nbytes: of each operand.
    """

    def __init__(
        self, tensor: Tensor, rule: ShardingRule, letter: str, placed: Sequence[Dim | None], nbytes: Sequence[int]
    ) -> None:
        self._tensor, self._placed = tensor, placed
        self._axes = [names.find(letter) for names in (*rule.inputs, rule.output)]
        shapes = [*(operand.shape for operand in tensor.inputs), tensor.shape]
        self._lengths = [None if axis < 0 else shape[axis] for shape, axis in zip(shapes, self._axes, strict=True)]
        sharded = [index for index, dim in enumerate(placed) if dim is not None]
        traced = [n for n in (self._lengths[-1], *self._lengths[:-1]) if isinstance(n, Dim)]
        self._reference: Dim | None = None
        if sharded:
            self._reference = placed[max(sharded, key=nbytes.__getitem__)]
        elif traced:
            self._reference = traced[0]

    def dims(self, *, alone: bool) -> list[Dim | None] | None:
        """Return the dims of a rank's part of each operand and of the result; None where a tensor has no rows there.

        None altogether if a rank's part of the result does not follow from its parts of the operands; not if it is
        `alone`.
        """
        if self._reference is None:
            return [None] * len(self._lengths)
        if alone:
            return [self._counting(length) for length in self._lengths]
        tensor = self._tensor
        if (
            tensor.op is not None
            and isinstance(tensor.op.lowering, Join)
            and self._axes[-1] == tensor.attributes["axis"]
        ):
            return self._joined()
        if "key" in tensor.attributes and self._axes[0] >= 0:
            return self._inserted() if "shape" in tensor.attributes else self._sliced()
        return self._scaled()

    def _counting(self, length: Any) -> Dim | None:
        if length is None or (not isinstance(length, Dim) and length == 0):
            return None
        assert self._reference is not None
        return counting(self._reference, length)

    def _scaled(self) -> list[Dim | None] | None:
        """Return lengths with the reference's blocks, None if a block of one would have a part of a row."""
        reference, dims = self._reference, list[Dim | None]()
        assert reference is not None
        for dim in map(self._counting, self._lengths):
            if dim is not None:
                blocks = [divmod(scale * dim.scale, reference.scale) for scale in reference.blocks]
                if any(rest for _, rest in blocks):
                    return None
                dim = _of_blocks(reference, [scale for scale, _ in blocks])
            dims.append(dim)
        return dims

    def _joined(self) -> list[Dim | None]:
        lengths = zip(self._placed, self._lengths, strict=False)
        dims = [dim or self._counting(length) for dim, length in lengths]
        blocks = [scale for dim in dims if dim is not None for scale in dim.blocks]
        assert self._reference is not None
        return [*dims, _of_blocks(self._reference, blocks)]

    def _ends(self, axis: int, scale: int) -> tuple[int, int]:
        """Return from where to where a key takes or puts rows, of `scale` for each row of the batch."""
        start, stop, _ = self._tensor.attributes["key"][axis]
        if isinstance(stop, Dim):
            return start.scale if isinstance(start, Dim) else 0, stop.scale
        return 0, 0 if stop == 0 else scale

    def _sliced(self) -> list[Dim | None] | None:
        dim = self._placed[0] or self._counting(self._lengths[0])
        assert dim is not None
        start, stop = self._ends(self._axes[0], dim.scale)
        if start == stop:
            return [dim, None]
        blocks = _cut(dim.blocks, start, stop)
        return None if blocks is None else [dim, _of_blocks(dim, blocks)]

    def _inserted(self) -> list[Dim | None]:
        out = self._counting(self._lengths[-1])
        assert out is not None
        start, stop = self._ends(self._axes[-1], out.scale)
        if start == stop:
            return [None, out]
        blocks = _cut(out.blocks, start, stop)
        dim = self._placed[0] or _of_blocks(out, blocks or (stop - start,))
        if blocks != dim.blocks:
            out = _of_blocks(out, [scale for scale in (start, *dim.blocks, out.scale - stop) if scale])
        return [dim, out]


def _of_blocks(dim: Dim, blocks: Sequence[int]) -> Dim:
    return Dim(*dim.names, scale=sum(blocks), blocks=tuple(blocks), size=dim.size)


def _cut(blocks: Sequence[int], start: int, stop: int) -> tuple[int, ...] | None:
    """Return the blocks from `start` to `stop`, None if these are not ends of blocks."""
    ends = [0, *accumulate(blocks)]
    if start not in ends or stop not in ends:
        return None
    return tuple(blocks[ends.index(start) : ends.index(stop)])
