"""Parquet shards: a child process turns each into plain Arrow on disk, once a node; ranks map that and take rows of it.

A child reads what strangers wrote, because a file may abort the library or fill the memory.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.data.shards.formats import (
    Array,
    DamagedCopyError,
    Extent,
    Indices,
    ReadOptions,
    ShardFormat,
    ShardReader,
)
from dptrain.data.shards.stores import Store, StoredFile
from dptrain.data.sources import format_bytes
from dptrain.data.tabular.parquet import CHILD, child_end
from dptrain.data.texts import object_array, text_array
from dptrain.errors import ConfigError, DataError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.programs import run_program
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.text import one_line, short

# Seconds for a child at least, and bytes that it reads in a second at least.
_PATIENCE, _SPEED = 120.0, 5e6
# Bytes at the end of a file: the length of its description, and a magic number.
_TAIL, _MAGIC = 8, b"PAR1"
_MOST_FOOTER = 1 << 28
# Footers that are fetched at once.
_THREADS = 8


class ParquetFormat(ShardFormat):
    """Parquet files."""

    name = "Parquet"
    suffixes = (".parquet",)
    converts = True

    def extent(self, file: StoredFile, path: Path, store: Store, options: ReadOptions) -> Extent:
        """Return rows and columns, from the file's end."""
        (extent,) = self.extents([file], [path], store, options)
        if isinstance(extent, DataError):
            raise extent
        return extent

    def extents(
        self, files: Sequence[StoredFile], paths: Sequence[Path], store: Store, options: ReadOptions
    ) -> list[Extent | DataError]:
        """Return rows and columns of many files, read by one child unless a file ends it."""
        _require_pyarrow()
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_THREADS) as pool:
            copies = [Path(folder) / f"{index}.parquet" for index in range(len(files))]
            ends = list(pool.map(lambda file, copy: _end_of(file, store, copy), files, copies))
            readable = [(path, file) for path, file in zip(ends, files, strict=True) if not isinstance(path, DataError)]
            extents = iter(_extents(readable))
            return [end if isinstance(end, DataError) else next(extents) for end in ends]

    def narrowed(self, layout: str, options: ReadOptions) -> str:
        """Return the layout of the columns that are read."""
        if options.columns is None:
            return layout
        types = dict(_columns_of(layout))
        for name in options.columns:
            if name not in types:
                raise DataError(f"has no column {short(name)}; it has {short(list(types))}")
        return _layout((name, types[name]) for name in options.columns)

    def shown(self, layout: str) -> str:
        """Return names and types."""
        return super().shown("columns " + ", ".join(f"{name}: {kind}" for name, kind in _columns_of(layout)))

    def convert(self, path: Path, file: StoredFile, target: Path, options: ReadOptions) -> None:
        """Write the columns as plain Arrow."""
        _require_pyarrow()
        columns = None if options.columns is None else list(options.columns)
        try:
            source = open_regular(path)
        except OSError as error:
            raise DataError(f"{file.shown}: {error.strerror or error}") from None
        with source, open(target, "xb") as out:
            fds = (source.fileno(), out.fileno())
            arguments = [*map(str, fds), str(options.max_bytes), "0", json.dumps(columns)]
            try:
                (report,) = _run(file, arguments, file.nbytes + options.max_bytes, fds)
            except _ChildError as error:
                raise _damaged(file, error.reason) from None
        if "declared" in report:
            bound = format_bytes(options.max_bytes)
            raise DataError(
                f"{file.shown}: takes {format_bytes(report['declared'])} or more in memory > max_bytes = {bound}; "
                "write smaller shards, read fewer columns, or raise max_bytes"
            )
        if "missing" in report:
            raise DataError(f"{file.shown}: has no column {short(report['missing'])}")
        if "damaged" in report:
            raise _damaged(file, one_line(report["damaged"]))

    def open(self, path: Path, file: StoredFile, layout: str, options: ReadOptions) -> ShardReader:
        """Map a converted shard."""
        reader = ArrowReader(path, file)
        if reader.length:
            self.require_layout(file.shown, reader.layout, layout)
        return reader


class ArrowReader(ShardReader):
    """Takes rows of a mapped Arrow table: a dictionary of columns."""

    def __init__(self, path: Path, file: StoredFile) -> None:
        import pyarrow

        try:
            with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                table = stream.read_all()
        except (pyarrow.ArrowException, OSError) as error:
            reason = f"its copy in the cache is damaged ({one_line(error)[:100]}): {path}"
            raise DamagedCopyError(f"{file.shown}: {reason}") from None
        self.length, self.nbytes = table.num_rows, table.nbytes
        self.layout = _layout((field.name, str(field.type)) for field in table.schema)
        self._columns = {
            name: _column(table.column(name), f"{file.shown}, column {short(name)}") for name in table.column_names
        }

    def read(self, rows: Indices) -> dict[str, Array]:
        """See `ShardReader`."""
        return {name: take(rows) for name, take in self._columns.items()}


def _layout(columns: Iterable[tuple[str, str]]) -> str:
    return json.dumps(list(columns))


def _columns_of(layout: str) -> list[tuple[str, str]]:
    try:
        return [(str(name), str(kind)) for name, kind in json.loads(layout)]
    except (ValueError, TypeError, RecursionError):
        raise DataError("its columns are not known; run python -m dptrain index again") from None


def _column(column: Any, where: str) -> Callable[[Indices], Array]:
    """Return a function that takes rows of a column."""
    import pyarrow
    from pyarrow import types

    if column.null_count:
        missing = int(np.argmax(np.asarray(column.is_null())))
        raise DataError(f"{where}: {column.null_count:,} missing values, the first in row {missing}; fill them")
    column_type = column.type
    if types.is_dictionary(column_type):
        column = column.cast(column_type.value_type)
        column_type = column.type
    if types.is_struct(column_type) and "bytes" in [column_type.field(i).name for i in range(column_type.num_fields)]:
        return lambda rows: object_array(
            [entry["bytes"] for entry in column.take(pyarrow.array(rows)).to_pylist()]
        )  # a picture as Hugging Face writes it
    if types.is_string(column_type) or types.is_large_string(column_type):
        return lambda rows: text_array(column.take(pyarrow.array(rows)).to_pylist())
    if types.is_binary(column_type) or types.is_large_binary(column_type):
        return lambda rows: object_array(column.take(pyarrow.array(rows)).to_pylist())
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pyarrow.array([], column_type)
    values = _numbers(array)
    if values is not None:
        return lambda rows: values[rows]
    if types.is_list(column_type) or types.is_large_list(column_type):
        inner, offsets = _numbers(array.values), np.asarray(array.offsets)
        if inner is not None and inner.ndim == 1:
            lengths = np.diff(offsets)
            length = int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else None
            return lambda rows: _lists(inner, offsets[rows], offsets[rows + 1], length)
    raise DataError(
        f"{where}: holds {short(str(column_type))[1:-1]}; expected numbers, texts, bytes or lists of numbers"
    )


def _numbers(array: Any) -> Array | None:
    """Return numbers, or lists of one length of them, as an array without a copy; None for other types."""
    from pyarrow import types

    checks = (types.is_integer, types.is_floating, types.is_boolean, types.is_date, types.is_timestamp)
    if any(check(array.type) for check in checks):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if types.is_fixed_size_list(array.type):
        inner = _numbers(array.flatten())
        return None if inner is None else inner.reshape(len(array), array.type.list_size, *inner.shape[1:])
    return None


def _lists(values: Array, starts: Indices, ends: Indices, length: int | None) -> Array:
    """Return lists of numbers: (rows, length) where all of the shard have one length, else an array of arrays."""
    if length is not None:
        return np.asarray(values[starts[:, None] + np.arange(length)])
    return object_array([values[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])


def _extents(files: Sequence[tuple[str, StoredFile]]) -> list[Extent | DataError]:
    extents: list[Extent | DataError] = []
    while len(extents) < len(files):
        rest = files[len(extents) :]
        nbytes = sum(file.nbytes for _, file in rest)
        try:
            reports = _run(rest[0][1], [json.dumps([os.path.abspath(path) for path, _ in rest])], nbytes, ())
        except _ChildError as error:  # the file after the last that it has told of ended it
            reports = error.reports
            extents += [_extent(file, report) for (_, file), report in zip(rest, reports, strict=False)]
            extents.append(_damaged(files[len(extents)][1], error.reason))
            continue
        extents += [_extent(file, report) for (_, file), report in zip(rest, reports, strict=True)]
    return extents


def _extent(file: StoredFile, report: dict[str, Any]) -> Extent | DataError:
    if "damaged" in report:
        return _damaged(file, one_line(report["damaged"]))
    return Extent(int(report["rows"]), _layout((str(name), str(kind)) for name, kind in report["columns"]))


def _end_of(file: StoredFile, store: Store, copy: Path) -> str | DataError:
    """Return a local path of a file, or of a sparse copy of a remote one that has only its end."""
    if file.is_local:
        return file.url
    try:
        with open(copy, "xb") as out:
            _copy_footer(file, store, out)
    except DataError as error:
        return error
    return str(copy)


def _copy_footer(file: StoredFile, store: Store, copy: Any) -> None:
    """Write the end of a remote file, which describes it, to where it would be in a copy."""
    tail = store.read(file.url, max(file.nbytes - _TAIL, 0), file.nbytes)
    size = int.from_bytes(tail[:4], "little") + _TAIL
    if len(tail) < _TAIL or tail[4:] != _MAGIC or not _TAIL < size <= min(file.nbytes, _MOST_FOOTER):
        raise DataError(f"{file.shown}: not a Parquet file, or truncated (its last bytes are {tail[-4:].hex()})")
    copy.truncate(file.nbytes)
    copy.seek(0)
    copy.write(_MAGIC)
    copy.seek(file.nbytes - size)
    copy.write(store.read(file.url, file.nbytes - size, file.nbytes))
    copy.flush()


class _ChildError(Exception):
    """A child ended early: why, and what it had printed."""

    def __init__(self, reason: str, reports: list[dict[str, Any]]) -> None:
        super().__init__(reason)
        self.reason, self.reports = reason, reports


def _run(file: StoredFile, arguments: Sequence[str], nbytes: int, fds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the lines that a child prints."""
    command = [sys.executable, "-P", str(CHILD), json.dumps(sys.path), *arguments]
    try:
        process = run_program(command, _PATIENCE + nbytes / _SPEED, pass_fds=fds)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{file.shown}: damaged (not read within {error.timeout:.0f} s)") from None
    except OSError as error:
        raise DataError(f"{file.shown}: a process to read it does not start ({error.strerror or error})") from None
    reports = [json.loads(line) for line in process.stdout.splitlines()]
    if process.returncode:
        raise _ChildError(child_end(process), reports)
    return reports


def _damaged(file: StoredFile, reason: str) -> DataError:
    return DataError(f"{file.shown}: not a Parquet file, or damaged ({reason})")


def _require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(f"Parquet needs pyarrow: {pip_install('streams')}") from None
