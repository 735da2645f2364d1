"""Where the elements of a tensor lie in memory, for tensors that are views of others, at any number of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dptrain.program.dims import Dim
from dptrain.program.places import FIRST_ROW, NOTHING, ONE, Extent, Place, after, along, extent, times
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


def _sum(one: Extent, other: Extent) -> Extent:
    """Return a sum; of two that grow with the rows in other ways there is none."""
    assert NOTHING in (one, other) or one[1] == other[1], "a diagonal along the rows of a batch"
    return one[0] + other[0], max(one[1], other[1])


@dataclass(frozen=True)
class Offset:
    """A number that may depend on the batch: `plain` + `rows` x the rank's rows + `first` x its first row."""

    plain: int = 0
    rows: int = 0
    first: int = 0

    def plus(self, other: "Offset", times: int = 1) -> "Offset":
        """Return the sum with a multiple of another."""
        return Offset(
            self.plain + times * other.plain, self.rows + times * other.rows, self.first + times * other.first
        )


def offset(n: int) -> Offset:
    """Return a length as it is on a rank."""
    return Offset(rows=n.scale) if isinstance(n, Dim) else Offset(int(n))


@dataclass(frozen=True)
class IndexMap:
    """The index along one axis of a root: `first` + `step` x the reader's index along `axis` (None: `first` alone)."""

    axis: int | None
    first: Offset = Offset()
    step: int = 1

    def at(self, places: Sequence[Place]) -> Place:
        """Return the place along the root's axis where these are the reader's."""
        first = self.first
        begin = after((first.plain, 0)) + after((first.rows, 1)) + along(FIRST_ROW).times((first.first, 0))
        return begin if self.axis is None else begin + places[self.axis].times((self.step, 0))


@dataclass(frozen=True, eq=False)
class View:
    """Where the elements of a tensor lie. Equal to another of the same root, told by identity, and of equal maps.

    Attributes:
        root: the tensor that has memory, contiguous in the order of its axes.
        maps: one of each axis of the root.
    """

    root: Tensor
    maps: tuple[IndexMap, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.root is other.root and self.maps == other.maps

    def __hash__(self) -> int:
        return hash((self.root, self.maps))

    def along(self, axes: Sequence[int | None]) -> "View":
        """Return it as it is read by something whose axis `axes[n]` is this tensor's axis n."""
        moved = [one if one.axis is None else IndexMap(axes[one.axis], one.first, one.step) for one in self.maps]
        return View(self.root, tuple(moved))

    def is_whole(self, shape: Shape) -> bool:
        """Whether a tensor of this shape has its root's elements in their order."""
        if space_of(self.root.shape) != space_of(shape):
            return False
        maps = [one for n, one in zip(self.root.shape, self.maps, strict=True) if not is_one(n)]
        return maps == [IndexMap(axis) for axis, n in enumerate(shape) if not is_one(n)]

    @property
    def is_single(self) -> bool:
        """Whether all elements of a tensor are one and the same."""
        return all(one.axis is None or is_one(n) for n, one in zip(self.root.shape, self.maps, strict=True))

    def strides(self, rank: int) -> list[Extent]:
        """Return how many elements of the root lie between neighbours along each of the reader's axes."""
        found = [NOTHING] * rank
        for n, index_map in enumerate(self.maps):
            if index_map.axis is not None and not is_one(self.root.shape[n]):
                own = times(extent(self.root.shape[n + 1 :]), (index_map.step, 0))
                found[index_map.axis] = _sum(found[index_map.axis], own)  # of a diagonal, of several axes
        return found

    def start(self) -> list[tuple[Offset, Extent]]:
        """Return where in the root the reader's element 0 lies, as products to be added up."""
        steps = [(index_map.first, extent(self.root.shape[n + 1 :])) for n, index_map in enumerate(self.maps)]
        return [(first, step) for first, step in steps if first != Offset()]


def identity(tensor: Tensor) -> tuple[IndexMap, ...]:
    """Return the maps of a tensor of the same elements at the same places."""
    return tuple(map(IndexMap, range(tensor.ndim)))


def whole(tensor: Tensor) -> View:
    """Return the view of a tensor that has memory of its own."""
    return View(tensor, identity(tensor))


def aligned_axes(shape: Shape, out: Shape) -> list[int | None]:
    """Return the axis of a broadcast result that each axis of an operand goes along, None for those that are spread."""
    return [None if is_one(n) else axis + len(out) - len(shape) for axis, n in enumerate(shape)]


def compose(view: View, maps: Sequence[IndexMap]) -> View:
    """Return a view of a view as one: `maps` are those of the upper one in the lower one."""
    found = []
    for one in view.maps:
        if one.axis is None:
            found.append(one)
        else:
            upper = maps[one.axis]
            found.append(IndexMap(upper.axis, one.first.plus(upper.first, one.step), one.step * upper.step))
    return View(view.root, tuple(found))


def key_maps(key: Iterable[tuple[int, int, int] | int]) -> list[IndexMap]:
    """Return the maps of the part that a key says: (start, stop, step) or a place for each axis."""
    maps, axis = [], 0
    for one in key:
        if isinstance(one, tuple):
            maps.append(IndexMap(axis, offset(one[0]), one[2]))
            axis += 1
        else:
            maps.append(IndexMap(None, offset(one)))
    return maps


def matrix(view: View, shape: Shape) -> tuple[bool, Extent] | None:
    """Return whether BLAS is to transpose a matrix (the last two axes), and the elements between its lines.

    None: neither along its rows nor along its columns the elements lie side by side.
    """
    of_rows, of_columns = view.strides(len(shape))[-2:]
    rows, columns = extent(shape[-2:-1]), extent(shape[-1:])
    if (of_columns == ONE or columns == ONE) and (of_rows != NOTHING or rows == ONE):
        return False, columns if rows == ONE else of_rows
    if (of_rows == ONE or rows == ONE) and (of_columns != NOTHING or columns == ONE):
        return True, rows if columns == ONE else of_columns
    return None
