"""Where the elements of a tensor lie in memory, for tensors that are views of others, at any number of rows."""

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
    """Return a shape such that lengths that count rows equal only others that do."""
    return tuple((n.scale, True) if isinstance(n, Dim) else (int(n), False) for n in shape)


def space_of(shape: Iterable[int]) -> Key:
    """Return a shape as `marked`, without lengths of 1."""
    return marked(n for n in shape if not is_one(n))


@dataclass(frozen=True)
class IndexMap:
    """The index along one axis of a root: `first` + `step` x the reader's index along `axis` (None: `first` alone)."""

    axis: int | None
    first: IndexExpr = ZERO_INDEX
    step: int = 1

    def at(self, places: Sequence[IndexExpr]) -> IndexExpr:
        """Return the place along the root's axis where these are the reader's."""
        return self.first if self.axis is None else self.first + places[self.axis].times((self.step, 0))


@dataclass(frozen=True, eq=False)
class View:
    """Where the elements of a tensor lie. Equal to another of the same root, told by identity, and of an equal place.

    Attributes:
        root: the tensor that has memory, contiguous in the order of its axes.
        place: in that memory, of the element at the reader's indices, which are numbered axes.
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
        """Return it as it is read by something whose axis `axes[n]` is this tensor's axis n."""
        return View(self.root, self.place.at([ZERO_INDEX if one is None else _axis(one) for one in axes]))

    def is_whole(self, shape: Shape) -> bool:
        """Whether a tensor of this shape has its root's elements in their order."""
        return space_of(self.root.shape) == space_of(shape) and self.place == _identity(shape)

    @cached_property
    def is_single(self) -> bool:
        """Whether all elements of a tensor are one and the same."""
        return not any(_number_of(index) is not None for index, _ in self.place.terms)

    def strides(self, rank: int) -> list[Numel]:
        """Return how many elements of the root lie between neighbours along each of the reader's axes."""
        found = [NOTHING] * rank
        for (index, power), count in self.place.terms.items():
            if (axis := _number_of(index)) is not None:
                assert found[axis] == NOTHING, "a diagonal along the rows of a batch"
                found[axis] = count, power
        return found

    @property
    def start(self) -> IndexExpr:
        """Where in the root the reader's element 0 lies."""
        return IndexExpr({key: count for key, count in self.place.terms.items() if _number_of(key[0]) is None})


@cache
def _axis(number: int) -> IndexExpr:
    return symbol(Axis(number))


def _number_of(index: Index) -> int | None:
    """Return the number of a reader's axis, None for other indices."""
    return index.name if isinstance(index, Axis) and isinstance(index.name, int) else None


def _identity(shape: Shape) -> IndexExpr:
    return ravel([ZERO_INDEX if is_one(n) else _axis(axis) for axis, n in enumerate(shape)], shape)


def part_of(root: Tensor, maps: Iterable[IndexMap], rank: int) -> View:
    """Return the view of a root of so many axes, whose indices along the root's axes are these."""
    axes = [_axis(axis) for axis in range(rank)]
    places = [ZERO_INDEX if is_one(n) else one.at(axes) for n, one in zip(root.shape, maps, strict=True)]
    return View(root, ravel(places, root.shape))


def identity(tensor: Tensor) -> tuple[IndexMap, ...]:
    """Return the maps of a tensor of the same elements at the same places."""
    return tuple(map(IndexMap, range(tensor.ndim)))


def whole(tensor: Tensor) -> View:
    """Return the view of a tensor that has memory of its own."""
    return View(tensor, _identity(tensor.shape))


def aligned_axes(shape: Shape, out: Shape) -> list[int | None]:
    """Return the axis of a broadcast result that each axis of an operand goes along, None for those that are spread."""
    return [None if is_one(n) else axis + len(out) - len(shape) for axis, n in enumerate(shape)]


def compose(view: View, maps: Iterable[IndexMap], rank: int) -> View:
    """Return a view of a view as one: `maps` are those of the upper one, of so many axes, in the lower one."""
    axes = [_axis(axis) for axis in range(rank)]
    return View(view.root, view.place.at([one.at(axes) for one in maps]))


def key_maps(key: Iterable[tuple[int, int, int] | int]) -> list[IndexMap]:
    """Return the maps of the part that a key says: (start, stop, step) or a place for each axis."""
    maps, axis = [], 0
    for one in key:
        if isinstance(one, tuple):
            maps.append(IndexMap(axis, offset_by(numel(one[:1])), one[2]))
            axis += 1
        else:
            maps.append(IndexMap(None, offset_by(numel((one,)))))
    return maps


def matrix(view: View, shape: Shape) -> tuple[bool, Numel] | None:
    """Return whether BLAS is to transpose a matrix (the last two axes), and the elements between its lines.

    None: neither along its rows nor along its columns the elements lie side by side.
    """
    of_rows, of_columns = view.strides(len(shape))[-2:]
    rows, columns = numel(shape[-2:-1]), numel(shape[-1:])
    if (of_columns == ONE or columns == ONE) and (of_rows != NOTHING or rows == ONE):
        return False, columns if rows == ONE else of_rows
    if (of_rows == ONE or rows == ONE) and (of_columns != NOTHING or columns == ONE):
        return True, rows if columns == ONE else of_columns
    return None
