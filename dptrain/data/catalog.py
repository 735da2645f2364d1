"""Finds data sets by name or path, and downloads missing ones; a new named set is an entry in `CATALOG`.

`ensure_available` may write to the cache and runs in one process of a node; then all call `open_dataset`, which only
reads.
"""

import hashlib
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from gzip import GzipFile
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.data import strokes
from dptrain.data.cached_files import keras_home, require_checksum
from dptrain.data.readers.idx import open_idx
from dptrain.data.readers.npz import open_npz
from dptrain.data.sources import (
    CHUNK_BYTES,
    DEFAULT_MAX_BYTES,
    ArraySource,
    DataSources,
    format_bytes,
    format_shape,
    stream_errors,
)
from dptrain.errors import ConfigError, DataError, OutputError
from dptrain.runtime.storage.cache import cache_dir, own_folder
from dptrain.runtime.storage.files import replacing_locked
from dptrain.runtime.storage.locks import held
from dptrain.runtime.text import one_line

__all__ = ["CATALOG", "DEFAULT_MAX_BYTES", "NamedDataset", "cache_dir", "ensure_available", "open_dataset"]

CONNECT_TIMEOUT = 20.0
"""Seconds without a byte from the server after which a download is given up."""

FETCH_TIMEOUT = 600.0
"""Seconds that one file may take in all, and that another process waits for the one that fetches."""

# Only schemes that protect the data in transit.
_SCHEMES = ("https",)

# Both spellings are in use: the archives' own, and that of copies unpacked by some tools.
_IDX_NAMES = {
    "x_train": ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
    "y_train": ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte"),
    "x_test": ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
    "y_test": ("t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"),
}


def ensure_available(name_or_path: str, *, data_dir: Path | None = None) -> None:
    """Download a named set's files unless they are here; does nothing for a path.

    Concurrent calls are safe: one works, the others wait. `data_dir` is searched first and never written to.
    """
    named = _lookup(name_or_path)
    if named is not None:
        named.ensure(name_or_path, data_dir)


def open_dataset(name_or_path: str, *, data_dir: Path | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> DataSources:
    """Open a named set, a folder of four IDX files (.gz or not) or an `.npz` file; reads only headers."""
    named = _lookup(name_or_path)
    if named is not None:
        return named.open(name_or_path, data_dir, max_bytes)
    path = _expand(name_or_path)
    if path.is_dir():
        return _open_idx_folder(path.name or str(path), path, max_bytes)
    if not path.exists():
        raise DataError(
            f"data: {name_or_path} not found; expected a folder of IDX files, an .npz file or one of {_names()}"
        )
    return open_npz(path, max_bytes=max_bytes)


class NamedDataset(ABC):
    """A data set known by name."""

    @abstractmethod
    def ensure(self, name: str, data_dir: Path | None) -> None:
        """Fetch the files, as `ensure_available`."""

    @abstractmethod
    def open(self, name: str, data_dir: Path | None, max_bytes: int) -> DataSources:
        """Open the files, as `open_dataset`."""


class GeneratedStrokes(NamedDataset):
    """The built-in set, drawn once and cached as an uncompressed `.npz`."""

    def ensure(self, name: str, data_dir: Path | None) -> None:
        """Generate the cached file unless a good one exists."""
        path = self._path(name)
        if self._is_good(path):
            return
        with _locked(path.parent):
            if self._is_good(path):
                return
            x_train, y_train, x_test, y_test = strokes.generate()
            with _replacing(path) as part, open(part, "xb") as file:
                np.savez(file, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)

    def open(self, name: str, data_dir: Path | None, max_bytes: int) -> DataSources:
        """Open the cached file."""
        sources = open_npz(self._path(name), max_bytes=max_bytes)
        return DataSources(name, sources.x_train, sources.y_train, sources.x_test, sources.y_test)

    @staticmethod
    def _path(name: str) -> Path:
        return cache_dir() / name / f"{name}-v{strokes.VERSION}.npz"

    @staticmethod
    def _is_good(path: Path) -> bool:
        try:
            open_npz(path)
        except DataError:
            return False
        return True


@dataclass(frozen=True)
class FetchedIdx(NamedDataset):
    """Four gzip-compressed IDX files from an official address, in MNIST's layout."""

    address: str  # https, with a final slash
    shapes: Mapping[str, tuple[int, ...]]
    # of the decompressed content, so that recompressed copies match
    sha256: Mapping[str, str] = field(default_factory=dict)
    gz_sha256: Mapping[str, str] = field(default_factory=dict)  # of the .gz file; an array with neither is not fetched
    keras_sha256: str | None = None  # of the .npz file of that name that Keras keeps in its cache; None: it keeps IDX

    def ensure(self, name: str, data_dir: Path | None) -> None:
        """Download into the cache the files that this machine lacks."""
        folder = cache_dir() / name
        if self._find(name, data_dir) is not None:
            return
        if (keras_file := self._keras_file(name)) is not None:
            require_checksum(keras_file, self.keras_sha256)
            return
        if any(key not in self.sha256 and key not in self.gz_sha256 for key in _IDX_NAMES):
            raise DataError(
                f"data: {name} is not on this machine, and not downloaded without a known SHA-256; {_advice(name)}"
            )
        with _locked(folder):
            for key, (file, _) in _IDX_NAMES.items():
                path = folder / f"{file}.gz"
                if _find_idx(folder, key) is None:
                    with _replacing(path) as part:
                        self._fetch(name, key, self.address + path.name, part)
                        self._verify(name, key, self.address + path.name, part)

    def open(self, name: str, data_dir: Path | None, max_bytes: int) -> DataSources:
        """Open the files from the first place that has them."""
        folder = self._find(name, data_dir)
        if folder is None and (keras_file := self._keras_file(name)) is not None:
            sources = open_npz(keras_file, max_bytes=max_bytes)
            return DataSources(name, sources.x_train, sources.y_train, sources.x_test, sources.y_test)
        if folder is None:
            places = [str(place) for place in self._places(name, data_dir)]
            searched = f" (looked in {', '.join(places)})" if len(places) > 1 else ""
            raise DataError(f"data: {places[0]}/{_IDX_NAMES['x_train'][0]}.gz not found{searched}; {_advice(name)}")
        return _open_idx_folder(name, folder, max_bytes)

    @staticmethod
    def _places(name: str, data_dir: Path | None) -> list[Path]:
        folder = _expand(data_dir) if data_dir is not None else None
        places = [folder, folder / name] if folder is not None else []
        if chosen := os.environ.get("DPTRAIN_DATA"):
            places.append(_expand(chosen) / name)
        return [*places, cache_dir() / name, keras_home() / "datasets" / name]

    def _keras_file(self, name: str) -> Path | None:
        path = keras_home() / "datasets" / f"{name}.npz"
        return path if self.keras_sha256 is not None and path.is_file() else None

    def _find(self, name: str, data_dir: Path | None) -> Path | None:
        """Return the first folder with all four files; a partly filled folder of the user's is an error."""
        if data_dir is not None and not _expand(data_dir).is_dir():
            raise DataError(f"data: {data_dir}/{_IDX_NAMES['x_train'][0]}.gz not found: the folder does not exist")
        caches = (cache_dir() / name, keras_home() / "datasets" / name)
        for place in self._places(name, data_dir):
            missing = [key for key in _IDX_NAMES if _find_idx(place, key) is None]
            if not missing:
                return place
            if len(missing) < len(_IDX_NAMES) and place not in caches:
                raise _not_found(place, missing[0])
        return None

    def _fetch(self, name: str, key: str, url: str, part: Path) -> None:
        """Download `url` to `part`; refuse more bytes than the array can take."""
        content = 4 + 4 * len(self.shapes[key]) + math.prod(self.shapes[key])
        received, most = 0, content + content // 1000 + 1024  # what gzip makes of bytes that it cannot compress
        with open(part, "xb") as file:
            for chunk in _download(name, url):
                received += len(chunk)
                if received > most:
                    raise DataError(f"{url}: longer than {format_bytes(most)}; {_advice(name)}")
                file.write(chunk)

    def _verify(self, name: str, key: str, url: str, part: Path) -> None:
        """Refuse a download that is not the array `key`."""
        try:
            source = open_idx(part)
            if source.shape != self.shapes[key] or source.dtype != np.uint8:
                expected = format_shape(self.shapes[key])
                raise DataError(f"{part}: {source.dtype} {format_shape(source.shape)}, expected uint8 {expected}")
            # Reading no rows passes the whole stream through a small buffer, up to its length and checksum.
            source.read_into(np.empty((0, *source.shape[1:]), source.dtype))
            for what, pinned, digest_of in (("", self.gz_sha256, _sha256), ("content ", self.sha256, _content_sha256)):
                if key in pinned and (digest := digest_of(part)) != pinned[key]:
                    raise DataError(f"{part}: {what}has SHA-256 {digest}, expected {pinned[key]}")
        except DataError as error:
            # The temporary file is gone when the user reads this.
            fault = str(error).replace(str(part), url).partition("; ")[0]
            raise DataError(f"{fault}; try again, or {_advice(name)}") from None


CATALOG: dict[str, NamedDataset] = {
    "strokes": GeneratedStrokes(),
    "mnist": FetchedIdx(
        address="https://storage.googleapis.com/cvdf-datasets/mnist/",
        shapes={"x_train": (60000, 28, 28), "y_train": (60000,), "x_test": (10000, 28, 28), "y_test": (10000,)},
        sha256={
            "x_train": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "y_train": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "x_test": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "y_test": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        keras_sha256="731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
    ),
    # The SHA-256 that TensorFlow Datasets and Hugging Face Datasets both record; MD5s are all that its authors give.
    "fashion-mnist": FetchedIdx(
        address="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        shapes={"x_train": (60000, 28, 28), "y_train": (60000,), "x_test": (10000, 28, 28), "y_test": (10000,)},
        gz_sha256={
            "x_train": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "y_train": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "x_test": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "y_test": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
}


def _expand(path: str | Path) -> Path:
    # Not Path.expanduser, which raises where the user of `~user` does not exist.
    return Path(os.path.expanduser(path))


def _names() -> str:
    return ", ".join(CATALOG)


def _lookup(name_or_path: str) -> NamedDataset | None:
    if name_or_path in CATALOG:
        return CATALOG[name_or_path]
    path = _expand(name_or_path)
    looks_like_path = os.sep in name_or_path or name_or_path.startswith((".", "~")) or path.suffix in (".npz", ".gz")
    if name_or_path and (looks_like_path or path.exists()):
        return None
    import difflib

    close = difflib.get_close_matches(name_or_path.lower(), CATALOG, n=1, cutoff=0.5)
    hint = (
        f"did you mean {close[0]!r}?" if close else f"expected one of {_names()}, a folder of IDX files or an .npz file"
    )
    raise ConfigError(f"unknown data set {name_or_path!r}; {hint}")


def _open_idx_folder(name: str, folder: Path, max_bytes: int) -> DataSources:
    sources: dict[str, ArraySource] = {}
    for key in _IDX_NAMES:
        path = _find_idx(folder, key)
        if path is None:
            raise _not_found(folder, key)
        sources[key] = open_idx(path, max_bytes=max_bytes)
    return DataSources(name=name, **sources)


def _find_idx(folder: Path, key: str) -> Path | None:
    """Return an array's file under any spelling; prefers the uncompressed one, which reads faster."""
    candidates = (folder / f"{name}{ending}" for ending in ("", ".gz") for name in _IDX_NAMES[key])
    return next((path for path in candidates if path.is_file()), None)


def _not_found(folder: Path, key: str) -> DataError:
    files = ", ".join(names[0] for names in _IDX_NAMES.values())
    return DataError(f"data: {folder}/{_IDX_NAMES[key][0]}.gz not found; expected {files}, .gz or not")


def _advice(name: str) -> str:
    files = ", ".join(f"{names[0]}.gz" for names in _IDX_NAMES.values())
    return f"put {files} into {cache_dir() / name}, or name their folder with --data-dir"


def _download(name: str, url: str) -> Iterator[bytes]:
    """Yield the body of `url` in chunks; network errors become a `DataError`."""
    import http.client  # with TLS and mail headers: a tenth of a start, for what happens once
    import urllib.error
    import urllib.request

    def require_secure(url: str) -> None:
        if url.partition(":")[0].lower() not in _SCHEMES:
            raise DataError(
                f"{missing} can only be fetched by {' or '.join(_SCHEMES)}: {one_line(url)}; {_advice(name)}"
            )

    class Redirects(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
            try:
                require_secure(newurl)
            except DataError:
                fp.close()
                raise
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    deadline = time.monotonic() + FETCH_TIMEOUT
    missing = f"data: {name} is not on this machine and {url}"
    require_secure(url)
    try:
        with urllib.request.build_opener(Redirects).open(url, timeout=CONNECT_TIMEOUT) as response:
            announced, received = response.headers.get("Content-Length"), 0
            while True:
                try:
                    chunk = response.read1(CHUNK_BYTES)  # only the available bytes: a server may send one a second
                except http.client.IncompleteRead as error:
                    received += len(error.partial)
                    chunk = b""
                    announced = announced or "more"
                if not chunk:
                    break
                received += len(chunk)
                if time.monotonic() > deadline:
                    raise DataError(f"{missing} takes longer than {FETCH_TIMEOUT:.0f} s; {_advice(name)}")
                yield chunk
            if announced is not None and announced != str(received):
                raise DataError(
                    f"{url}: {announced} bytes announced, {received} received; try again, or {_advice(name)}"
                )
    except urllib.error.HTTPError as error:
        with error:
            raise DataError(f"{missing} answers {error.code} {error.reason}; {_advice(name)}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = one_line(getattr(error, "reason", None) or error)
        raise DataError(f"{missing} cannot be reached ({reason}); {_advice(name)}") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_sha256(path: Path) -> str:
    with stream_errors(str(path)), GzipFile(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache folder, which is created if necessary and writable by its owner only."""
    lock = folder / ".lock"
    try:
        with own_folder(folder, 0o022), held(lock, FETCH_TIMEOUT, "works there"):
            yield
    except TimeoutError as error:
        raise OutputError(f"{lock}: {error}; end it, or set DPTRAIN_CACHE") from None
    except OutputError:
        raise
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        reason = getattr(error, "strerror", None) or one_line(error)
        raise OutputError(f"{folder}: cannot write the cache ({reason}); set DPTRAIN_CACHE to another folder") from None


def _replacing(path: Path) -> AbstractContextManager[Path]:
    return replacing_locked(path, path.with_name(f"{path.name}.part"), 0o022)
