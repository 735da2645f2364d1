"""Reads files that anybody may have written: nothing is allocated for an unchecked size.

A file's arrays are first listed by name, shape and dtype, then compared with the model, and only matching ones are
read. NaN and infinities in weights are loaded, so that the file of a diverged training can be inspected.
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
from dptrain.layers.low_rank import read_without_file
from dptrain.program.tensor import Variable
from dptrain.program.turns import TURNS
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.text import one_line
from dptrain.runtime.types import TYPES, is_floating, type_of

Array = npt.NDArray[Any]
# The most names listed in a message, and in a file.
_MAX_LISTED = 50
MAX_NAMES = 100_000
# Levels of a configuration: some four for each model within a model. Readers recurse, which Python bounds.
MOST_LEVELS = 100
_FLOATS = tuple(name for name, known in TYPES.items() if known.is_float and known.is_numpy)


@dataclass(frozen=True)
class Stored:
    """An array in a file, not read yet."""

    shape: tuple[int, ...]  # as the file declares it
    dtype: str  # NumPy's name, or what the file calls it
    read: Callable[[], Array]  # reads it; call it only where `shape` is the expected one
    where: str  # its place in the file


@dataclass(eq=False)
class Loaded:
    """What a file gives a model."""

    values: dict[Variable, Array] = field(default_factory=dict)  # new values of variables
    warnings: list[str] = field(default_factory=list)  # what was skipped, one line each
    # Arrays by name, of layers whose class overrides `load_own_variables`
    stores: dict[Layer, dict[str, Array]] = field(default_factory=dict)
    skip_mismatch: bool = False  # whether an error there is a warning

    def assign(self) -> None:
        """Assign the values to the variables."""
        of_layers = [variable for layer in self.stores for variable in layer._own_weights]
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
    """Return rank 0's `loaded` on every rank; `variables` and `layers` are in the same order on all. Collective."""
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
            [n for n, variable in enumerate(variables) if variable in loaded.values],
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
    for variable in (variables[n] for n in numbers):
        value = np.empty(variable.shape, variable.dtype) if loaded is None else loaded.values[variable]
        result.values[variable] = np.array(value, variable.dtype, order="C")
        comm.broadcast(result.values[variable])
    return result


def portable(array: Array) -> Array:
    """Return an array for files of weights, of its `portable_dtype`."""
    return array.astype(portable_dtype(array.dtype), copy=False)


def portable_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of an array in files of weights: float32 for bfloat16, which HDF5 and NumPy lack."""
    return type_of(dtype).portable


@contextmanager
def reading(where: str, fault: str = "damaged") -> Iterator[None]:
    """Turn any error of a parser on damaged or foreign bytes, described by `fault`, into a `DataError` at `where`."""
    try:
        yield
    except DataError as error:
        if str(error).startswith(where):
            raise
        raise DataError(f"{where}: {error}") from error
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error
    except FileNotFoundError as error:
        # The folder exists, but one of its files may not: a shard of a checkpoint.
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
        raise DataError(f"{where}: {fault} ({type(error).__name__}: {one_line(error)[:300]})") from error


@contextmanager
def opened(path: Path, magic: bytes, kind: str) -> Iterator[BinaryIO]:
    """Open a file that must begin with `magic`; messages call it a `kind`."""
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
    formats = {b"PK": "a zip archive?", b"\x89HDF": "HDF5?", b"\x1f\x8b": "gzip?", b"version": "a Git LFS pointer?"}
    name = next((what for start, what in formats.items() if first.startswith(start)), "")
    name = name or ("HTML?" if first.lstrip()[:1] == b"<" else "")
    return f" ({name})" if name else ""


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def parse_json(where: str, text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`, of bounded size; refuse anything else."""
    with reading(where):
        value = json.loads(text.decode("utf-8"))
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    _check_levels(where, value)
    return value


def _check_levels(where: str, value: Any) -> None:
    level, level_values = 0, [value]
    while containers := [inner for inner in level_values if isinstance(inner, dict | list)]:
        level += 1
        if level > MOST_LEVELS:
            raise DataError(f"{where}: a configuration nested more than {MOST_LEVELS} levels deep")
        level_values = [
            inner for outer in containers for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def fill(
    where: str, variables: Mapping[str, Variable], stored: Mapping[str, Stored], *, skip_mismatch: bool
) -> tuple[dict[Variable, Array], list[str]]:
    """Read all weights of a model; return new values and mismatches, an error without `skip_mismatch`."""
    differences: dict[str, list[str]] = {}
    for path, variable in variables.items():
        array, kinds = stored.get(path), _FLOATS if is_floating(variable.dtype) else (variable.dtype.name,)
        if array is None and variable.if_missing != "refuse":
            continue
        if array is None:
            problem = f"{path}: not in the file"
        elif array.shape != variable.shape:
            problem = f"{path}: model {variable.shape}, file {array.shape}"
        elif array.dtype not in kinds:
            problem = f"{path}: dtype {array.dtype}, expected {', '.join(kinds)}"
        else:
            continue
        differences.setdefault(_layer(path), []).append(problem)
    for path, array in stored.items():
        if path not in variables:
            differences.setdefault(_layer(path), []).append(f"{array.where}: not in the model")
    listed = [problem for problems in differences.values() for problem in problems]
    if listed and not skip_mismatch:
        raise DataError(f"{where}: the weights do not fit the model: {joined(listed)}")
    fitting = {path: variable for path, variable in variables.items() if _layer(path) not in differences}
    values: dict[Variable, Array] = {}
    for path, variable in fitting.items():
        array = stored.get(path)
        values |= read_without_file(variable) if array is None else {variable: array.read().astype(variable.dtype)}
    return values, listed


def joined(problems: Sequence[str]) -> str:
    """Return problems on one line."""
    more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
    return "; ".join(problem.replace("\n", " ") for problem in problems[:_MAX_LISTED]) + more


def _layer(name: str) -> str:
    return name.rpartition("/")[0]
