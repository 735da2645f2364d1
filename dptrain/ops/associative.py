"""Scan with an associative function in log2(length) rounds."""

from collections.abc import Callable, Sequence
from typing import Any

from dptrain import tree
from dptrain.errors import ConfigError
from dptrain.ops.arrays import flip
from dptrain.ops.branches import check_structure
from dptrain.ops.manipulation import concatenate, reshape, stack
from dptrain.ops.open_shapes import for_open_shapes
from dptrain.program.shapes import normalized_axes, without_rows
from dptrain.program.tensor import Tensor, as_tensors


@for_open_shapes
def associative_scan(f: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Return the cumulative results, nested like `elems`, of an associative function along an axis.

    Args:
        f: combines two structures like `elems`; f(a, f(b, c)) = f(f(a, b), c).
        elems: tensors or arrays of one length along the axis, nested in any way.
        reverse: accumulate from the end.
        axis: of the elements.

    Source: G. Blelloch, "Prefix sums and their applications", 1990.
    """
    if not callable(f):
        raise ConfigError("`f` should be a callable.")
    leaves = as_tensors(tree.flatten(elems))
    places = [normalized_axes(axis, leaf.ndim)[0] for leaf in leaves]
    if len({int(leaf.shape[place]) for leaf, place in zip(leaves, places, strict=True)}) != 1:
        raise ConfigError("Array inputs to associative_scan must have the same first dimension.")

    def turned(parts: Sequence[Tensor]) -> list[Tensor]:
        return [flip(part, place) for part, place in zip(parts, places, strict=True)] if reverse else list(parts)

    def join(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
        joined = f(tree.pack_sequence_as(elems, list(a)), tree.pack_sequence_as(elems, list(b)))
        check_structure("associative_scan: f must keep the structure of elems", elems, joined)
        results = list(as_tensors(tree.flatten(joined)))
        for before, after in zip(a, results, strict=True):
            if before.shape != after.shape:
                shapes = f"from {without_rows(before.shape)} to {without_rows(after.shape)}"
                raise ConfigError(f"associative_scan: f changes the shape of its elements {shapes}")
        return results

    return tree.pack_sequence_as(elems, turned(_scanned(join, turned(leaves), places)))


def _scanned(join: Callable[..., list[Tensor]], parts: list[Tensor], places: list[int]) -> list[Tensor]:
    length = int(parts[0].shape[places[0]])
    if length < 2:
        return parts

    def cut(of: Sequence[Tensor], start: int, stop: int | None = None, step: int = 1) -> list[Tensor]:
        return [
            leaf[(slice(None),) * place + (slice(start, stop, step),)] for leaf, place in zip(of, places, strict=True)
        ]

    odd = _scanned(join, join(cut(parts, 0, length - 1, 2), cut(parts, 1, length, 2)), places)
    first = cut(parts, 0, 1)
    if length < 3:
        even = first
    else:
        before = cut(odd, 0, (length - 1) // 2)
        even = [
            concatenate([a, b], place)
            for a, b, place in zip(first, join(before, cut(parts, 2, length, 2)), places, strict=True)
        ]
    return [_interleaved(a, b, place) for a, b, place in zip(even, odd, places, strict=True)]


def _interleaved(even: Tensor, odd: Tensor, axis: int) -> Tensor:
    """Interleave along an axis; there may be one more even element."""
    count = int(odd.shape[axis])
    lead = (slice(None),) * axis
    pairs = stack([even[(*lead, slice(0, count))], odd], axis + 1)
    interleaved = reshape(pairs, (*even.shape[:axis], 2 * count, *even.shape[axis + 1 :]))
    return (
        interleaved
        if int(even.shape[axis]) == count
        else concatenate([interleaved, even[(*lead, slice(count, None))]], axis)
    )
