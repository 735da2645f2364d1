"""Reading files that anybody may have written: nothing is allocated for a size that was not checked before.

What a file holds is first listed by name, shape and dtype, then compared with the model, and only what fits is read.
NaN and infinities in weights are loaded as they are: the file of a training that diverged can be looked into.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dptrain.comm import Communicator
from dptrain.errors import ConfigError, DataError
from dptrain.layers import Layer
from dptrain.program.tensor import BFLOAT16, Variable
from dptrain.program.turns import TURNS
from dptrain.runtime.files import open_regular
from dptrain.runtime.text import one_line

Array = npt.NDArray[Any]
# Names that a message lists, and that a file may hold.
_MAX_LISTED = 50
MAX_NAMES = 100_000
_FLOATS = ("float16", "float32", "float64")


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


@dataclass(eq=False)
class Loaded:
    """What a file says.

    Attributes:
        values: new ones of variables.
        warnings: what was left out, one line each.
        stores: arrays by name of layers that load them by a `load_own_variables` of the user's.
        skip_mismatch: whether an error there is a warning.
    """

    values: dict[Variable, Array] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stores: dict[Layer, dict[str, Array]] = field(default_factory=dict)
    skip_mismatch: bool = False

    def assign(self) -> None:
        """Give the variables their values."""
        of_layers = [variable for layer in self.stores for variable in layer._own]
        with TURNS.of(writes=frozenset([*self.values, *of_layers])):
            for variable, value in self.values.items():
                variable.assign(value)
            for layer, store in self.stores.items():
                try:
                    layer.load_own_variables(store)
                except Exception as error:
                    if not self.skip_mismatch:
                        raise
                    self.warnings.append(f"skipped layer {layer._display_name!r}: {one_line(error)}")


def share(
    comm: Communicator, loaded: Loaded | None, variables: Sequence[Variable], layers: Sequence[Layer] = ()
) -> Loaded:
    """Return rank 0's `loaded` on every rank. Collective.

    Args:
        comm: the ranks.
        loaded: on rank 0; None elsewhere.
        variables: all that it may be about, in the same order on all ranks.
        layers: likewise, those with stores.
    """
    fact = None
    if loaded is not None:
        if comm.size == 1:
            return loaded
        stores = [
            [number, {name: [array.dtype.str, array.shape] for name, array in loaded.stores[layer].items()}]
            for number, layer in enumerate(layers)
            if layer in loaded.stores
        ]
        fact = [
            [n for n, one in enumerate(variables) if one in loaded.values],
            loaded.warnings,
            stores,
            loaded.skip_mismatch,
        ]
    numbers, warnings, stores, skip_mismatch = comm.broadcast_fact(fact)
    result = Loaded({}, warnings, {}, skip_mismatch)
    for number, arrays in stores:
        result.stores[layers[number]] = store = {}
        for name, (dtype, shape) in arrays.items():
            store[name] = np.empty(shape, dtype) if loaded is None else loaded.stores[layers[number]][name].copy()
            comm.broadcast(store[name].reshape(-1).view(np.uint8))
    for one in (variables[n] for n in numbers):
        own = np.empty(one.shape, one.dtype) if loaded is None else loaded.values[one]
        result.values[one] = np.array(own, one.dtype, order="C")
        comm.broadcast(result.values[one])
    return result


def portable(array: Array) -> Array:
    """Return an array as files of weights have it, of its `portable_dtype`."""
    return array.astype(portable_dtype(array.dtype), copy=False)


def portable_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of an array in files of weights: bfloat16, of which HDF5 and NumPy know nothing, is float32."""
    return np.dtype(np.float32) if dtype == BFLOAT16 else dtype


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
    except FileNotFoundError as error:
        # In a folder that is there, one of its files may be what is not: a shard of a checkpoint.
        within = isinstance(error.filename, str) and Path(error.filename).name != Path(where).name
        missing = within and os.path.isdir(where)
        raise DataError(
            f"{where}: damaged: {Path(error.filename).name} is missing" if missing else f"{where}: not found"
        ) from None
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


def fill(
    where: str, variables: Mapping[str, Variable], stored: Mapping[str, Stored], *, skip_mismatch: bool
) -> tuple[dict[Variable, Array], list[str]]:
    """Read all weights of a model.

    Args:
        where: the file, for messages.
        variables: the weights by path.
        stored: what the file holds, by path in the model where it has one.
        skip_mismatch: leave layers that do not fit as they are.

    Returns:
        The new values, and what did not fit, which is nothing unless `skip_mismatch`.

    Raises:
        DataError: names or shapes differ; lists every difference.
    """
    differences: dict[str, list[str]] = {}
    for path, one in variables.items():
        found, kinds = stored.get(path), _FLOATS if one.dtype.kind in "fV" else (one.dtype.name,)
        if found is None:
            problem = f"{path}: not in the file"
        elif found.shape != one.shape:
            problem = f"{path}: model {one.shape}, file {found.shape}"
        elif found.dtype not in kinds:
            problem = f"{path}: dtype {found.dtype}, expected {', '.join(kinds)}"
        else:
            continue
        differences.setdefault(_layer(path), []).append(problem)
    for path, found in stored.items():
        if path not in variables:
            differences.setdefault(_layer(path), []).append(f"{found.where}: not in the model")
    listed = [problem for problems in differences.values() for problem in problems]
    if listed and not skip_mismatch:
        raise DataError(f"{where}: the weights do not fit the model: {joined(listed)}")
    fitting = {path: one for path, one in variables.items() if _layer(path) not in differences}
    return {one: stored[path].read().astype(one.dtype) for path, one in fitting.items()}, listed


def joined(problems: Sequence[str]) -> str:
    """Return problems on one line."""
    more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
    return "; ".join(problem.replace("\n", " ") for problem in problems[:_MAX_LISTED]) + more


def _layer(name: str) -> str:
    return name.rpartition("/")[0]
