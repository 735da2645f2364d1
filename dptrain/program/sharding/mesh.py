"""Placements of tensors on a mesh (ranks as a grid with named axes), and the ops that change them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from dptrain.comm.mesh import BATCH as BATCH
from dptrain.program.codegen.index_expr import FIRST_ROW, ZERO_INDEX, symbol
from dptrain.program.codegen.views import IndexMap, identity
from dptrain.program.dims import Dim
from dptrain.program.lowering import ViewMap
from dptrain.program.op import Op
from dptrain.program.program import Program
from dptrain.program.shapes import Shape
from dptrain.program.tensor import Array, Tensor, Variable

# For each axis of a tensor the axis of the mesh that shards it, or None.
Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies: for each of its axes the mesh axis that shards it, or None.

    Over the mesh axes in `partial` each rank has a summand, or a candidate for the maximum, which `join` reduces.
    """

    axes: Axes = ()
    partial: tuple[str, ...] = ()
    join: Literal["sum", "max"] = "sum"

    def axis(self, mesh: str) -> int | None:
        """Return the axis of the tensor that an axis of the mesh shards, or None."""
        return self.axes.index(mesh) if mesh in self.axes else None

    def without(self, mesh: str) -> "Placement":
        """Return the placement after replication over an axis of the mesh."""
        partial = tuple(axis for axis in self.partial if axis != mesh)
        axes = tuple(None if axis == mesh else axis for axis in self.axes)
        return Placement(axes, partial, self.join if partial else "sum")

    def sharded(self, axis: int, mesh: str) -> "Placement":
        """Return the placement after sharding an axis over an axis of the mesh."""
        return replace(self, axes=(*self.axes[:axis], mesh, *self.axes[axis + 1 :]))

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the whole value."""
        return not self.partial and not any(self.axes)

    def __str__(self) -> str:
        sharded = [(f"sharded {axis}", mesh) for axis, mesh in enumerate(self.axes) if mesh is not None]
        partial = [("partial" if self.join == "sum" else f"partial {self.join}", mesh) for mesh in self.partial]
        descriptions = [words if mesh == BATCH else f"{words} over {mesh}" for words, mesh in (*sharded, *partial)]
        return ", ".join(descriptions) or "replicated"


def _keep_shape(shape: Shape, **attributes: Any) -> Shape:
    return shape


def _keep_dtype(dtype: np.dtype[Any], **attributes: Any) -> np.dtype[Any]:
    return dtype


def _not_placed(*arguments: Any) -> str:
    raise AssertionError("ops of a placed program are not placed again")


def _on_one_rank(x: Any, **attributes: Any) -> Any:
    return x


def _own_maps(part: Tensor) -> list[IndexMap]:
    axis, length = part.attributes["axis"], part.shape[part.attributes["axis"]]
    scale = length.scale if isinstance(length, Dim) else 0
    return [IndexMap(n, symbol(FIRST_ROW).times((scale, 0)) if n == axis else ZERO_INDEX) for n in range(part.ndim)]


def _node(name: str, lowering: ViewMap | None = None) -> Op:
    op = Op(_on_one_rank, _keep_shape, _not_placed, _keep_dtype, lowering=lowering)
    op.name = name
    return op


# Ops that placement adds. Attributes: "mesh" is the axis of the mesh, "axis" that of the tensor, "over" the reduction.
# Shapes are those of the whole tensor, until `local.localized` makes them a rank's.
ALL_REDUCE = _node("all_reduce")
OWN_PART = _node("own_part", ViewMap(_own_maps))
ALL_ROWS = _node("all_rows", ViewMap(identity))  # of a rank that has no others: the length becomes a number
ALL_GATHER = _node("all_gather")
REDUCE_SCATTER = _node("reduce_scatter")


@dataclass(frozen=True, eq=False)
class PlacedProgram(Program):
    """A program for one of several ranks.

    `summed`: variables of which each rank has a summand; `bucket_bytes`: limit of sums in one message, None for no
    limit; `layouts`: placements of variables that are not replicated.
    """

    placements: Mapping[Tensor, Placement] = field(default_factory=dict)
    summed: frozenset[Variable] = frozenset()
    bucket_bytes: int | None = None
    layouts: Mapping[Variable, Placement] = field(default_factory=dict)


def own_part(tensor: Tensor, array: Array, rows: int | None, first_row: int) -> Array:
    """Return the view of the rank's rows, the NumPy function of `OWN_PART`."""
    axis, length = tensor.attributes["axis"], tensor.shape[tensor.attributes["axis"]]
    if rows is None:
        return array
    assert isinstance(length, Dim)
    rows_of_rank = slice(first_row * length.scale, (first_row + rows) * length.scale)
    view: Array = array[(slice(None),) * axis + (rows_of_rank,)]
    return view


def constant_of(tensor: Tensor, rows: int, batch_rows: int) -> Array:
    """Return a constant's value on a rank: of a count of rows the batch's, or the rank's own summand."""
    if not tensor.counts_rows:
        return tensor.numpy()
    counted = rows if tensor.attributes.get("own") else batch_rows
    return np.full(tensor.shape, counted * tensor.attributes["rows"], tensor.dtype)
