"""Reading files that anybody may have written: nothing is allocated for a size that was not checked before.

What a file holds is first listed by name, shape and dtype, then compared with the model, and only what fits is read.
NaN and infinities in weights are loaded as they are: the file of a training that diverged can be looked into.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy.typing as npt

from dptrain.errors import ConfigError, DataError
from dptrain.params import ParamLayout
from dptrain.runtime.files import open_regular
from dptrain.runtime.text import one_line

Array = npt.NDArray[Any]
# Names that a message lists, and that a file may hold.
_MAX_LISTED = 50
MAX_NAMES = 100_000
_DTYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Stored:
    """An array in a file, not read yet.

    Attributes:
        shape: as the file declares it.
        dtype: its name in NumPy, or what the file calls it.
        read: reads it; call it only where `shape` is the expected one.
        where: its place in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Array]
    where: str


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn whatever reading a damaged or foreign file raises into a `DataError` of one line that begins with `where`.

    The libraries that parse these formats raise nearly every built-in exception on hostile bytes.
    """
    try:
        yield
    except DataError as error:
        if str(error).startswith(where):
            raise
        raise DataError(f"{where}: {error}") from error
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error
    except FileNotFoundError:
        raise DataError(f"{where}: not found") from None
    except OSError as error:
        if error.errno is not None:
            raise DataError(f"{where}: cannot be read ({error.strerror or one_line(error)})") from error
        raise DataError(f"{where}: damaged ({one_line(error)[:300]})") from error
    except Exception as error:
        raise DataError(f"{where}: damaged ({type(error).__name__}: {one_line(error)[:300]})") from error


@contextmanager
def opened(path: Path, magic: bytes, kind: str) -> Iterator[BinaryIO]:
    """Open a file that must begin with `magic`.

    Args:
        path: the file.
        magic: its first bytes.
        kind: of file, for the message ("an HDF5 file").

    Raises:
        DataError: missing, unreadable, or another kind of file.
    """
    with reading(str(path)), open_regular(path) as file:
        first = file.read(len(magic))
        if first != magic:
            raise DataError(
                f"{path}: not {kind}: first bytes {first.hex() or 'none'}{guess(first)}, expected {magic.hex()}"
            )
        file.seek(0)
        yield file


def guess(first: bytes) -> str:
    """Return what a file with these first bytes may be, for a message."""
    if first[:1] == b"\x80" and first[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return " (a pickle? pickles can run code and are never loaded)"
    known = {b"PK": "a zip archive?", b"\x89HDF": "HDF5?", b"\x1f\x8b": "gzip?", b"version": "a Git LFS pointer?"}
    found = next((what for start, what in known.items() if first.startswith(start)), "")
    found = found or ("HTML?" if first.lstrip()[:1] == b"<" else "")
    return f" ({found})" if found else ""


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def parse_json(where: str, text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`, of bounded size.

    Raises:
        DataError: it is no JSON object.
    """
    with reading(where):
        found = json.loads(text.decode("utf-8"))
    if not isinstance(found, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(found).__name__}")
    return found


def check_room(where: str, layout: ParamLayout, nbytes: int) -> None:
    """Refuse a model whose weights cannot be in a file of `nbytes`, before memory is taken for them.

    Raises:
        DataError: not even in the smallest dtype.
    """
    count = sum(math.prod(entry.shape) for entry in layout.entries)  # of Python's integers, which do not overflow
    if 2 * count > nbytes:
        raise DataError(f"{where}: the model has {count} weights, too many for a file of {nbytes} bytes")


def fill(
    where: str, layout: ParamLayout, stored: Mapping[str, Stored], flat: Array, *, skip_mismatch: bool
) -> list[str]:
    """Read all weights of a model into a flat buffer.

    Args:
        where: the file, for messages.
        layout: of the model.
        stored: what the file holds, by name in the model where it has one.
        flat: the flat parameters, overwritten where the file fits.
        skip_mismatch: leave layers that do not fit as they are in `flat`.

    Returns:
        What did not fit, empty unless `skip_mismatch`.

    Raises:
        DataError: names or shapes differ; lists every difference.
    """
    differences: dict[str, list[str]] = {}
    for entry in layout.entries:
        found = stored.get(entry.name)
        if found is None:
            problem = f"{entry.name}: not in the file"
        elif found.shape != entry.shape:
            problem = f"{entry.name}: model {entry.shape}, file {found.shape}"
        elif found.dtype not in _DTYPES:
            problem = f"{entry.name}: dtype {found.dtype}, expected {', '.join(_DTYPES)}"
        else:
            continue
        differences.setdefault(_layer(entry.name), []).append(problem)
    names = {entry.name for entry in layout.entries}
    for name, found in stored.items():
        if name not in names:
            differences.setdefault(_layer(name), []).append(f"{found.where}: not in the model")
    listed = [problem for problems in differences.values() for problem in problems]
    if listed and not skip_mismatch:
        raise DataError(f"{where}: the weights do not fit the model: {joined(listed)}")
    for entry in layout.entries:
        if _layer(entry.name) not in differences:
            entry.view(flat)[...] = stored[entry.name].read()
    return listed


def joined(problems: Sequence[str]) -> str:
    """Return problems on one line."""
    more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
    return "; ".join(problem.replace("\n", " ") for problem in problems[:_MAX_LISTED]) + more


def _layer(name: str) -> str:
    return name.rpartition("/")[0]
