"""Views: where the elements of a tensor lie in another tensor's memory, at any number of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from dptrain.program.codegen.index_expr import (
    NOTHING,
    ONE,
    ZERO_INDEX,
    Axis,
    Index,
    IndexExpr,
    Numel,
    numel,
    offset_by,
    ravel,
    symbol,
)
from dptrain.program.dims import Dim
from dptrain.program.shapes import Shape, is_one
from dptrain.program.tensor import Tensor

# Lengths, and whether they count rows.
Key = tuple[tuple[int, bool], ...]


def marked(shape: Iterable[int]) -> Key:
    """Return a shape as a key in which row counts equal only row counts."""
    return tuple((n.scale, True) if isinstance(n, Dim) else (int(n), False) for n in shape)


def space_of(shape: Iterable[int]) -> Key:
    """Return the `marked` shape without lengths of 1."""
    return marked(n for n in shape if not is_one(n))


@dataclass(frozen=True)
class IndexMap:
    """Index along one axis of a root: `first` + `step` x the reader's index along `axis` (None: `first` alone)."""

    axis: int | None
    first: IndexExpr = ZERO_INDEX
    step: int = 1

    def at(self, places: Sequence[IndexExpr]) -> IndexExpr:
        """Apply to the reader's indices."""
        return self.first if self.axis is None else self.first + places[self.axis].times((self.step, 0))


@dataclass(frozen=True, eq=False)
class View:
    """A tensor's elements in memory. Equal if the roots are identical and the index expressions equal.

    Attributes:
        root: the contiguous tensor that owns the memory.
        place: flat index in it of the element at the reader's indices, which are numbered axes.
    """

    root: Tensor
    place: IndexExpr

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.root is other.root and self.place == other.place

    @cached_property
    def _hash(self) -> int:
        return hash((id(self.root), self.place))

    def __hash__(self) -> int:
        return self._hash

    def along(self, axes: Sequence[int | None]) -> "View":
        """Return the view for a reader whose axis `axes[n]` is this tensor's axis n."""
        return View(self.root, self.place.at([ZERO_INDEX if axis is None else _axis(axis) for axis in axes]))

    def is_whole(self, shape: Shape) -> bool:
        """Whether a tensor of this shape is its whole root, in order."""
        return space_of(self.root.shape) == space_of(shape) and self.place == _identity(shape)

    @cached_property
    def is_single(self) -> bool:
        """Whether all elements are one element of the root."""
        return not any(_number_of(index) is not None for index, _ in self.place.terms)

    def strides(self, rank: int) -> list[Numel]:
        """Return the stride in the root along each of the reader's axes."""
        strides = [NOTHING] * rank
        for (index, power), count in self.place.terms.items():
            if (axis := _number_of(index)) is not None:
                assert strides[axis] == NOTHING, "a diagonal along the rows of a batch"
                strides[axis] = count, power
        return strides

    @property
    def start(self) -> IndexExpr:
        """Flat index of the reader's element 0."""
        return IndexExpr({key: count for key, count in self.place.terms.items() if _number_of(key[0]) is None})


@cache
def _axis(number: int) -> IndexExpr:
    return symbol(Axis(number))


def _number_of(index: Index) -> int | None:
    return index.name if isinstance(index, Axis) and isinstance(index.name, int) else None


def _identity(shape: Shape) -> IndexExpr:
    return ravel([ZERO_INDEX if is_one(n) else _axis(axis) for axis, n in enumerate(shape)], shape)


def part_of(root: Tensor, maps: Iterable[IndexMap], rank: int) -> View:
    """Return the view of a root by a reader of so many axes, given the index along each of the root's axes."""
    axes = [_axis(axis) for axis in range(rank)]
    places = [ZERO_INDEX if is_one(n) else index_map.at(axes) for n, index_map in zip(root.shape, maps, strict=True)]
    return View(root, ravel(places, root.shape))


def identity(tensor: Tensor) -> tuple[IndexMap, ...]:
    """Return maps that change nothing."""
    return tuple(map(IndexMap, range(tensor.ndim)))


def whole(tensor: Tensor) -> View:
    """Return the view of a tensor that owns its memory."""
    return View(tensor, _identity(tensor.shape))


def aligned_axes(shape: Shape, out: Shape) -> list[int | None]:
    """Return the axis of a broadcast result for each axis of an operand, None for those of length 1."""
    return [None if is_one(n) else axis + len(out) - len(shape) for axis, n in enumerate(shape)]


def compose(view: View, maps: Iterable[IndexMap], rank: int) -> View:
    """Return a view of a view as one; `maps` take a reader of `rank` axes to the lower view."""
    axes = [_axis(axis) for axis in range(rank)]
    return View(view.root, view.place.at([index_map.at(axes) for index_map in maps]))


def key_maps(key: Iterable[tuple[int, int, int] | int]) -> tuple[IndexMap, ...]:
    """Return the maps of a key: (start, stop, step) or an index for each axis."""
    maps, axis = [], 0
    for part in key:
        if isinstance(part, tuple):
            maps.append(IndexMap(axis, offset_by(numel(part[:1])), part[2]))
            axis += 1
        else:
            maps.append(IndexMap(None, offset_by(numel((part,)))))
    return tuple(maps)


def matrix(view: View, shape: Shape) -> tuple[bool, Numel] | None:
    """Return whether BLAS must transpose the last two axes, and the leading dimension; None if it cannot."""
    of_rows, of_columns = view.strides(len(shape))[-2:]
    rows, columns = numel(shape[-2:-1]), numel(shape[-1:])
    if NOTHING in (rows, columns):
        return False, ONE
    if (of_columns == ONE or columns == ONE) and (of_rows != NOTHING or rows == ONE):
        return False, columns if rows == ONE else of_rows
    if (of_rows == ONE or rows == ONE) and (of_columns != NOTHING or columns == ONE):
        return True, rows if columns == ONE else of_columns
    return None
