"""What is measured once on a machine and kept in the cache: JSON objects by what they are about."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dptrain.errors import OutputError
from dptrain.runtime.cache import cache_dir, own_folder
from dptrain.runtime.files import write_atomically
from dptrain.runtime.ownership import open_own

# Bytes of what is kept of a measurement, at most.
_MOST_BYTES = 1 << 20


class Measurements:
    """What was measured of one thing; see `read` and `keep`.

    Args:
        room: a folder of the cache.
        about: what results depend on, anything that JSON can carry.
    """

    def __init__(self, room: str, about: object) -> None:
        self._room = room
        self._name = f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]}.json"

    def read(self) -> dict[str, Any]:
        """Return what is kept, whatever it is; nothing where nothing is that this user alone can have written."""
        with suppress(OSError, ValueError), own_folder(cache_dir() / self._room) as folder:
            with os.fdopen(open_own(folder / self._name), "rb") as file:
                found = json.loads(file.read(_MOST_BYTES))
            if isinstance(found, dict):
                return found
        return {}

    def keep(self, found: Mapping[str, Any]) -> None:
        """Keep it, where there is a place for it; what is too long to be read again goes."""
        content = json.dumps(found).encode()
        with suppress(OSError, OutputError), own_folder(cache_dir() / self._room) as folder:
            if len(content) <= _MOST_BYTES:
                write_atomically(folder / self._name, content)


def are_seconds(found: object) -> bool:
    """Whether something read is a table of seconds by name."""
    return isinstance(found, dict) and all(isinstance(one, float) and one > 0 for one in found.values())
