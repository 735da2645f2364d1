"""Shares raw data among a node's ranks, and holds out its test part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.data.holdout import split_rows
from dptrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dptrain.data.lazy import LazyArray

Array = npt.NDArray[Any]


# Files that are about a folder of samples, by their endings and by the beginnings of their names.
_ABOUT_ENDINGS = (".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".xml", ".yaml", ".yml", ".html", ".pdf", ".log")
_ABOUT_NAMES = ("readme", "license", "licence", "notice", "citation", "changelog")


def is_readme(path: Path) -> bool:
    """Whether a file, such as README.txt, tells of the samples beside it."""
    return path.name.lower().startswith(_ABOUT_NAMES) and not path.is_dir()


def is_about(path: Path, samples: str = "/") -> bool:
    """Whether a file next to class folders tells of them, such as labels.csv; `samples` is the ending of samples."""
    name = path.name.lower()
    is_note = name.endswith(_ABOUT_ENDINGS) and not name.endswith(samples) and not path.is_dir()
    return is_note or is_readme(path)


@dataclass(frozen=True)
class RawSamples:
    """Raw samples as a model's arrays."""

    x: "Array | LazyArray"  # (rows, *sample_shape); pictures are decoded on demand
    y: Array | None  # (rows,) targets; None where there are none
    files: Sequence[str] = ()  # pictures' file names, in the order of the rows
    notes: Sequence[str] = ()  # what was skipped, for people


def share(comm: Communicator, make: Callable[[], list[Array]]) -> list[Array]:
    """Return the arrays that one rank of a node makes, in memory shared by its ranks. Collective."""
    local = comm.agree("data", lambda: make() if comm.local_rank == 0 else None)
    headers = comm.broadcast_fact(None if local is None else [[list(array.shape), str(array.dtype)] for array in local])

    def fill(arrays: list[tuple[Array, bool]]) -> None:
        if not any(is_mine for _, is_mine in arrays):
            return
        for (array, is_mine), source in zip(arrays, make() if local is None else local, strict=True):
            if array.shape != source.shape:
                raise DataError(f"arrays of {source.shape} here and {array.shape} on rank 0; is the path shared?")
            if is_mine:
                array[...] = source

    shared = [comm.shared_array(tuple(shape), dtype) for shape, dtype in headers]
    comm.agree("data", lambda: fill(shared))
    comm.node_barrier()
    return [array for array, _ in shared]


def require_part(count: int, fraction: float, advice: str) -> str:
    """Return a note on how many samples are held out as the test part; refuse a part of none or all."""
    held_out = round(count * fraction)
    if not 0 < held_out < count:
        raise ConfigError(f"data.test_split = {fraction} holds out {held_out} of {count} samples; {advice}")
    return f"{held_out:,} of {count:,} samples are held out as the test part; {advice}"


def cut_off(x: Array, y: Array, fraction: float) -> list[Array]:
    """Return x_train, y_train, x_test and y_test as `split_rows` draws them."""
    rows, test_rows = split_rows(y, fraction)
    return [x[rows], y[rows], x[test_rows], y[test_rows]]
