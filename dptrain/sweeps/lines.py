"""Append-only files of JSON lines with digests, read back after a kill.

    {"run": 3, "epoch": 1, "loss": 0.25, "digest": "5d41402abc4b2a76"}

A line counts from the moment its newline is written, so a torn last line never happened. The digest, half of the
SHA-256 of the line without it, detects changed lines. Lines of earlier versions have none.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dptrain.errors import DataError
from dptrain.runtime.storage.files import Directory, output_error, writing

_KEY = "digest"
_BEFORE, _AFTER = f', "{_KEY}": "'.encode(), b'"}\n'
# Most bytes of a file: millions of lines.
_MOST = 1 << 30

_T = TypeVar("_T")


class _ChangedError(Exception):
    """A line differs from what was written."""


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return the line of a non-empty object."""
    body = json.dumps({name: value for name, value in fields.items() if name != _KEY}, allow_nan=False).encode()
    return body[:-1] + _BEFORE + _digest(body) + _AFTER


def decode(line: bytes) -> Any:
    """Parse a line, with its digest removed; earlier versions wrote none."""
    fields = json.loads(line)
    if isinstance(fields, dict) and isinstance(fields.get(_KEY), str):
        body, _, digest = line.rpartition(_BEFORE)
        if digest != _digest(body + b"}") + _AFTER:
            raise _ChangedError("its digest does not match what was written")
        del fields[_KEY]
    return fields


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


class Lines:
    """An open file that lines are appended to."""

    def __init__(self, folder: Directory, name: str, advice: str) -> None:
        self._path, self._advice = folder.path / name, advice
        self._file = folder.appending(name)
        self._end = self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, line: bytes) -> None:
        """Write a whole line, or nothing of it."""
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
        """Flush all lines to the disk."""
        with writing(self._path, advice=self._advice):
            os.fsync(self._file.fileno())


def read(folder: Directory, name: str, parse: Callable[[Any], _T], advice: str) -> list[tuple[bytes, _T]]:
    """Return the lines of a file, raw and parsed, without torn last lines; [] if there is no file."""
    if folder.kind(name) is None:
        return []
    lines = [line + b"\n" for line in folder.read(name, _MOST).split(b"\n")[:-1]]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append((line, parse(decode(line))))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            if number < len(lines):
                raise DataError(
                    f"{folder.path / name}, line {number}: cannot be read ({type(error).__name__}: {error}); "
                    f"fix or remove the line, or {advice}"
                ) from None
        except _ChangedError as error:
            raise DataError(f"{folder.path / name}, line {number}: has changed: {error}; {advice}") from None
    return records
