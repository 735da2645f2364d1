"""Measurements made once on a machine and cached, as JSON by key."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dptrain.errors import OutputError
from dptrain.runtime.storage.cache import cache_dir, own_folder
from dptrain.runtime.storage.files import write_atomically
from dptrain.runtime.storage.ownership import open_own

# The most bytes of a measurement.
_MOST_BYTES = 1 << 20


class Measurements:
    """A cached measurement; `key`: all that results depend on, JSON-serialisable; `room`: a folder of the cache."""

    def __init__(self, room: str, key: object) -> None:
        self._room = room
        self._name = f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"

    def read(self) -> dict[str, Any]:
        """Return the cached values; empty unless a file that only this user can have written holds some."""
        with suppress(OSError, ValueError), own_folder(cache_dir() / self._room) as folder:
            with os.fdopen(open_own(folder / self._name), "rb") as file:
                tree = json.loads(file.read(_MOST_BYTES))
            if isinstance(tree, dict):
                return tree
        return {}

    def keep(self, values: Mapping[str, Any]) -> None:
        """Cache the values where possible, unless they are too long."""
        content = json.dumps(values).encode()
        with suppress(OSError, OutputError), own_folder(cache_dir() / self._room) as folder:
            if len(content) <= _MOST_BYTES:
                write_atomically(folder / self._name, content)


def are_seconds(value: object) -> bool:
    """Whether a value is a table of positive seconds by name."""
    return isinstance(value, dict) and all(isinstance(seconds, float) and seconds > 0 for seconds in value.values())
