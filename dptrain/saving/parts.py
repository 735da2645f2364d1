"""Parts of sharded arrays: which a rank has, and how it reads them from a checkpoint with other parts."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dptrain.comm.base import Communicator
from dptrain.errors import DataError
from dptrain.program.tensor import Array, Variable
from dptrain.runtime.storage.files import Directory
from dptrain.saving.manifest import Shape, StoredArray, StoredPart, blocks


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a variable."""

    variable: Variable  # that holds it
    start: Shape  # where it begins in the whole
    whole: Shape  # shape of the whole
    ranks: Communicator  # ranks with the same part; the first writes it, and reads it for all
    is_here: bool = True  # False for a variable of another pipeline stage

    def of(self, value: Array) -> Array:
        """Return this part of a value, which is whole, or this part already."""
        shape = self.variable.shape
        if value.shape == shape:
            return value
        if not self.is_here:
            return np.empty(shape, value.dtype)
        return value[tuple(slice(first, first + length) for first, length in zip(self.start, shape, strict=True))]


def read_part(folder: Directory, array: StoredArray, start: Sequence[int], shape: Sequence[int]) -> Array:
    """Return a part of an array; only the blocks that it needs are read, and checked."""
    # A scalar is an array of one row.
    target = np.empty(tuple(shape) or (1,), np.dtype(array.dtype).newbyteorder("<"))
    region = list(zip(tuple(start) or (0,), target.shape, strict=True))
    for part in array.parts:
        stored = list(zip(part.start or (0,), part.shape or (1,), strict=True))
        if (common := overlap(region, stored)) is not None:
            _fill(target, folder, part, common, [first for first, _ in region], [first for first, _ in stored])
    return target.reshape(tuple(shape)).astype(array.dtype, copy=False)


def overlap(region: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Return the intersection of two slices, each (begin, length) per axis, as (begin, end); None where empty."""
    common = [
        (max(first, begin), min(first + length, begin + extent))
        for (first, length), (begin, extent) in zip(region, other, strict=True)
    ]
    return common if all(begin < end for begin, end in common) else None


def _fill(
    target: Array,
    folder: Directory,
    part: StoredPart,
    common: Sequence[tuple[int, int]],
    start: Sequence[int],
    origin: Sequence[int],
) -> None:
    """Copy the intersection of a stored part, which begins at `origin`, and the target, at `start`."""
    beside = part.shape[1:]
    width = math.prod(beside) * target.itemsize
    (first, last), *others = common
    with folder.open(part.file) as file:
        for (begin, end), digest in zip(blocks(part.shape, target.itemsize), part.sha256, strict=True):
            low, high = max(first, origin[0] + begin), min(last, origin[0] + end)
            if low >= high:
                continue
            file.seek(part.offset + begin * width)
            content = file.read((end - begin) * width)
            if hashlib.sha256(content).hexdigest() != digest:
                raise DataError(
                    f"{folder.path}: damaged: {part.file} differs from what was written, from byte "
                    f"{part.offset + begin * width} on"
                )
            rows = np.frombuffer(content, target.dtype).reshape(end - begin, *beside)
            source = [slice(low - origin[0] - begin, high - origin[0] - begin)]
            destination = [slice(low - start[0], high - start[0])]
            for axis, (left, right) in enumerate(others, 1):
                source.append(slice(left - origin[axis], right - origin[axis]))
                destination.append(slice(left - start[axis], right - start[axis]))
            target[tuple(destination)] = rows[tuple(source)]
