"""Output as a log: each line with its time and rank, where standard output or standard error end in a file."""

import io
import math
import os
import stat
import sys
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from dptrain.errors import ConfigError
from dptrain.runtime.launch.supervisor import LOG_FORMATS, log_line
from dptrain.runtime.output.terminal import ends_in_file

# Environment variable that overrides "auto".
VARIABLE = "DPTRAIN_LOG_FORMAT"


class LogStream(io.TextIOBase):
    """A text stream that writes each line to another as a line of a log."""

    def __init__(self, stream: TextIO, name: str, rank: int, log_format: str) -> None:
        super().__init__()
        self.stream = stream
        self._name, self._rank, self._format = name, rank, log_format
        self._begun = ""  # a line without an end
        self._lock = threading.RLock()  # a signal's handler may print

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the other stream."""
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """How that stream writes what it cannot encode."""
        return self.stream.errors

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.stream.fileno()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self.stream.isatty()

    def writable(self) -> bool:
        """Whether it can be written."""
        return True

    def write(self, text: str) -> int:
        """Write the lines that have ended; the rest waits for its end, or for `flush`."""
        with self._lock:
            ended, end, self._begun = (self._begun + text).rpartition("\n")
            if end:
                self.stream.write(self.as_log(ended))
        return len(text)

    def write_record(self, message: str, fields: Mapping[str, Any]) -> None:
        """Write a line, in JSON with these fields of its own; null for what is not finite."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }
        with self._lock:
            self.flush()
            self.stream.write(self.as_log(message, finite))
            self.stream.flush()

    def flush(self) -> None:
        """Write what is there, also a line without an end."""
        with self._lock:
            if self._begun:
                self.write("\n")
        if not self.stream.closed:
            self.stream.flush()

    def as_log(self, text: str, fields: Mapping[str, Any] | None = None) -> str:
        """Return text as lines of a log, without its empty ones."""
        lines = [line for line in text.split("\n") if line]
        return "".join(f"{log_line(line, self._rank, self._name, self._format, fields)}\n" for line in lines)


def begin_log(log_format: str, rank: int) -> None:
    """Write standard output and standard error as logs from now on, as `--log-format` says.

    `auto` is what DPTRAIN_LOG_FORMAT says, else text in files. ConfigError if that is no format.
    """
    if log_format == "auto":
        log_format = os.environ.get(VARIABLE) or "auto"
        if log_format not in ("auto", *LOG_FORMATS):
            raise ConfigError(f"{VARIABLE} = {log_format!r}: expected auto, {', '.join(LOG_FORMATS)}")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or log_format == "plain" or (log_format == "auto" and not _ends_in_log(stream)):
            continue
        setattr(sys, name, LogStream(stream, name, rank, "text" if log_format == "auto" else log_format))


def _ends_in_log(stream: TextIO) -> bool:
    """Whether a stream ends in a file with a name; others are temporary, of a program that reads what is printed."""
    if not ends_in_file(stream):
        return False
    status = os.fstat(stream.fileno())
    return status.st_nlink > 0 or not stat.S_ISREG(status.st_mode)


def end_log() -> None:
    """Write what a command printed, and restore the streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, LogStream):
            stream.flush()
            setattr(sys, name, stream.stream)
