"""Pictures of a folder as batches, decoded by threads ahead of a training: `utils.image_dataset_from_directory`.

Rank 0 lists the files; each rank decodes its own rows of a batch, when they are about to be needed. The order is
f(seed, pass), so that every number of ranks trains on the same batches.
"""

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import comm as comms
from dptrain.batches.py_dataset import PyDataset
from dptrain.batches.resampling import resized
from dptrain.batches.sampling import fixed_shards
from dptrain.comm.parts import cut
from dptrain.data.images import convert_to, img_to_array
from dptrain.data.pictures import MOST_PICTURES, open_picture, pillow, require_inside
from dptrain.data.sources import check_declared, format_bytes
from dptrain.errors import ConfigError, DataError, printable
from dptrain.ops.image import RESIZE_INTERPOLATIONS
from dptrain.random import Purpose, default_seed, stream
from dptrain.registry.names import lookup
from dptrain.runtime import terminal
from dptrain.runtime.defaults import DEFAULT_MAX_BYTES
from dptrain.runtime.failure import phase
from dptrain.runtime.launcher import share_of_cores

Array = npt.NDArray[Any]

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_CHANNELS = {"grayscale": 1, "rgb": 3, "rgba": 4}
_LABEL_MODES = ("int", "categorical", "binary", None)
_SUBSETS = ("training", "validation", "both", None)
_FOLLOW = "follow_links=True"
# Batches that wait at most, however small they are; one thread is two ahead.
_AHEAD = 10


@dataclass(frozen=True)
class Decoding:
    """How files become arrays.

    Attributes:
        size: (height, width).
        color_mode: "grayscale", "rgb" or "rgba".
        interpolation: as of `ops.image.resize`.
        crops: cut off what is too high or wide rather than distort.
        pads: add what is missing rather than distort.
        data_format: "channels_last", which None stands for, or "channels_first".
        bad: "stop" at a file that is no picture or is damaged, or "skip" it.
        follow_links: whether links may lead out of the folder.
        max_bytes: of the largest picture, and of what waits.
    """

    size: tuple[int, ...]
    color_mode: str
    interpolation: str
    crops: bool
    pads: bool
    data_format: str | None
    bad: str
    follow_links: bool
    max_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array."""
        channels = (_CHANNELS[self.color_mode],)
        return (*channels, *self.size) if self.data_format == "channels_first" else (*self.size, *channels)

    def read(self, path: Path, root: Path) -> Array:
        """Return the pixels of a file, float32, 0 to 255.

        Raises:
            DataError: it is no picture, damaged or too large, or a link out of the folder.
        """
        if not self.follow_links:
            require_inside(path, root, _FOLLOW)
        with open_picture(path) as opened:
            check_declared(
                printable(str(path)), (opened.height, opened.width, _CHANNELS[self.color_mode]), 4, self.max_bytes
            )
            x = img_to_array(convert_to(opened, self.color_mode, path, keeps_depth=False))
        made = resized(x, self.size, self.interpolation, crops=self.crops, pads=self.pads)
        return made.transpose(2, 0, 1) if self.data_format == "channels_first" else made


class PictureDataset(PyDataset):
    """Batches of pictures; made by `image_dataset_from_directory`.

    Args:
        root: the folder.
        files: below it.
        labels: of the files, (files,) or (files, classes); None for pictures alone.
        class_names: of the labels.
        batch_size: pictures of a global batch.
        decoding: how they become arrays.
        seed: of the order; None for that of the files.

    Attributes:
        class_names: as above.
        file_paths: of the pictures, in the order of the files.
        skipped: the paths of the files that this rank has skipped.

    Raises:
        ConfigError: two batches are larger than what may wait.
    """

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
                f"two batches wait, and a rank's part of {batch_size} pictures takes {format_bytes(nbytes)}; "
                f"max_bytes = {format_bytes(decoding.max_bytes)}: take fewer or smaller pictures, or raise max_bytes"
            )
        super().__init__(workers=min(ahead, share_of_cores(comm.local_size)), max_queue_size=ahead)
        self._root, self._files, self._labels, self._decoding = root, files, labels, decoding
        self._batch_size, self._seed, self._loops = batch_size, seed, count()
        self.class_names, self.file_paths = class_names, [str(root / one) for one in files]
        self.skipped: list[str] = []
        self.on_pass_begin(0)

    def __len__(self) -> int:
        """Return the number of batches."""
        return math.ceil(len(self._files) / self._batch_size)

    def __getitem__(self, index: int) -> Any:
        """Return batch `index`: pictures (rows, height, width, channels), float32, and labels where there are any."""
        return self.shard(index, 0, 1)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass, each time in another order where they are shuffled."""
        self.on_pass_begin(next(self._loops))
        return super().__iter__()

    def on_pass_begin(self, number: int) -> None:
        """Set the order of pass `number`."""
        places = np.arange(len(self._files))
        self._order = places if self._seed is None else stream(self._seed, Purpose.SHUFFLE, number).permutation(places)

    def shard(self, index: int, part: int, parts: int) -> Any:
        """Return a part of a batch, which is all that is decoded.

        Raises:
            DataError: as `Decoding.read`, unless bad pictures are skipped.
        """
        places = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        places = places[slice(*cut(0, len(places), parts)[part])]
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
        """Tell of a file once; each rank of its own."""
        if path not in self.skipped:
            self.skipped.append(path)
            warnings.warn(printable(f"skipped: {why}"), stacklevel=2)


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

    Pictures are files that end in .bmp, .gif, .jpeg, .jpg or .png, in any depth; of several frames the first counts.

    Args:
        directory: with one folder a class, unless labels are given or there are none.
        labels: "inferred" from the folders, a list of a whole number for each file in the order of the paths, or None.
        label_mode: "int" (rows,), "categorical" (rows, classes), "binary" (rows, 1), or None for pictures alone.
        class_names: the folders to take, in the order of the labels; by default all, sorted.
        color_mode: "rgb", "rgba" or "grayscale".
        batch_size: of a global batch.
        image_size: (height, width) that all are brought to, or one number for both.
        shuffle: whether each pass has another order.
        seed: of the orders and of what is split off; by default that of `set_random_seed`.
        validation_split: the fraction at the end of the first order that is the validation part.
        subset: "training", "validation" or "both", with `validation_split`.
        interpolation: as `ops.image.resize`.
        follow_links: whether links may lead out of the folder.
        crop_to_aspect_ratio: cut off what is too high or wide rather than distort.
        pad_to_aspect_ratio: add what is missing rather than distort.
        data_format: "channels_last", which None stands for, or "channels_first".
        format: "tf" or "grain", as in Keras; makes no difference.
        verbose: whether rank 0 prints how many files there are.
        bad: "stop" at a file that is no picture or is damaged, or "skip" it with a warning (not in Keras).
        max_bytes: of the largest decoded picture, and of those that wait, on each rank (not in Keras).

    Returns:
        A `PictureDataset`, two for subset "both".

    Raises:
        ConfigError: an argument is unknown or does not go with another, or Pillow is missing.
        DataError: there is no such folder, it or a class has no pictures, or a link leads out of it.
        AgreedError: either of these, on all ranks, under mpirun.
    """
    if labels is None or label_mode is None:
        labels = label_mode = None
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    looks = (crop_to_aspect_ratio, pad_to_aspect_ratio, data_format, bad, follow_links, max_bytes)
    decoding = Decoding(size, color_mode, interpolation.lower(), *looks)
    _check(decoding, labels, label_mode, class_names, batch_size)
    _check_split(validation_split, subset, shuffle, seed)
    chosen = default_seed() if seed is None else seed
    comm, root = comms.current(), Path(directory)
    inferred = isinstance(labels, str)

    def scan() -> list[tuple[str, list[str]]]:
        return list(_scanned(root, class_names if inferred else (), inferred, follow_links)) if comm.rank == 0 else []

    with phase.during("data"):
        listed = comm.broadcast_fact(comm.agree("data", scan) if comm.size > 1 else scan())
    files = [one for _, own in listed for one in own]
    numbers: Array | None = None
    names: list[str] | None = None
    if inferred:
        names = [name for name, _ in listed]
        numbers = np.repeat(np.arange(len(listed), dtype=np.int32), [len(own) for _, own in listed])
    elif labels is not None:
        if len(labels) != len(files):
            raise ConfigError(
                "Expected the lengths of `labels` to match the number of files in the target directory. len(labels) is "
                f"{len(labels)} while we found {len(files)} files in directory {directory}."
            )
        names, numbers = [str(one) for one in sorted(set(labels))], np.asarray(labels, np.int32)
    if label_mode == "binary" and len(names or ()) != 2:
        raise ConfigError(
            f'When passing `label_mode="binary"`, there must be exactly 2 class_names. Received: class_names={names}'
        )
    _tell(f"Found {len(files)} files" + ("." if names is None else f" belonging to {len(names)} classes."), verbose)
    order = np.arange(len(files))
    if shuffle:
        np.random.RandomState(chosen % 2**32).shuffle(order)  # Keras' parts for this seed
    targets = None if numbers is None else _encoded(numbers, label_mode, len(names or ()))

    def part(places: npt.NDArray[np.int64], name: str, shuffled: bool) -> PictureDataset:
        if not len(places):
            raise ConfigError(f"No {name}images found in directory {directory}. Allowed formats: {SUFFIXES}")
        own = [files[place] for place in places]
        targets_of = None if targets is None else targets[places]
        return PictureDataset(root, own, targets_of, names, batch_size, decoding, chosen if shuffled else None)

    if validation_split is None:
        return part(order, "", shuffle)
    held = len(order) - int(validation_split * len(order))
    _tell(f"Using {held} files for training.", verbose and subset != "validation")
    _tell(f"Using {len(order) - held} files for validation.", verbose and subset != "training")
    if subset == "training":
        return part(order[:held], "training ", shuffle)
    if subset == "validation":
        return part(order[held:], "validation ", shuffle)
    return [part(order[:held], "training ", shuffle), part(order[held:], "validation ", False)]


def _tell(line: str, wanted: bool) -> None:
    if wanted and comms.current().rank == 0:
        terminal.say(line)


def _encoded(numbers: Array, label_mode: str | None, classes: int) -> Array:
    """Return labels as the model is to have them."""
    if label_mode == "binary":
        return numbers.astype(np.float32)[:, None]
    return np.eye(classes, dtype=np.float32)[numbers] if label_mode == "categorical" else numbers


def _check(
    decoding: Decoding, labels: Any, label_mode: str | None, class_names: Sequence[str] | None, batch_size: Any
) -> None:
    """Refuse what is wrong whatever the folder holds.

    Raises:
        ConfigError: it is.
    """
    if (isinstance(labels, str) and labels != "inferred") or not isinstance(labels, str | list | tuple | None):
        raise ConfigError(
            "`labels` argument should be a list/tuple of integer labels, of the same size as the number of image files "
            'in the target directory; "inferred"; or None for images alone. Received: ' + f"labels={labels}"
        )
    if class_names and not isinstance(labels, str):
        raise ConfigError(
            f'You can only pass `class_names` if `labels="inferred"`. Received: labels={labels}, and '
            f"class_names={class_names}"
        )
    if label_mode not in _LABEL_MODES:
        raise ConfigError(
            '`label_mode` argument must be one of "int", "categorical", "binary", or None. Received: '
            f"label_mode={label_mode}"
        )
    if decoding.color_mode not in _CHANNELS:
        raise ConfigError(
            f'`color_mode` must be one of {{"rgb", "rgba", "grayscale"}}. Received: color_mode={decoding.color_mode}'
        )
    if len(decoding.size) != 2 or not all(isinstance(one, int) and one > 0 for one in decoding.size):
        raise ConfigError(
            f"Invalid `image_size` value. Expected a tuple of 2 integers. Received: image_size={decoding.size}"
        )
    lookup("interpolation", decoding.interpolation, dict.fromkeys(RESIZE_INTERPOLATIONS))
    if decoding.crops and decoding.pads:
        raise ConfigError("Only one of `pad_to_aspect_ratio`, `crop_to_aspect_ratio` can be set to `True`.")
    if decoding.bad not in ("stop", "skip"):
        raise ConfigError(f"bad = {decoding.bad!r}: expected 'stop' or 'skip'")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"not supported: batch_size={batch_size}; expected a whole number from 1 on")
    img_to_array(np.zeros((1, 1)), decoding.data_format)
    pillow()


def _check_split(validation_split: float | None, subset: str | None, shuffle: bool, seed: int | None) -> None:
    """Refuse parts that are no parts.

    Raises:
        ConfigError: they are not.
    """
    if validation_split is not None and not 0 < validation_split < 1:
        raise ConfigError(f"`validation_split` must be between 0 and 1, received: {validation_split}")
    if subset not in _SUBSETS:
        raise ConfigError(f'`subset` must be either "training", "validation" or "both", received: {subset}')
    if (validation_split is None) != (subset is None):
        raise ConfigError("If `subset` is set, `validation_split` must be set, and inversely.")
    if validation_split is not None and shuffle and seed is None:
        raise ConfigError(
            "If using `validation_split` and shuffling the data, you must provide a `seed` argument, to make sure that "
            "there is no overlap between the training and validation subset."
        )


def _scanned(
    root: Path, class_names: Sequence[str] | None, inferred: bool, follow_links: bool
) -> Iterator[tuple[str, list[str]]]:
    """Yield classes and the files of each, relative to the folder; one without a name where there are no classes.

    Raises:
        ConfigError: a class has no folder.
        DataError: there is no such folder, or a class has no pictures.
    """
    if not root.is_dir():
        raise DataError(f"{root}: not found, or no folder; expected a folder of pictures")
    if not inferred:
        yield "", list(_pictures(root, root, follow_links))
        return
    folders = sorted(one.name for one in root.iterdir() if one.is_dir() and not one.name.startswith("."))
    if class_names is not None and not set(class_names) <= set(folders):
        raise ConfigError(
            "The `class_names` passed did not match the names of the subdirectories of the target directory. Expected: "
            f"{folders} (or a subset of it), but received: class_names={list(class_names)}"
        )
    for name in folders if class_names is None else class_names:
        found = list(_pictures(root / name, root, follow_links))
        if not found:
            raise DataError(
                f"{printable(str(root / name))}: no pictures ({', '.join(SUFFIXES)}); remove the folder, or fill it"
            )
        yield name, found


def _pictures(folder: Path, root: Path, follow_links: bool) -> Iterator[str]:
    """Yield the pictures in a folder in any depth, sorted, relative to the root.

    Raises:
        DataError: a link leads out of the root, or there are too many.
    """
    seen: set[str] = set()  # a link may lead to a folder that it lies in
    found: list[tuple[str, str]] = []
    for where, folders, names in os.walk(folder, followlinks=follow_links):
        real = os.path.realpath(where)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        pictures = [name for name in names if name.lower().endswith(SUFFIXES)]
        for one in (where, *(os.path.join(where, name) for name in pictures)):
            if not follow_links:
                require_inside(Path(one), root, _FOLLOW)
        found += [(where, name) for name in pictures]
        if len(found) > MOST_PICTURES:
            raise DataError(f"{folder}: more than {MOST_PICTURES} pictures")
    for where, name in sorted(found):
        yield os.path.relpath(os.path.join(where, name), root)
