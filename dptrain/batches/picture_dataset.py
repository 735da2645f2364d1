"""Pictures of a folder as batches, decoded by threads: `utils.image_dataset_from_directory`."""

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain.batches.labelled_files import FOLLOW, FileDataset, FileKind, FileSelection, SplitOptions, make_datasets
from dptrain.batches.resampling import resized
from dptrain.batches.sampling import fixed_shards
from dptrain.data.readers.images import convert_to, img_to_array
from dptrain.data.readers.pictures import open_picture, pillow, require_inside
from dptrain.data.sources import check_declared, format_bytes
from dptrain.errors import ConfigError, DataError, printable
from dptrain.ops.image.resizing import RESIZE_INTERPOLATIONS
from dptrain.registry.arguments import checked_arguments
from dptrain.registry.names import lookup
from dptrain.runtime.defaults import DEFAULT_MAX_BYTES
from dptrain.runtime.image_format import checked_format

Array = npt.NDArray[Any]

PICTURE_FILES = FileKind("images", "pictures", (".bmp", ".gif", ".jpeg", ".jpg", ".png"))
_CHANNELS = {"grayscale": 1, "rgb": 3, "rgba": 4}
# Most waiting batches, however small; one thread is two ahead.
_AHEAD = 10


# Of a picture's side.
_MOST_PIXELS = 1 << 20


@dataclass(frozen=True)
class Decoding:
    """How picture files become arrays: the arguments of `image_dataset_from_directory`."""

    size: tuple[int, ...]  # (height, width)
    color_mode: str  # "grayscale", "rgb" or "rgba"
    interpolation: str  # as in `ops.image.resize`
    crops: bool  # crop rather than distort
    pads: bool  # pad rather than distort
    data_format: str  # "channels_last" or "channels_first"
    bad: str  # "stop" or "skip", for files that cannot be decoded
    follow_links: bool  # whether links may lead out of the folder
    max_bytes: int  # of the largest picture, and of all that wait

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an array."""
        channels = (_CHANNELS[self.color_mode],)
        return (*channels, *self.size) if self.data_format == "channels_first" else (*self.size, *channels)

    def read(self, path: Path, root: Path) -> Array:
        """Return the pixels of a file, float32, 0 to 255."""
        if not self.follow_links:
            require_inside(path, root, FOLLOW)
        with open_picture(path) as opened:
            check_declared(
                printable(str(path)), (opened.height, opened.width, _CHANNELS[self.color_mode]), 4, self.max_bytes
            )
            x = img_to_array(convert_to(opened, self.color_mode, path, keeps_depth=False), "channels_last")
        pixels = resized(x, self.size, self.interpolation, crops=self.crops, pads=self.pads)
        return pixels.transpose(2, 0, 1) if self.data_format == "channels_first" else pixels


class PictureDataset(FileDataset):
    """Batches of pictures; returned by `image_dataset_from_directory`."""

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        labels: Array | None,
        class_names: list[str] | None,
        batch_size: int,
        decoding: Decoding,
        seed: int | None,
    ) -> None:
        comm = comms.current()
        parts = comm.replicas if fixed_shards() is None else 1
        nbytes = math.prod(decoding.shape) * 4 * math.ceil(min(batch_size, len(files)) / parts)
        ahead = min(_AHEAD, decoding.max_bytes // nbytes)
        if ahead < 2:
            raise ConfigError(
                f"a rank keeps two batches, and its part of {batch_size} pictures takes {format_bytes(nbytes)}; "
                f"max_bytes = {format_bytes(decoding.max_bytes)}: take fewer or smaller pictures, or raise max_bytes"
            )
        super().__init__(root, files, labels, class_names, batch_size, seed, ahead)
        self._decoding = decoding
        self.skipped: list[str] = []

    def shard(self, index: int, part: int, parts: int) -> Any:
        """Decode and return one part of a batch."""
        places = self._files_of_part(index, part, parts)
        x = np.empty((len(places), *self._decoding.shape), np.float32)
        good = np.ones(len(places), bool)
        for row, place in enumerate(places):
            try:
                x[row] = self._decoding.read(self._root / self._files[place], self._root)
            except DataError as error:
                if self._decoding.bad != "skip":
                    raise DataError(f"{error}; remove it, or bad='skip'") from error
                good[row] = False
                self._skip(self.file_paths[place], str(error))
        if not good.all():
            x, places = x[good], places[good]
        return x if self._labels is None else (x, self._labels[places])

    def _skip(self, path: str, why: str) -> None:
        """Warn of a skipped file, once a rank."""
        if path not in self.skipped:
            self.skipped.append(path)
            warnings.warn(printable(f"skipped: {why}"), stacklevel=2)


@checked_arguments
def image_dataset_from_directory(
    directory: str | os.PathLike[str],
    labels: Any = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    batch_size: int = 32,
    image_size: int | Sequence[int] = (256, 256),
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    interpolation: str = "bilinear",
    follow_links: bool = False,
    crop_to_aspect_ratio: bool = False,
    pad_to_aspect_ratio: bool = False,
    data_format: str | None = None,
    format: str = "tf",
    verbose: bool = True,
    *,
    bad: str = "stop",
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Any:
    """Return the pictures of a folder as batches for `fit`, as `keras.utils.image_dataset_from_directory`. Collective.

    Pictures are files that end in .bmp, .gif, .jpeg, .jpg or .png, at any depth; only the first frame counts.

    Args:
        directory: with one folder a class, unless labels are given or there are none.
        labels: "inferred" from the folders, a list of an integer for each file in the order of the paths, or None.
        label_mode: "int" (rows,), "categorical" (rows, classes), "binary" (rows, 1), or None for pictures alone.
        class_names: the folders to take, in the order of the labels; by default all, sorted.
        color_mode: "rgb", "rgba" or "grayscale".
        batch_size: of a global batch.
        image_size: (height, width) of all results, or one number for both.
        shuffle: whether each pass has another order.
        seed: of the orders and of the split; by default that of `set_random_seed`.
        validation_split: the fraction at the end of the first order that is the validation part.
        subset: "training", "validation" or "both", with `validation_split`.
        interpolation: as `ops.image.resize`.
        follow_links: whether links may lead out of the folder.
        crop_to_aspect_ratio: crop rather than distort.
        pad_to_aspect_ratio: pad rather than distort.
        data_format: "channels_last" or "channels_first"; None for `config.image_data_format()`.
        format: "tf" or "grain", as in Keras; makes no difference.
        verbose: whether rank 0 prints how many files there are.
        bad: "stop" at a damaged file or one that is no picture, or "skip" it with a warning (not in Keras).
        max_bytes: of the largest decoded picture, and of waiting ones, on each rank (not in Keras).

    Returns:
        A `PictureDataset`, two for subset "both".

    Raises:
        ConfigError: an unknown argument or combination, or Pillow is missing.
        DataError: the folder is missing, it or a class has no pictures, or a link leads out of it.
        AgreedError: either of these, on all ranks, under mpirun.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    looks = (crop_to_aspect_ratio, pad_to_aspect_ratio, checked_format(data_format), bad, follow_links, max_bytes)
    decoding = Decoding(size, color_mode, interpolation.lower(), *looks)
    _check(decoding)
    selection = FileSelection(PICTURE_FILES, labels, label_mode, class_names, batch_size, follow_links)
    parts = SplitOptions(shuffle, seed, validation_split, subset, verbose)

    def make(files: Sequence[str], targets: Array | None, names: list[str] | None, order: int | None) -> PictureDataset:
        return PictureDataset(Path(directory), files, targets, names, batch_size, decoding, order)

    return make_datasets(Path(directory), selection, parts, make)


def _check(decoding: Decoding) -> None:
    if decoding.color_mode not in _CHANNELS:
        raise ConfigError(
            f'`color_mode` must be one of {{"rgb", "rgba", "grayscale"}}. Received: color_mode={decoding.color_mode}'
        )
    if len(decoding.size) != 2 or not all(type(n) is int and 0 < n <= _MOST_PIXELS for n in decoding.size):
        raise ConfigError(
            f"Invalid `image_size` value. Expected a tuple of 2 integers. Received: image_size={decoding.size}"
        )
    lookup("interpolation", decoding.interpolation, dict.fromkeys(RESIZE_INTERPOLATIONS))
    if decoding.crops and decoding.pads:
        raise ConfigError("Only one of `pad_to_aspect_ratio`, `crop_to_aspect_ratio` can be set to `True`.")
    if decoding.bad not in ("stop", "skip"):
        raise ConfigError(f"bad = {decoding.bad!r}: expected 'stop' or 'skip'")
    pillow()
