"""Bodies of requests: JSON that is only what JSON has, and compressed content within a limit."""

import json
import zlib
from typing import Any, NoReturn

from dptrain.errors import DataError
from dptrain.runtime.text import one_line

# Of zlib: the header of gzip, or zlib's own, which HTTP calls deflate.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}


class BodyTooLargeError(DataError):
    """A body has more bytes than are read."""


def parse_json(content: bytes | memoryview, what: str = "body") -> Any:
    """Return what JSON holds; DataError of anything else, NaN and bottomless nesting included."""
    try:
        return json.loads(bytes(content), parse_constant=_refuse_constant)
    except DataError:
        raise
    except RecursionError:
        raise DataError(f"{what}: JSON nested too deeply") from None
    except UnicodeDecodeError:
        raise DataError(f"{what}: not UTF-8") from None
    except ValueError as error:  # also of an integer with more digits than Python reads
        raise DataError(f"{what}: not JSON: {one_line(error)}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise DataError(f"body: {name} is no number of JSON; null stands for a missing value")


def decompress(content: bytes, encoding: str, most: int) -> bytes:
    """Return a body without its content encoding; at most `most` bytes are unpacked."""
    if encoding in ("", "identity"):
        return content
    if encoding not in _WINDOW_BITS:
        raise DataError(f"Content-Encoding {encoding!r}; expected {' or '.join(_WINDOW_BITS)}")
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        unpacked = unpacker.decompress(content, most + 1)
    except zlib.error:
        raise DataError(f"body: not {encoding}") from None
    if len(unpacked) > most:
        raise BodyTooLargeError(f"body: unpacks to more than {most:,} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise DataError(f"body: truncated {encoding}, or more behind its end")
    return unpacked
