"""Standard streams whose reader may vanish, or that may be closed at process start."""

import contextlib
import errno
import io
import os
import sys
from typing import Any

from dptrain.runtime.text import one_line

# Why standard output was lost, such as a full disk; None if it was not, or its reader is gone.
_lost: str | None = None


class _Tireless(io.FileIO):
    """A descriptor that drops output once its reader is gone or its disk is full."""

    def write(self, content: Any, /) -> int:
        global _lost
        try:
            return super().write(content)
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):
                raise
            if not isinstance(error, BrokenPipeError) and self.fileno() == 1:
                _lost = error.strerror or one_line(error)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(content)


def outlive_readers() -> None:
    """Let a process go on silently when its output's reader ends: `python -m dptrain | head`.

    A training's results are in its files, so neither a closed pipe nor a full disk ends it; `lost_output` reports the
    latter. Streams that a caller has replaced stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None and name == "stderr":  # set so by the caller; errors are printed all the same
            stream = sys.__stderr__
        if stream is None:  # it was closed when the process began, as by `>&-`
            setattr(sys, name, open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False))  # noqa: SIM115
            continue
        if stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        raw = _Tireless(stream.fileno(), "wb", closefd=False)
        lines = name == "stderr" or stream.line_buffering
        text = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=lines
        )
        setattr(sys, name, text)


def lost_output() -> str | None:
    """Flush standard output; return why some of it was lost, or None."""
    flush()
    return _lost


def hold_descriptors() -> None:
    """Open closed descriptors among 0, 1 and 2 on /dev/null, or the next file would get their number and the output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest number
            os.set_inheritable(null, True)


def write_error(text: str) -> None:
    """Write to standard error in one unbuffered write, if it is open; as lines of a log where it is one."""
    if sys.__stderr__ is not None:
        as_log = getattr(sys.stderr, "as_log", None)
        text = text if as_log is None else as_log(text)
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))  # paths may hold any bytes


def flush() -> None:
    """Flush standard output and standard error, if they are open."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
