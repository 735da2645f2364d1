"""Decides how progress is shown, by what standard output leads to: a live line, plain lines, or nothing.

Under a launcher a rank's own standard output tells nothing: MPICH gives it a pipe, Open MPI a pseudo-terminal. What
counts is the standard output of the launcher, found among this process's ancestors. On another node it is no ancestor;
there, as in a file, lines are shown without escape codes.
"""

import os
import stat
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from dptrain.errors import ConfigError, printable
from dptrain.runtime.launch.children import LAUNCHERS, ancestors
from dptrain.runtime.launch.launcher import detect_launch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Progress = Literal["live", "lines", "none"]

# Environment variable that overrides "auto".
VARIABLE = "DPTRAIN_PROGRESS"
# Keras' numbers for them.
VERBOSITY: dict[str, int] = {"none": 0, "live": 1, "lines": 2}
# A space at which no line ends.
NO_BREAK = "\0"
# Width of a terminal that does not tell it, and of what is no terminal.
_COLUMNS, _WIDEST = 80, 1000


_is_interactive = True


def progress_mode() -> Progress:
    """Return how progress is shown by default: DPTRAIN_PROGRESS, else live on a terminal, else lines."""
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in ("auto", *VERBOSITY):
        raise ConfigError(f"{VARIABLE} = {mode!r}: expected auto, live, lines or none")
    if mode != "auto":
        return mode  # type: ignore[return-value]  # one of its words
    plain = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
    return "live" if terminal_columns() and not plain and encoding.startswith("utf") else "lines"


def verbosity(verbose: str | int) -> int:
    """Return Keras' verbosity: 0 nothing, 1 a live line, 2 lines; resolves "auto"."""
    level = VERBOSITY[progress_mode()] if verbose == "auto" else int(verbose)
    return level if _is_interactive or level != VERBOSITY["live"] else VERBOSITY["lines"]


def set_interactive(value: bool) -> None:
    """Allow or forbid live lines; where forbidden, plain lines replace them."""
    global _is_interactive
    _is_interactive = value


def is_interactive() -> bool:
    """Whether live lines are allowed."""
    return _is_interactive


def terminal_columns(stream: TextIO | None = None) -> int | None:
    """Return the width of the terminal that shows a stream (standard output by default), or None."""
    stream = sys.stdout if stream is None else stream
    if stream is None:  # closed by the parent process
        return None
    try:
        is_terminal, descriptor = stream.isatty(), stream.fileno()
    except ValueError:  # a stream without a file, or a closed one
        return None
    launch = detect_launch() if descriptor == 1 else None  # sys.stdout may be another wrapper of it
    if launch is not None:
        with _launcher_output(descriptor) as output:
            if output is not None:
                return _columns(output) if os.isatty(output) else None
        # Slurm's ranks have a terminal only where the user asked for one; Open MPI's have one everywhere.
        is_terminal = is_terminal and launch.launcher == "Slurm"
    return _columns(descriptor) if is_terminal else None


def ends_in_file(stream: TextIO | None = None) -> bool:
    """Whether a stream (standard output by default) ends in a file, where escape codes do not belong."""
    stream = sys.stdout if stream is None else stream
    with suppress(OSError, ValueError, AttributeError):  # no stream, or one without a file
        descriptor = stream.fileno()
        launched = _launcher_output_path(descriptor) if descriptor in (1, 2) and detect_launch() else None
        return any(stat.S_ISREG(os.stat(each).st_mode) for each in (descriptor, launched) if each is not None)
    return False


def say(text: str, *, indent: int = 2, file: TextIO | None = None, fields: Mapping[str, Any] | None = None) -> None:
    """Print a line, wrapped at words on a terminal, and whole elsewhere, so that a search finds it.

    `NO_BREAK` stands for spaces at which no line may end. `fields` are the line's values, for a log in JSON.
    """
    write_record = getattr(sys.stdout if file is None else file, "write_record", None)
    if write_record is not None and fields:
        write_record(printable(text), fields)
        return
    columns, text = terminal_columns(file), printable(text, f"\n{NO_BREAK}")
    shown = text.replace(NO_BREAK, " ") if columns is None else wrapped(text, columns, indent=indent)
    print(shown, file=file, flush=True)


def wrapped(text: str, columns: int, *, indent: int = 2) -> str:
    """Wrap text at words, or only at " - " where it has that separator; leading and repeated spaces stay."""
    if " - " in text:
        text = text.replace(" ", NO_BREAK).replace(f"{NO_BREAK}-{NO_BREAK}", f" -{NO_BREAK}")
    lines = textwrap.wrap(
        text,
        max(columns, indent + 10),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return "\n".join(lines).replace(NO_BREAK, " ")


def console(file: TextIO | None = None, *, live: bool = False) -> "Console":
    """Return a Rich console, without escape codes off a terminal; `live`: draw unless the stream ends in a file."""
    from rich.console import Console

    columns = terminal_columns(file)
    if columns is None and live and not ends_in_file(file):
        columns = _environment_columns() or _COLUMNS
    # A file has room for any row.
    return Console(file=file, highlight=False, force_terminal=columns is not None, width=columns or _WIDEST)


def table(*titles: str) -> "Table":
    """Return a table for standard output, without box drawing off a terminal: a search finds its cells in a file."""
    from rich.table import Table

    if terminal_columns() is not None:
        return Table(*titles)
    return Table(*titles, box=None, padding=(0, 2, 0, 0), pad_edge=False)


def show_table(table: "Table") -> None:
    """Print a table on standard output; without blanks at the ends of lines off a terminal."""
    if terminal_columns() is not None:
        console().print(table)
        return
    writer = console()
    with writer.capture() as captured:
        writer.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def window() -> int | None:
    """Return how many columns standard output may take: the terminal's, or COLUMNS; None for any number."""
    return terminal_columns() or _environment_columns() or None


def natural_width(table: "Table") -> int:
    """Return how many columns a table takes with each row on a line."""
    from rich.console import Console

    return Console(width=_WIDEST).measure(table).maximum


def _environment_columns() -> int:
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() else 0


def _columns(descriptor: int) -> int:
    with suppress(OSError):
        return _environment_columns() or os.get_terminal_size(descriptor).columns or _COLUMNS
    return _COLUMNS


@contextmanager
def _launcher_output(descriptor: int) -> Iterator[int | None]:
    """Open the launcher's standard output if it is a device that gets this process's output, else yield None."""
    output = None
    with suppress(OSError, ValueError):
        path = _launcher_output_path(descriptor)
        # Terminals are character devices; a pipe is not opened, as its writer must notice when its reader is gone.
        if path is not None and stat.S_ISCHR(os.stat(path).st_mode):
            output = os.open(path, os.O_RDONLY | os.O_NOCTTY)
    try:
        yield output
    finally:
        if output is not None:
            os.close(output)


def _launcher_output_path(descriptor: int) -> str | None:
    """Return the path of the launcher's standard output (1) or error (2), None if this process's does not go there."""
    launcher = _launcher_behind(os.readlink(f"/proc/self/fd/{descriptor}"), os.isatty(descriptor))
    return None if launcher is None else f"/proc/{launcher}/fd/{descriptor}"


@cache
def _launcher_behind(output: str, is_terminal: bool) -> int | None:
    """Return the PID of the launcher that reads this process's `output`, such as "pipe:[1234]", or None."""
    readers = []
    for pid, name in ancestors():
        if name in LAUNCHERS or name.endswith("proxy"):
            readers.append(pid)
        if name in LAUNCHERS:
            return pid if is_terminal or any(_holds(reader, output) for reader in readers) else None
    return None


def _holds(pid: int, output: str) -> bool:
    if output.startswith("pipe:"):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(entry) == output:
                    return True
    return False
