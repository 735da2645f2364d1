"""Parquet files, read by pyarrow in a child process, since a file may abort it or fill the memory."""

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

CHILD = Path(__file__).with_name("parquet_child.py")
# Seconds for a file at least, and bytes that are read in a second at least.
_PATIENCE, _SPEED = 120.0, 5e6


def read_parquet(where: str, file: IO[bytes], max_bytes: int) -> Any:
    """Return a Parquet file as a data frame, its former index first."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"Parquet needs pyarrow: {pip_install('tables')}") from None
    with tempfile.TemporaryFile() as arrow_file:
        _run_child(where, file, arrow_file, max_bytes)
        arrow_file.seek(0)
        with pyarrow.ipc.open_stream(arrow_file) as stream:
            table = stream.read_all()
    names = [str(name) for name in table.column_names]
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    if count > 1:
        raise DataError(f"{where}: {count} columns are called {short(name)}; rename one")
    return table.to_pandas(ignore_metadata=True, date_as_object=False)


def _run_child(where: str, file: IO[bytes], arrow_file: IO[bytes], max_bytes: int) -> None:
    """Let a child process read a file and write its table as plain Arrow to `arrow_file`."""
    size = os.fstat(file.fileno()).st_size
    command = [sys.executable, "-P", str(CHILD), json.dumps(sys.path), str(file.fileno()), str(arrow_file.fileno())]
    try:
        file.seek(0)
        process = run_program(
            [*command, str(max_bytes), str(MAX_COLUMNS)],
            _PATIENCE + (size + max_bytes) / _SPEED,
            pass_fds=(file.fileno(), arrow_file.fileno()),
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{where}: damaged (not read within {error.timeout:.0f} s)") from None
    except OSError as error:
        raise DataError(f"{where}: a process to read it does not start ({error.strerror or error})") from None
    if process.returncode:
        raise DataError(f"{where}: not a Parquet file, or damaged ({child_end(process)})")
    report = json.loads(process.stdout)
    if "declared" in report:
        declared, bound = format_bytes(report["declared"]), format_bytes(max_bytes)
        raise DataError(f"{where}: declared {declared} > max_bytes = {bound}; raise --data.max_bytes")
    if "columns" in report:
        raise DataError(f"{where}: {report['columns']} columns, at most {MAX_COLUMNS} are read")
    if "type" in report:
        name, kind = short(report["name"]), report["type"]
        raise DataError(f"{where}, column {name}: holds {short(kind)[1:-1]}; expected numbers, texts and booleans")
    if "damaged" in report:
        raise DataError(f"{where}: not a Parquet file, or damaged ({one_line(report['damaged'])})")


def child_end(process: "subprocess.CompletedProcess[bytes]") -> str:
    """Return how a child that failed has ended."""
    if process.returncode < 0:
        try:
            return f"its reader died of {signal.Signals(-process.returncode).name}"
        except ValueError:
            return f"its reader died of signal {-process.returncode}"
    lines = process.stderr.decode(errors="replace").strip().splitlines()
    return f"its reader failed: {one_line(lines[-1])[:200] if lines else f'exit code {process.returncode}'}"
