"""Keras' small data sets from its cache: pinned by SHA-256, never downloaded.

Pickled texts are read after a match of their checksum, by an unpickler that creates only arrays, lists and numbers.
"""

import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dptrain.data.cached_files import get_file, require_checksum
from dptrain.errors import ConfigError, DataError

Array = npt.NDArray[Any]
Split = tuple[tuple[Array, Array], tuple[Array, Array]]
T = TypeVar("T")

_FOLDER = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
_IMAGE = 3 * 32 * 32
_ARRAYS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}


def cached(name: str | Path, file: str, checksum: str) -> Path:
    """Return a Keras file's path: the user's path, or by name in Keras' cache."""
    path = Path(name).expanduser()
    if len(path.parts) == 1:
        return Path(get_file(path.name, _FOLDER + file, file_hash=checksum))
    if not path.is_file():
        raise DataError(f"data: {path} not found: expected {file}, as Keras keeps it in ~/.keras/datasets")
    require_checksum(path, checksum)
    return path


def on_all_ranks(read: Callable[[], T]) -> T:
    """Run `read` on every rank and return its result; if one rank fails, all raise. Collective."""
    from dptrain.comm import current

    return current().agree("data", read)


def arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz file whose checksum was verified."""
    by_name = {}
    try:
        with zipfile.ZipFile(path) as packed:
            for member in packed.namelist():
                by_name[member.removesuffix(".npy")] = _array(packed.read(member))
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, EOFError) as error:
        raise DataError(f"{path}: damaged ({error})") from error
    return by_name


def _array(content: bytes) -> Array:
    stream = io.BytesIO(content)
    try:
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
        return array
    except ValueError:  # of objects
        stream.seek(0)
        header = np.lib.format.read_array_header_1_0 if np.lib.format.read_magic(stream)[0] == 1 else None
        if header is None:
            raise
        header(stream)
        return np.asarray(_PlainUnpickler(stream).load())


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a name that arrays need; refuse all others."""
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is not read")
        return super().find_class(module, name)


def houses(path: str | Path, file: str, checksum: str, test_split: float, seed: int, most: int | None = None) -> Split:
    """Return a table of houses and their prices, shuffled by `seed` and split as Keras does."""
    if not 0 <= test_split < 1:
        raise ConfigError(f"Invalid `test_split` argument: {test_split}. It must be between 0 and 1 (exclusive of 1).")
    columns = on_all_ranks(lambda: arrays(cached(path, file, checksum)))
    x, y = shuffled(seed, columns["x"][:most], columns["y"][:most])
    end = int(len(x) * (1 - test_split))
    return (x[:end], y[:end]), (x[end:], y[end:])


def shuffled(seed: int, *columns: Array) -> list[Array]:
    """Return arrays in the order that Keras derives from a seed."""
    order = np.arange(len(columns[0]))
    np.random.RandomState(seed).shuffle(order)
    return [column[order] for column in columns]


def word_index(path: str | Path, file: str, checksum: str) -> dict[str, int]:
    """Return the number of each word, from a JSON file."""
    content = on_all_ranks(lambda: json.loads(cached(path, file, checksum).read_text(encoding="utf-8")))
    return {str(word): int(number) for word, number in content.items()}


def numbered_texts(
    texts: Iterable[Any],
    labels: Iterable[Any],
    *,
    start_char: int | None,
    index_from: int,
    maxlen: int | None,
) -> tuple[list[list[int]], list[Any]]:
    """Return texts as Keras prepares them: behind `start_char`, raised by `index_from`, shorter than `maxlen`."""
    begin = [] if start_char is None else [start_char]
    numbered = [[*begin, *(word + index_from for word in text)] for text in texts]
    pairs = [(text, label) for text, label in zip(numbered, labels, strict=True) if not maxlen or len(text) < maxlen]
    return [text for text, _ in pairs], [label for _, label in pairs]


def limit_vocabulary(
    texts: Sequence[Sequence[int]], *, num_words: int | None, skip_top: int, oov_char: int | None
) -> list[list[int]]:
    """Replace numbers below `skip_top` or from `num_words` on by `oov_char`, or drop them."""
    end = num_words or max(max(text) for text in texts)
    if oov_char is None:
        return [[word for word in text if skip_top <= word < end] for text in texts]
    return [[word if skip_top <= word < end else oov_char for word in text] for text in texts]


def ragged(texts: Sequence[Sequence[int]]) -> Array:
    """Return lists of any lengths as an object array, (texts,)."""
    result = np.empty(len(texts), dtype=object)
    result[:] = [list(text) for text in texts]
    return result


def pictures(origin: str, checksum: str, parts: Sequence[Sequence[str]], labels: int, label: int) -> Split:
    """Return CIFAR's images, (rows, 32, 32, 3), and labels, (rows, 1), number `label` of `labels` bytes; uint8."""

    def read() -> list[list[bytes]]:
        path = get_file(origin=origin, file_hash=checksum)
        try:
            with tarfile.open(path) as archive:
                members = {Path(member.name).name: member for member in archive.getmembers() if member.isfile()}
                return [[_content(archive, members[name]) for name in names] for names in parts]
        except (tarfile.TarError, KeyError, EOFError, OSError) as error:
            raise DataError(f"{path}: damaged ({error})") from error

    (x_train, y_train), (x_test, y_test) = (_rows(b"".join(contents), labels, label) for contents in on_all_ranks(read))
    return (x_train, y_train), (x_test, y_test)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "it is a file"
    return file.read()


def _rows(content: bytes, labels: int, label: int) -> tuple[Array, Array]:
    rows = np.frombuffer(content, np.uint8).reshape(-1, labels + _IMAGE)
    images = rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, label : label + 1].copy()
