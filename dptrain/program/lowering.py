"""Lowerings: the part of an op's record that tells backends what generated code computes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dptrain.program.codegen.index_expr import ZERO_INDEX, numel, offset_by
from dptrain.program.codegen.views import IndexMap, key_maps, marked
from dptrain.program.tensor import Tensor

Maps = Callable[[Tensor], Sequence[IndexMap]]


@dataclass(frozen=True)
class Element:
    """Single elements of operands that are broadcast together.

    Attributes:
        c: the element as a C++ expression: of the operands `{0}`, `{1}`, ... in the types of
            `program/codegen/cpp.py:operand_dtypes`, of attributes by name, and of `{last}`, the index along the last
            axis, which the operand then lacks. Functions are those of `kernels/scalar.h`.
        conditions: operands used as truth values; the others then have the output's type.
        exponents: operands written into the code if they are known positive integers, as compilers have shorter forms:
            `x * x`.
    """

    c: str
    conditions: tuple[int, ...] = ()
    exponents: tuple[int, ...] = ()

    @property
    def by_last(self) -> bool:
        """Whether it depends on the index along the last axis."""
        return "{last}" in self.c

    @property
    def converts(self) -> bool:
        """Whether it only converts the operand to another type."""
        return self.c == "{0}"


@dataclass(frozen=True)
class ViewMap:
    """The operand's own elements, in its memory: in order, but in another shape, unless there are `maps`.

    These give, of a result, the index along each axis of the operand as a function of the result's indices.
    """

    maps: Maps | None = None


@dataclass(frozen=True)
class Reduction:
    """Elements reduced over the attribute "axes" or "axis"; "argmax" is the index of an axis' first maximum."""

    join: Literal["sum", "max", "argmax"]


@dataclass(frozen=True)
class Product:
    """A matrix product of the last two axes; leading axes are broadcast."""


@dataclass(frozen=True)
class Gather:
    """Rows of the first operand at the indices of the second; the first `batch` axes of both are matched."""

    batch: int = 0


@dataclass(frozen=True)
class Scatter:
    """Zeros plus the first operand, added to the rows that the second operand indexes."""


@dataclass(frozen=True)
class RowChain:
    """A scatter on a GPU: "first" place of each row of the table, "next" of the same row, "sum" along these chains."""

    part: Literal["first", "next", "sum"]


@dataclass(frozen=True)
class Insert:
    """The operand within zeros, at the attribute "key"."""

    def parts(self, tensor: Tensor) -> list[tuple[IndexMap, ...]]:
        """Return, for each operand, the index of its elements along each axis of the result."""
        return [key_maps(tensor.attributes["key"])]


@dataclass(frozen=True)
class Join:
    """The operands concatenated along the attribute "axis"."""

    def parts(self, tensor: Tensor) -> list[tuple[IndexMap, ...]]:
        """Return, for each operand, the index of its elements along each axis of the result."""
        axis, start, parts = tensor.attributes["axis"], ZERO_INDEX, []
        for operand in tensor.inputs:
            parts.append(tuple(IndexMap(n, start if n == axis else ZERO_INDEX) for n in range(tensor.ndim)))
            start += offset_by(numel(operand.shape[axis : axis + 1]))
        return parts


@dataclass(frozen=True)
class RandomBits:
    """Philox bits of shape (rows, features), by the attributes "seed", "purpose", "number" and a count of draws."""


@dataclass(frozen=True)
class Windows:
    """Selections or sums over windows of images, by the function of `kernels/` of the op's name.

    `image`, `places` and `kernel` are numbers of operands, or -1 for the result: with the images' shape, an element for
    each place of the window, and for each position within, else of the shape in the attribute "window".
    """

    image: int
    places: int
    kernel: int | None = None

    def shapes(self, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of images, places and kernel, () if there is none."""
        shapes = [*(operand.shape for operand in tensor.inputs), tensor.shape]
        return shapes[self.image], shapes[self.places], () if self.kernel is None else shapes[self.kernel]

    def numbers(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the fields of a window: H, W, P, Q, R, S, strides, dilation, zeros before rows and columns."""
        image, places, kernel = self.shapes(tensor)
        attributes = tensor.attributes
        size = kernel[:2] or attributes["window"]
        fields = (
            *image[1:3],
            *places[1:3],
            *size,
            *attributes["strides"],
            *attributes.get("dilation", (1, 1)),
            *attributes["before"],
        )
        return tuple(map(int, fields))


@dataclass(frozen=True)
class ConvolutionLowering(Windows):
    """Sums of products over windows of images: a matrix product whose first factor is not stored.

    With images (B, H, W, I), places (B, P, Q, O) and a kernel (R, S, I, O), by the result:

    | makes | result | first factor | second factor |
    |---|---|---|---|
    | places | BPQ x O | the images' patches, BPQ x RSI | the kernel, RSI x O |
    | kernel | RSI x O | the same, transposed | the places, BPQ x O |
    | images | BHW x I | the places' patches, BHW x RSO | the kernel, RSO x I |

    In the last, a pixel (h, w) meets r only if its place (h + before - r dilation) / stride is an integer. That depends
    on its *phase*, h and w modulo the strides: there is a product for each phase.
    """

    def shapes(self, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of images, places and kernel, the kernel's axes ordered by "kernel_axes"."""
        images, places, kernel = super().shapes(tensor)
        axes = tensor.attributes.get("kernel_axes", range(4))
        return images, places, tuple(kernel[axes.index(axis)] for axis in range(4))

    @property
    def makes(self) -> Literal["images", "places", "kernel"]:
        """Which of the three is the result."""
        return "images" if self.image == -1 else "places" if self.places == -1 else "kernel"


@dataclass(frozen=True)
class UserKernel:
    """Output number `output` of a user's kernel (a `backend.custom.OwnKernel`); on a CPU its NumPy function's."""

    kernel: Any
    output: int


@dataclass(frozen=True, eq=False)
class LoopLowering:
    """The steps of a body in order; see `program/body.py`.

    `steps` writes them as ops instead, given a node, other inputs and the numbers of the values that are read; it
    returns an entry for each value. None for a loop of unknown length.
    """

    steps: Callable[[Any, Sequence[Tensor], Collection[int]], tuple[Tensor, ...]] | None


Forward = Callable[[Sequence[Tensor], Mapping[str, Any]], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class AttentionLowering:
    """Attention without the matrix of scores, by a kernel of the CPU; `gradient`: its values are three gradients.

    From inputs and attributes, `composed` computes the same by other ops; `on_gpu` by nodes of `AttentionKernel`, given
    also `forward`, which returns those of the output.
    """

    composed: Forward
    gradient: bool
    forward: Forward
    on_gpu: Callable[[Sequence[Tensor], Mapping[str, Any], Forward], tuple[Tensor, ...]]


@dataclass(frozen=True)
class AttentionKernel:
    """Attention on a GPU: the "output" and sums of powers, or gradients in "queries", or in "keys" and values."""

    makes: Literal["output", "queries", "keys"]


@dataclass(frozen=True)
class HostCall:
    """The NumPy function alone, such as LAPACK's: on a GPU between two copies, for which its stream waits."""


# Lowerings that read operands in their own order, and so need them stored whole.
WHOLE = Scatter, RowChain, Windows, AttentionLowering, AttentionKernel

Lowering = (
    Element
    | ViewMap
    | Reduction
    | Product
    | Gather
    | Scatter
    | RowChain
    | Insert
    | Join
    | RandomBits
    | Windows
    | ConvolutionLowering
    | UserKernel
    | LoopLowering
    | AttentionLowering
    | AttentionKernel
    | HostCall
)


def lowering_of(tensor: Tensor) -> Lowering | None:
    """Return a tensor's lowering; None for leaves and ops without one."""
    return None if tensor.op is None else tensor.op.lowering


def axes_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the view's axis for each axis of its operand, if it shows all elements; None for other tensors."""
    view_map = lowering_of(tensor)
    if not isinstance(view_map, ViewMap) or view_map.maps is None:
        return None
    maps, lengths = view_map.maps(tensor), tensor.inputs[0].shape
    axes = tuple(
        index_map.axis for index_map in maps if index_map == IndexMap(index_map.axis) and index_map.axis is not None
    )
    if len(set(axes)) < max(tensor.ndim, len(lengths)) or marked(tensor.shape[axis] for axis in axes) != marked(
        lengths
    ):
        return None
    return axes


def is_same(tensor: Tensor) -> bool:
    """Whether a tensor is a view of all elements of its operand, unchanged."""
    return axes_of(tensor) == tuple(range(tensor.ndim))


def in_order(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory holds a tensor's elements in order."""
    while tensor.op is not None and tensor.op.is_view and (is_same(tensor) or lowering_of(tensor) == ViewMap()):
        tensor = tensor.inputs[0]
    return tensor
