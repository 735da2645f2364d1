"""Files of lines that are appended one by one and read back after a kill: a JSON object each, with a digest of its own.

    {"run": 3, "epoch": 1, "loss": 0.25, "digest": "5d41402abc4b2a76"}

A line counts from the moment its newline is written, so a torn last line never happened. The digest, half of the
SHA-256 of the line without it, tells a line that has changed from one that was written so. Lines of earlier versions
have none.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dptrain.errors import DataError
from dptrain.runtime.files import Directory, output_error, writing

_KEY = "digest"
_BEFORE, _AFTER = f', "{_KEY}": "'.encode(), b'"}\n'
# Bytes of a file: of millions of lines.
_MOST = 1 << 30

_T = TypeVar("_T")


class _ChangedError(Exception):
    """A line is not as it was written."""


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return the line of an object that has any field.

    Raises:
        ValueError: a number that is not finite, which JSON does not have.
        TypeError: something else that it does not have.
    """
    body = json.dumps({name: value for name, value in fields.items() if name != _KEY}, allow_nan=False).encode()
    return body[:-1] + _BEFORE + _digest(body) + _AFTER


def decode(line: bytes) -> Any:
    """Return what `encode` was given, or what a line of an earlier version holds, without a digest.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
        _ChangedError: it is not as it was written.
    """
    fields = json.loads(line)
    if isinstance(fields, dict) and isinstance(fields.get(_KEY), str):
        body, _, digest = line.rpartition(_BEFORE)
        if digest != _digest(body + b"}") + _AFTER:
            raise _ChangedError("its digest is not that of what was written")
        del fields[_KEY]
    return fields


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


class Lines:
    """A file that lines are appended to, open as long as it is in use.

    Args:
        folder: that holds it.
        name: of the file.
        advice: what to do where it cannot be written, the end of messages.

    Raises:
        OSError: the system's.
        DataError: it is no regular file of its own.
    """

    def __init__(self, folder: Directory, name: str, advice: str) -> None:
        self._path, self._advice = folder.path / name, advice
        self._file = folder.appending(name)
        self._end = self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> "Lines":
        """Return the file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._file.close()

    def add(self, line: bytes) -> None:
        """Hand a line to the operating system: all of it, or nothing.

        Raises:
            OutputError: it cannot be written.
        """
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise output_error(self._path, error, len(line), advice=self._advice) from error
        self._end += len(line)

    def sync(self) -> None:
        """Flush all lines to the disk.

        Raises:
            OutputError: they cannot be written.
        """
        with writing(self._path, advice=self._advice):
            os.fsync(self._file.fileno())


def read(folder: Directory, name: str, parse: Callable[[Any], _T], advice: str) -> list[tuple[bytes, _T]]:
    """Return the lines of a file, each as it is and parsed; no lines where there is no file.

    What comes after the last newline, and a last line that cannot be parsed, was torn: it is left out.

    Args:
        folder: that holds it.
        name: of the file.
        parse: takes the object of a line.
        advice: what to do about a line that is wrong, the end of the message.

    Raises:
        DataError: any other line cannot be parsed, or one has changed since it was written.
        OSError: the system's.
    """
    if folder.kind(name) is None:
        return []
    lines = [line + b"\n" for line in folder.read(name, _MOST).split(b"\n")[:-1]]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append((line, parse(decode(line))))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            if number < len(lines):
                raise DataError(
                    f"{folder.path / name}, line {number}: cannot be read ({type(error).__name__}: {error}); "
                    f"fix or remove the line, or {advice}"
                ) from None
        except _ChangedError as error:
            raise DataError(f"{folder.path / name}, line {number}: has changed: {error}; {advice}") from None
    return found
