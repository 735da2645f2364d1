"""Keras' small data sets, from the files that Keras keeps in its cache: pinned by their SHA-256, never downloaded.

Texts lie there as pickled lists of numbers. They are read after the checksum of the whole file has been compared, by a
reader that makes NumPy's arrays and Python's own lists and numbers, and refuses everything else.
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
    """Return where a file of Keras' is: at a path of this machine, or under its name in Keras' cache.

    Args:
        name: the user's `path`.
        file: Keras' name of it.
        checksum: that it must have.

    Raises:
        DataError: it is in neither place, or is another file.
    """
    path = Path(name).expanduser()
    if len(path.parts) == 1:
        return Path(get_file(path.name, _FOLDER + file, file_hash=checksum))
    if not path.is_file():
        raise DataError(f"data: {path} not found: expected {file}, as Keras keeps it in ~/.keras/datasets")
    require_checksum(path, checksum)
    return path


def on_all_ranks(read: Callable[[], T]) -> T:
    """Return what every rank reads; where one of them cannot, all of them say so."""
    from dptrain.comm import current

    return current().agree("data", read)


def arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz file that has its pinned checksum."""
    found = {}
    try:
        with zipfile.ZipFile(path) as packed:
            for member in packed.namelist():
                found[member.removesuffix(".npy")] = _array(packed.read(member))
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, EOFError) as error:
        raise DataError(f"{path}: damaged ({error})") from error
    return found


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
    """Reads arrays, lists and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the three names that arrays are made of.

        Raises:
            UnpicklingError: another one is asked for.
        """
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is not read")
        return super().find_class(module, name)


def houses(path: str | Path, file: str, checksum: str, test_split: float, seed: int, most: int | None = None) -> Split:
    """Return a table of houses and their prices, in the order of a seed, split as Keras does.

    Args:
        path: as `cached`, and what follows.
        file: see there.
        checksum: see there.
        test_split: part of the rows that is for tests.
        seed: of the order.
        most: rows that are taken.

    Raises:
        ConfigError: the split is out of range.
        DataError: as `cached`.
    """
    if not 0 <= test_split < 1:
        raise ConfigError(f"Invalid `test_split` argument: {test_split}. It must be between 0 and 1 (exclusive of 1).")
    found = on_all_ranks(lambda: arrays(cached(path, file, checksum)))
    x, y = shuffled(seed, found["x"][:most], found["y"][:most])
    end = int(len(x) * (1 - test_split))
    return (x[:end], y[:end]), (x[end:], y[end:])


def shuffled(seed: int, *columns: Array) -> list[Array]:
    """Return arrays in the order that Keras gives them by a seed."""
    order = np.arange(len(columns[0]))
    np.random.RandomState(seed).shuffle(order)
    return [column[order] for column in columns]


def word_index(path: str | Path, file: str, checksum: str) -> dict[str, int]:
    """Return the numbers of words, from a JSON file."""
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
    """Return texts as Keras prepares them: numbers moved up by `index_from`, a first one, and no long texts.

    Args:
        texts: the numbers of the words of each.
        labels: of each.
        start_char: with which texts begin; None for nothing.
        index_from: what is added to each number; without `start_char` 0 adds nothing.
        maxlen: texts of this length, or longer ones, are left out; None for all.
    """
    begin = [] if start_char is None else [start_char]
    found = [[*begin, *(word + index_from for word in text)] for text in texts]
    kept = [(text, label) for text, label in zip(found, labels, strict=True) if not maxlen or len(text) < maxlen]
    return [text for text, _ in kept], [label for _, label in kept]


def known_words(
    texts: Sequence[Sequence[int]], *, num_words: int | None, skip_top: int, oov_char: int | None
) -> list[list[int]]:
    """Return texts with a number, or nothing, in place of words that are too rare or too usual.

    Args:
        texts: numbers of words.
        num_words: the number from which on words are rare; None for the greatest of all, as in Keras.
        skip_top: numbers below are too usual.
        oov_char: what takes their place; None for nothing.
    """
    end = num_words or max(max(text) for text in texts)
    if oov_char is None:
        return [[word for word in text if skip_top <= word < end] for text in texts]
    return [[word if skip_top <= word < end else oov_char for word in text] for text in texts]


def ragged(texts: Sequence[Sequence[int]]) -> Array:
    """Return lists in an array of objects, (texts,), whatever their lengths."""
    found = np.empty(len(texts), dtype=object)
    found[:] = [list(text) for text in texts]
    return found


def pictures(origin: str, checksum: str, parts: Sequence[Sequence[str]], labels: int, label: int) -> Split:
    """Return CIFAR's pictures, (rows, 32, 32, 3) uint8, and labels, (rows, 1) uint8.

    Args:
        origin: address of the archive of its binary version, whose name it has in the cache.
        checksum: of the archive.
        parts: endings of the names of the files for training, and for tests.
        labels: bytes before each picture.
        label: which of them.

    Raises:
        DataError: the archive is not there, or is another file.
    """

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
