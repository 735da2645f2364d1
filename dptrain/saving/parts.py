"""Parts of arrays: which a rank has, and how it reads them from a checkpoint whose parts are others."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.errors import DataError
from dptrain.program.tensor import Array, Variable
from dptrain.runtime.files import Directory
from dptrain.saving.manifest import Shape, StoredArray, StoredPart, blocks


@dataclass(frozen=True, eq=False)
class Part:
    """What this rank has of a variable.

    Attributes:
        variable: that holds it.
        start: where it begins in the whole.
        whole: shape of the whole.
        ranks: those that have the same; the first of them writes it, and reads it for all.
        is_here: whether this rank has any of it: a stage of a pipeline has nothing of another one's.
    """

    variable: Variable
    start: Shape
    whole: Shape
    ranks: Communicator
    is_here: bool = True

    def of(self, value: Array) -> Array:
        """Return this part of a value, which is whole, or this part already."""
        own = self.variable.shape
        if value.shape == own:
            return value
        if not self.is_here:
            return np.empty(own, value.dtype)
        return value[tuple(slice(first, first + length) for first, length in zip(self.start, own, strict=True))]


def read_part(folder: Directory, array: StoredArray, start: Sequence[int], shape: Sequence[int]) -> Array:
    """Return a part of an array, of which only the blocks are read that it needs.

    Args:
        folder: the checkpoint.
        array: as its manifest says.
        start: where the part begins.
        shape: of the part.

    Raises:
        OSError: a file cannot be read.
        DataError: a file is too short, or a block is not as it was written.
    """
    # A scalar is an array of one row.
    found = np.empty(tuple(shape) or (1,), np.dtype(array.dtype).newbyteorder("<"))
    wanted = list(zip(tuple(start) or (0,), found.shape, strict=True))
    for part in array.parts:
        own = list(zip(part.start or (0,), part.shape or (1,), strict=True))
        if (common := overlap(wanted, own)) is not None:
            _fill(found, folder, part, common, [first for first, _ in wanted], [first for first, _ in own])
    return found.reshape(tuple(shape)).astype(array.dtype, copy=False)


def overlap(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Return what two slices have in common, from where to where along each axis; None for nothing.

    Args:
        one: where it begins, and its length, along each axis.
        other: likewise.
    """
    found = [
        (max(first, begin), min(first + length, begin + extent))
        for (first, length), (begin, extent) in zip(one, other, strict=True)
    ]
    return found if all(begin < end for begin, end in found) else None


def _fill(
    found: Array,
    folder: Directory,
    part: StoredPart,
    common: Sequence[tuple[int, int]],
    start: Sequence[int],
    origin: Sequence[int],
) -> None:
    """Copy what a stored part and the wanted one have in common.

    Args:
        found: the wanted part.
        folder: the checkpoint.
        part: that is stored.
        common: in the whole array, as `overlap`.
        start: where the wanted part begins there.
        origin: where the stored one does.
    """
    beside = part.shape[1:]
    width = math.prod(beside) * found.itemsize
    (first, last), *others = common
    with folder.open(part.file) as file:
        for (begin, end), digest in zip(blocks(part.shape, found.itemsize), part.sha256, strict=True):
            low, high = max(first, origin[0] + begin), min(last, origin[0] + end)
            if low >= high:
                continue
            file.seek(part.offset + begin * width)
            content = file.read((end - begin) * width)
            if hashlib.sha256(content).hexdigest() != digest:
                raise DataError(
                    f"{folder.path}: damaged: {part.file} is not what was written, from byte "
                    f"{part.offset + begin * width} on"
                )
            rows = np.frombuffer(content, found.dtype).reshape(end - begin, *beside)
            taken = [slice(low - origin[0] - begin, high - origin[0] - begin)]
            given = [slice(low - start[0], high - start[0])]
            for axis, (left, right) in enumerate(others, 1):
                taken.append(slice(left - origin[axis], right - origin[axis]))
                given.append(slice(left - start[axis], right - start[axis]))
            found[tuple(given)] = rows[tuple(taken)]
