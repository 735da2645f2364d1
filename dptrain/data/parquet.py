"""Parquet files, read by pyarrow in a process of its own: a file may make it abort, or fill the memory."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import IO, Any

from dptrain.data.preprocessing import MAX_COLUMNS
from dptrain.data.sources import format_bytes
from dptrain.errors import ConfigError, DataError
from dptrain.runtime.extras import pip_install
from dptrain.runtime.programs import run_program
from dptrain.runtime.text import one_line, short

_CHILD = Path(__file__).with_name("parquet_child.py")
# Seconds for a file at least, and bytes that are read in a second at least.
_PATIENCE, _SPEED = 120.0, 5e6
# The library aborts by chance, one time in ten, where threads of its own start in bounded memory.
_TRIES = 3


def read_parquet(where: str, file: IO[bytes], max_bytes: int) -> Any:
    """Return a Parquet file as a data frame; what was its index comes first.

    Args:
        where: begins messages.
        file: open for reading.
        max_bytes: the largest that its content may be.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: it is no Parquet file, or damaged, too large, or has columns of other types than numbers, texts,
            truth values and dates.
    """
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"Parquet needs pyarrow: {pip_install('tables')}") from None
    with tempfile.TemporaryFile() as made:
        _run_child(where, file, made, max_bytes)
        made.seek(0)
        with pyarrow.ipc.open_stream(made) as stream:
            table = stream.read_all()
    names = [str(name) for name in table.column_names]
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    if count > 1:
        raise DataError(f"{where}: {count} columns are called {short(name)}; rename one")
    return table.to_pandas(ignore_metadata=True, date_as_object=False)


def _run_child(where: str, file: IO[bytes], made: IO[bytes], max_bytes: int) -> None:
    """Let a child read a file, and write what it holds.

    Raises:
        DataError: it cannot.
    """
    size = os.fstat(file.fileno()).st_size
    command = [sys.executable, "-P", str(_CHILD), json.dumps(sys.path), str(file.fileno()), str(made.fileno())]
    try:
        for _ in range(_TRIES):
            file.seek(0)
            made.seek(0)
            made.truncate()
            done = run_program(
                [*command, str(max_bytes), str(MAX_COLUMNS)],
                _PATIENCE + (size + max_bytes) / _SPEED,
                pass_fds=(file.fileno(), made.fileno()),
            )
            if done.returncode != -signal.SIGABRT:
                break
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{where}: damaged (not read within {error.timeout:.0f} s)") from None
    except OSError as error:
        raise DataError(f"{where}: a process to read it does not start ({error.strerror or error})") from None
    if done.returncode:
        raise DataError(f"{where}: no Parquet file, or damaged ({_end(done)})")
    about = json.loads(done.stdout)
    if "declared" in about:
        found, bound = format_bytes(about["declared"]), format_bytes(max_bytes)
        raise DataError(f"{where}: declared {found} > max_bytes = {bound}; raise --data.max_bytes")
    if "columns" in about:
        raise DataError(f"{where}: {about['columns']} columns, at most {MAX_COLUMNS} are read")
    if "type" in about:
        name, kind = short(about["name"]), about["type"]
        raise DataError(f"{where}, column {name}: holds {short(kind)[1:-1]}; expected numbers, texts and booleans")
    if "damaged" in about:
        raise DataError(f"{where}: no Parquet file, or damaged ({one_line(about['damaged'])})")


def _end(done: "subprocess.CompletedProcess[bytes]") -> str:
    """Return how a child has ended that was not to end so."""
    if done.returncode < 0:
        try:
            return f"its reader died of {signal.Signals(-done.returncode).name}"
        except ValueError:
            return f"its reader died of signal {-done.returncode}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return f"its reader failed: {one_line(lines[-1])[:200] if lines else f'exit code {done.returncode}'}"
