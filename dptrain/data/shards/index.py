"""The index of a folder of shards: lengths, sizes and checksums, which a run then need not learn from the shards."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dptrain.data.shards.formats import Extent
from dptrain.data.shards.stores import Store, StoredFile
from dptrain.errors import DataError

INDEX = "dptrain-index.json"
_FORMAT, _VERSION = "dptrain shards", 1
_MOST_BYTES = 1 << 30


class Indexed(NamedTuple):
    """What an index says of a shard."""

    nbytes: int
    extent: Extent
    sha256: str


def folder_of(url: str) -> str:
    """Return a shard's folder with the last slash; empty for a name alone."""
    return url[: len(url) - len(name_of(url))]


def name_of(url: str) -> str:
    """Return a shard's name in its folder."""
    return url.rpartition("/")[2]


def read_indices(files: Sequence[StoredFile], store: Store) -> dict[str, Indexed]:
    """Return what the indices in the shards' folders say, by address; refuse one that the sizes contradict."""
    indexed: dict[str, Indexed] = {}
    of_folder: dict[str, dict[str, Indexed]] = {}
    for file in files:
        folder = folder_of(file.url)
        if folder not in of_folder:
            of_folder[folder] = _read(folder + INDEX, store)
        entry = of_folder[folder].get(name_of(file.url))
        if entry is not None:
            if entry.nbytes != file.nbytes:
                raise DataError(
                    f"{file.shown}: {file.nbytes:,} bytes, {entry.nbytes:,} in {INDEX}; run python -m dptrain index "
                    "again if the shard is right"
                )
            indexed[file.url] = entry
    return indexed


def encoded(entries: Mapping[str, Indexed]) -> bytes:
    """Return an index as a file's content; `entries` are by name."""
    shards = {
        name: {
            "bytes": entry.nbytes,
            "length": entry.extent.length,
            "layout": entry.extent.layout,
            "sha256": entry.sha256,
        }
        for name, entry in sorted(entries.items())
    }
    return json.dumps({"format": _FORMAT, "version": _VERSION, "shards": shards}, indent=1).encode() + b"\n"


def checksum(file: StoredFile, store: Store) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    store.copy(file, digest.update)
    return digest.hexdigest()


def _read(url: str, store: Store) -> dict[str, Indexed]:
    if not store.exists(url):
        return {}
    size = store.info(url).nbytes
    if size > _MOST_BYTES:
        raise DataError(f"{url}: {size:,} bytes; an index has at most {_MOST_BYTES:,}")
    try:
        tree = json.loads(store.read(url, 0, size))
        if tree["format"] != _FORMAT or tree["version"] != _VERSION:
            raise DataError(f"{url}: format {tree['format']!r} {tree['version']!r}, expected {_FORMAT!r} {_VERSION}")
        return {name: _entry(entry) for name, entry in tree["shards"].items()}
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{url}: not an index ({type(error).__name__}); run python -m dptrain index again") from None


def _entry(entry: Mapping[str, Any]) -> Indexed:
    nbytes, length, layout, sha256 = (entry[key] for key in ("bytes", "length", "layout", "sha256"))
    is_hex = isinstance(sha256, str) and len(sha256) == 64 and set(sha256) <= set("0123456789abcdef")
    counts = all(type(count) is int and 0 <= count < 1 << 62 for count in (nbytes, length))
    if not (counts and isinstance(layout, str) and is_hex):
        raise ValueError("an entry of another form")
    return Indexed(nbytes, Extent(length, layout), sha256)
