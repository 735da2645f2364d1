"""Texts and sounds of a folder as batches: `utils.text_dataset_from_directory` and `audio_dataset_from_directory`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.batches.labelled_files import FOLLOW, FileDataset, FileKind, FileSelection, SplitOptions, make_datasets
from dptrain.data.readers.pictures import require_inside
from dptrain.data.readers.wave import decoded_wave
from dptrain.data.sources import format_bytes
from dptrain.data.texts import text_array
from dptrain.errors import ConfigError, DataError, printable
from dptrain.registry.arguments import checked_arguments
from dptrain.runtime.defaults import DEFAULT_MAX_BYTES
from dptrain.runtime.storage.files import open_regular, read_at_most

Array = npt.NDArray[Any]
TEXT_FILES, SOUND_FILES = FileKind("text files", "texts", (".txt",)), FileKind("audio files", "sounds", (".wav",))
# Most waiting batches.
_AHEAD = 4
# How many times as large as its sounds a batch above `max_bytes` may be.
_MOST_PADDING = 4
FileReader = Callable[[Sequence[Path]], Array]


class ReadDataset(FileDataset):
    """Batches of files that a function reads, with `map` applied."""

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        labels: Array | None,
        class_names: list[str] | None,
        batch_size: int,
        seed: int | None,
        read: FileReader,
        change: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(root, files, labels, class_names, batch_size, seed, _AHEAD)
        self._read, self._change = read, change

    def map(self, function: Callable[..., Any]) -> "ReadDataset":
        """Return the batches mapped by a function, as `tf.data.Dataset.map`."""
        before = self._change

        def change(*batch: Any) -> Any:
            result = batch if before is None else before(*batch)
            return function(*result) if isinstance(result, tuple) else function(result)

        arguments = (self._root, self._files, self._labels, self.class_names, self._batch_size, self._seed)
        return ReadDataset(*arguments, self._read, change)

    def shard(self, index: int, part: int, parts: int) -> Any:
        """Read and return one part of a batch."""
        places = self._files_of_part(index, part, parts)
        x = self._read([self._root / self._files[place] for place in places])
        batch = (x,) if self._labels is None else (x, self._labels[places])
        if self._change is not None:
            return self._change(*batch)
        return x if self._labels is None else batch


def _bytes_of(path: Path, root: Path, follow_links: bool, max_bytes: int) -> bytes:
    """Return a file's content; refuse links out of the folder and files above `max_bytes`."""
    if not follow_links:
        require_inside(path, root, FOLLOW)
    try:
        with open_regular(path) as file:
            content = read_at_most(file, max_bytes)
    except OSError as error:
        raise DataError(f"{printable(str(path))}: {error.strerror or error}") from error
    if len(content) > max_bytes:
        raise DataError(f"{printable(str(path))}: more than max_bytes = {format_bytes(max_bytes)}")
    return content


@checked_arguments
def text_dataset_from_directory(
    directory: str | os.PathLike[str],
    labels: Any = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    follow_links: bool = False,
    format: str = "tf",
    verbose: bool = True,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Any:
    """Return the .txt files of a folder as batches of texts, as `keras.utils.text_dataset_from_directory`. Collective.

    `dataset.map(lambda x, y: (vectorize(x), y))` turns texts into input of `fit`. Arguments that are not listed, and
    errors, are those of `image_dataset_from_directory`.

    Args:
        max_length: bytes at which texts are cut.
        max_bytes: of the largest file (not in Keras).

    Returns:
        A data set of arrays of texts (rows,), and labels; two for subset "both".
    """
    root = Path(directory)

    def read(paths: Sequence[Path]) -> Array:
        contents = [_bytes_of(path, root, follow_links, max_bytes)[:max_length] for path in paths]
        return text_array([content.decode("utf-8", "replace") for content in contents])

    selection = FileSelection(TEXT_FILES, labels, label_mode, class_names, batch_size, follow_links)
    parts = SplitOptions(shuffle, seed, validation_split, subset, verbose)
    return make_datasets(root, selection, parts, _maker(root, batch_size, read))


def _maker(root: Path, batch_size: int, read: FileReader) -> Callable[..., ReadDataset]:
    def make(files: Sequence[str], targets: Array | None, names: list[str] | None, seed: int | None) -> ReadDataset:
        return ReadDataset(root, files, targets, names, batch_size, seed, read)

    return make


@checked_arguments
def audio_dataset_from_directory(
    directory: str | os.PathLike[str],
    labels: Any = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    batch_size: int = 32,
    sampling_rate: int | None = None,
    output_sequence_length: int | None = None,
    ragged: bool = False,
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    follow_links: bool = False,
    verbose: bool = True,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Any:
    """Return a folder's .wav files as batches of sounds, as `keras.utils.audio_dataset_from_directory`. Collective.

    Arguments that are not listed are those of `image_dataset_from_directory`.

    Args:
        sampling_rate: required of all files; None for any (none is converted).
        output_sequence_length: samples to which sounds are cut or padded with zeros; by default the longest of a batch.
        ragged: only False.
        max_bytes: of the largest file (not in Keras).

    Returns:
        A data set of (rows, samples, channels), float32, of -1 to 1 where files have integers, and labels; two for
        subset "both".

    Raises:
        ConfigError: as `image_dataset_from_directory`.
        DataError: likewise; on reading a batch also a file that is truncated, no sound of integers of 8, 16, 24 or 32
            bits or floating-point numbers of 32 or 64 bits, or differs in rate or channels from the first.
    """
    if ragged:
        raise ConfigError("not supported: ragged tensors; pass output_sequence_length=")
    if output_sequence_length is not None and output_sequence_length < 0:
        raise ConfigError(f"output_sequence_length = {output_sequence_length}: expected 0 or more")
    root = Path(directory)

    def read(paths: Sequence[Path]) -> Array:
        sounds = [decoded_wave(_bytes_of(path, root, follow_links, max_bytes), path, sampling_rate) for path in paths]
        return _padded(sounds, paths, output_sequence_length, max_bytes)

    selection = FileSelection(SOUND_FILES, labels, label_mode, class_names, batch_size, follow_links)
    parts = SplitOptions(shuffle, seed, validation_split, subset, verbose)
    return make_datasets(root, selection, parts, _maker(root, batch_size, read))


def _padded(sounds: Sequence[Array], paths: Sequence[Path], length: int | None, max_bytes: int) -> Array:
    """Return sounds of a batch as an array; refuse one so long that padding the others to it takes too much."""
    channels = sounds[0].shape[1] if sounds else 1
    for sound, path in zip(sounds, paths, strict=True):
        if sound.shape[1] != channels:
            raise DataError(f"{printable(str(path))}: {sound.shape[1]} channels; others have {channels}")
    lengths = [len(sound) for sound in sounds]
    longest = max(lengths, default=0) if length is None else length
    needed = 4 * len(sounds) * longest * channels
    if needed > max_bytes and needed > _MOST_PADDING * 4 * sum(lengths) * channels:
        where = printable(str(paths[int(np.argmax(lengths))]))
        raise DataError(
            f"{where}: {max(lengths):,} samples, and padding {len(sounds)} sounds to {longest:,} takes "
            f"{format_bytes(needed)} > max_bytes = {format_bytes(max_bytes)}; pass a smaller output_sequence_length="
        )
    padded = np.zeros((len(sounds), longest, channels), np.float32)
    for row, sound in zip(padded, sounds, strict=True):
        row[: len(sound)] = sound[:longest]
    return padded
