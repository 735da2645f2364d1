"""Raw data as a data set: what is read once a node and shared by its ranks, and what is held out as the test part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.data.holdout import split_rows
from dptrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dptrain.data.lazy import LazyArray

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RawSamples:
    """Raw samples as a model's arrays.

    Attributes:
        x: (rows, *sample_shape); pictures are decoded when they are needed.
        y: (rows,) targets; None where there are none.
        files: of pictures, in the order of the rows, as they are called in their folder.
        notes: what was left out, a line each, for people.
    """

    x: "Array | LazyArray"
    y: Array | None
    files: Sequence[str] = ()
    notes: Sequence[str] = ()


def share(comm: Communicator, make: Callable[[], list[Array]]) -> list[Array]:
    """Return arrays that one rank of a node makes, in memory that its ranks share. Collective.

    Args:
        comm: the ranks.
        make: returns them; called on the first rank of each node, and on others where no memory can be shared.

    Raises:
        AgreedError: on every rank, whatever `make` raised on any; or nodes whose arrays differ in shape.
    """
    made = comm.agree("data", lambda: make() if comm.local_rank == 0 else None)
    headers = comm.broadcast_fact(None if made is None else [[list(one.shape), str(one.dtype)] for one in made])

    def fill(arrays: list[tuple[Array, bool]]) -> None:
        if not any(is_mine for _, is_mine in arrays):
            return
        for (array, is_mine), one in zip(arrays, make() if made is None else made, strict=True):
            if array.shape != one.shape:
                raise DataError(f"arrays of {one.shape} here and {array.shape} on rank 0; is the path shared?")
            if is_mine:
                array[...] = one

    shared = [comm.shared_array(tuple(shape), dtype) for shape, dtype in headers]
    comm.agree("data", lambda: fill(shared))
    comm.node_barrier()
    return [array for array, _ in shared]


def require_part(count: int, fraction: float, advice: str) -> str:
    """Return a line about the part of the samples that is held out as the test part.

    Raises:
        ConfigError: it would be none of them, or all.
    """
    held = round(count * fraction)
    if not 0 < held < count:
        raise ConfigError(f"data.test_split = {fraction}: of {count} samples it holds out {held}; {advice}")
    return f"{held:,} of {count:,} samples are held out as the test part; {advice}"


def cut_off(x: Array, y: Array, fraction: float) -> list[Array]:
    """Return x and y of the training part, x and y of the test part, which is drawn as `split_rows` does."""
    rows, held = split_rows(y, fraction)
    return [x[rows], y[rows], x[held], y[held]]
