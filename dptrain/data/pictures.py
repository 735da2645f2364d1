"""Folders of pictures, one folder a class, decoded by Pillow.

DIR/cat/*.png, DIR/dog/*.jpg ...; or the same below DIR/train and DIR/test (or val, valid, validation). Only headers are
read until all is known: size, colours, bytes. Files that begin with a dot are passed over. Of several frames the first
counts; transparency is dropped.
"""

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.raw import RawFiles, cut_off, require_part, share
from dptrain.data.sources import DEFAULT_MAX_BYTES, check_declared
from dptrain.errors import ConfigError, DataError, printable
from dptrain.registry.names import suggestion
from dptrain.runtime.extras import pip_install
from dptrain.runtime.files import open_regular
from dptrain.runtime.launcher import usable_cores
from dptrain.runtime.text import one_line

Array = npt.NDArray[Any]

# In front of a folder's path, says that it is one of pictures.
PICTURES = "images:"
# Pillow reads more, some by other programs (EPS) or of many pages (PDF).
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
_GREY, _COLOURS = ("1", "L", "LA", "La"), ("P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr")
_ORIENTATION = 0x0112  # of EXIF: 5 to 8 lie on their side
_TEST = ("test", "val", "valid", "validation")
MOST_PICTURES = 10_000_000
_IGNORED = ("thumbs.db", "desktop.ini")


@dataclass(frozen=True)
class PictureOptions:
    """What the command line says about pictures.

    Attributes:
        size: (height, width) that all are brought to; None where they have one size.
        bad: "stop" at a file that is no good picture, or "skip" it.
        test_split: the test part where there is no folder of it, of the pictures.
        follow_links: whether links may lead out of the folder.
    """

    size: tuple[int, int] | None = None
    bad: str = "stop"
    test_split: float = 0.2
    follow_links: bool = False


@dataclass(frozen=True)
class _Picture:
    """A picture whose header was read."""

    path: Path
    height: int
    width: int
    is_grey: bool


def is_picture_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder of folders, and has none of the files of an IDX data set."""
    folder = Path(path)
    if not folder.is_dir():
        return False
    entries = list(folder.iterdir())
    return not any("ubyte" in one.name for one in entries) and any(one.is_dir() for one in entries)


class PictureFiles(RawFiles):
    """A folder of pictures.

    Args:
        path: of it.
        asked: what the command line says about it.
        max_bytes: the largest that each array may be.
    """

    def __init__(self, path: str, asked: PictureOptions, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._root = Path(path)
        super().__init__(self._root.resolve().name)
        self._asked, self._max_bytes = asked, max_bytes

    @cached_property
    def _folders(self) -> tuple[Path, Path | None]:
        """The folders of the training part and of the test part."""
        train = self._root / "train"
        if not train.is_dir():
            return self._root, None
        there = [one for one in _TEST if (self._root / one).is_dir()]
        if len(there) > 1:
            self.notes.append(f"{self._root / there[0]} is the test part; {', '.join(there[1:])} is not used")
        return train, self._root / there[0] if there else None

    @cached_property
    def _train(self) -> tuple[list[_Picture], list[str]]:
        return self._scanned(self._folders[0])

    def _scanned(self, folder: Path) -> tuple[list[_Picture], list[str]]:
        """Return the good pictures of a part, and the class of each."""
        pictures: list[_Picture] = []
        classes: list[str] = []
        for name, files in _classes(folder):
            if not self._asked.follow_links:
                for one in (folder / name, *files):
                    require_inside(one, self._root, "--follow-links")
            found = _headers(files, self._asked.bad, self.notes)
            if not found:
                raise DataError(f"{folder / name}: no pictures; remove the folder, or fill it")
            pictures += found
            classes += [name] * len(found)
        return pictures, classes

    def _learn(self) -> Preprocessing:
        folder, test = self._folders
        pictures, classes = self._train
        names = tuple(sorted(set(classes)))
        if len(names) < 2:
            raise DataError(f"{folder}: {len(names)} folder of pictures; expected one a class, at least two")
        size = self._asked.size or _one_size(folder, pictures)
        grey = all(one.is_grey for one in pictures)
        known = Preprocessing(
            "multiclass", class_names=names, picture=(*size, 1 if grey else 3), resize=self._asked.size is not None
        )
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        about = f"{size[0]}x{size[1]} {'grey' if grey else 'RGB'}"
        self.notes.append(f"{len(pictures):,} pictures, {about}; {len(names)} classes: {shown}")
        if test is None:
            advice = "folders train and test name others"
            self.notes.append(require_part(len(pictures), self._asked.test_split, advice))
        return known

    def _encode(self) -> list[Array]:
        x, y = self._decoded(*self._train)
        if self._folders[1] is None:
            return cut_off(x, y, self._asked.test_split)
        return [x, y, *self._decoded(*self._scanned(self._folders[1]))]

    def _decoded(self, pictures: list[_Picture], classes: list[str]) -> tuple[Array, Array]:
        x, good = decode(pictures, self.known, self._asked.bad, self.notes, self._max_bytes)
        return x, labels(classes, self.known, str(self._root))[good]


def labels(classes: Sequence[str], known: Preprocessing, where: str) -> npt.NDArray[np.int32]:
    """Return the labels of classes' names.

    Raises:
        DataError: training has not seen one.
    """
    number = {name: label for label, name in enumerate(known.class_names)}
    for name in sorted(set(classes) - set(number)):
        hint = suggestion(name, known.class_names)
        raise DataError(f"{where}: class {name!r}, which training has not seen{hint}")
    return np.array([number[name] for name in classes], np.int32)


def decode(
    pictures: Sequence[_Picture], known: Preprocessing, bad: str, notes: list[str], max_bytes: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return pictures as an array, and the places of those that decode.

    Args:
        pictures: whose headers were read.
        known: their size and colours.
        bad: "stop" at one that does not decode, or "skip" it.
        notes: gets a line about those that were skipped.
        max_bytes: the largest that the array may be.

    Returns:
        (good, height, width, channels) and (good,).

    Raises:
        DataError: one does not decode, or has another size or other colours than the model takes.
    """
    from PIL import Image, ImageOps

    assert known.picture is not None
    height, width, channels = known.picture
    check_declared(str(pictures[0].path.parent.parent), (len(pictures), *known.picture), 1, max_bytes)
    x = np.empty((len(pictures), height, width, channels), np.uint8)

    def one(place: int) -> str:
        picture = pictures[place]
        if (picture.height, picture.width) != (height, width) and not known.resize:
            raise DataError(
                f"{picture.path}: {picture.height}x{picture.width}, expected {height}x{width}; train with --image-size "
                "to have pictures resized"
            )
        if channels == 1 and not picture.is_grey:
            raise DataError(f"{picture.path}: coloured, and the model was trained on grey pictures; convert it")
        try:
            with open_picture(picture.path) as opened:
                image: Any = ImageOps.exif_transpose(opened)
                image = image.convert("L" if channels == 1 else "RGB")
                if image.size != (width, height):
                    image = image.resize((width, height), Image.Resampling.BILINEAR)
                x[place] = np.asarray(image).reshape(height, width, channels)
        except DataError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(usable_cores()) as pool:
        faults = list(pool.map(one, range(len(pictures))))
    good = np.flatnonzero([not fault for fault in faults])
    if len(good) < len(pictures):
        _stop_or_note([fault for fault in faults if fault], bad, notes)
        return x[good], good
    return x, good


def encode_pictures(
    path: str, known: Preprocessing, comm: Communicator, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[Array, Array | None]:
    """Return pictures for a model that is there already, and labels where they lie in folders of classes. Collective.

    Args:
        path: of a picture, of a folder of pictures, or of a folder of classes' folders.
        known: the model's.
        comm: the ranks.
        max_bytes: the largest that x may be.

    Returns:
        (rows, height, width, channels) and (rows,), in the order of the names; one copy a node.

    Raises:
        AgreedError: on every rank, whatever was wrong on any.
    """

    def make() -> list[Array]:
        folder = Path(path)
        if is_picture_folder(folder):
            found = [(name, file) for name, files in _classes(folder) for file in files]
        else:
            found = [("", file) for file in (_files(folder) if folder.is_dir() else [folder])]
        if not found:
            raise DataError(f"{path}: no pictures")
        for _, file in found if folder.is_dir() else ():
            require_inside(file, folder, "name the folder that it leads to")
        pictures = _headers([file for _, file in found], "stop", [])
        x, _ = decode(pictures, known, "stop", [], max_bytes)
        return [x] if not found[0][0] else [x, labels([name for name, _ in found], known, path)]

    x, *rest = share(comm, make)
    return x, rest[0] if rest else None


def _classes(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield the classes of a folder, each with its files.

    Raises:
        DataError: there are files beside the folders.
    """
    entries = _entries(folder)
    for entry in entries:
        if not entry.is_dir():
            raise DataError(f"{entry}: a file beside the folders of classes; put it into one, or remove it")
    for entry in entries:
        yield entry.name, _files(entry)


def _files(folder: Path) -> list[Path]:
    entries = _entries(folder)
    for entry in entries:
        if entry.is_dir():
            raise DataError(f"{entry}: a folder in the folder of a class; expected pictures")
    return entries


def _entries(folder: Path) -> list[Path]:
    found = sorted(folder.iterdir())
    if len(found) > MOST_PICTURES:
        raise DataError(f"{folder}: {len(found)} files, at most {MOST_PICTURES} are read")
    return [one for one in found if not one.name.startswith(".") and one.name.lower() not in _IGNORED]


def _headers(files: Sequence[Path], bad: str, notes: list[str]) -> list[_Picture]:
    """Return the size and the colours of pictures.

    Raises:
        ConfigError: as `pillow`.
        DataError: one is no picture, and these are not to be skipped.
    """
    found, faults = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow().DecompressionBombWarning)
        for path in files:
            try:
                with open_picture(path) as image:
                    if image.mode not in (*_GREY, *_COLOURS):
                        raise DataError(f"{path}: pixels of mode {image.mode}; expected 8 bits a colour")
                    width, height = image.size
                    if image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8):
                        width, height = height, width
                    found.append(_Picture(path, height, width, image.mode in _GREY))
            except DataError as error:
                faults.append(str(error))
    _stop_or_note(faults, bad, notes)
    return found


def _stop_or_note(faults: Sequence[str], bad: str, notes: list[str]) -> None:
    if not faults:
        return
    more = f" ({len(faults)} such files in all)" if len(faults) > 1 else ""
    if bad != "skip":
        raise DataError(f"{faults[0]}{more}; remove it, or --bad-pictures skip")
    notes.append(f"skipped: {faults[0]}{more}")


def require_inside(path: Path, root: Path, advice: str) -> None:
    """Refuse a file or folder that is a link, or lies behind one, out of a folder.

    Args:
        path: of the file or folder.
        root: the folder.
        advice: what else to do than to put the pictures there.

    Raises:
        DataError: it does.
    """
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{printable(str(path))}: a link out of {root}; put the pictures there, or {advice}")


def pillow() -> Any:
    """Return `PIL.Image`.

    Raises:
        ConfigError: Pillow is missing.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(f"pictures need Pillow: {pip_install('images')}") from None
    return Image


@contextmanager
def open_picture(path: str | Path | IO[bytes]) -> Iterator[Any]:
    """Yield Pillow's picture of a file, of which only the header has been read; links are followed.

    Args:
        path: of the file, or the file itself.

    Raises:
        ConfigError: Pillow is missing.
        DataError: the file is missing, no picture, damaged or too large, also where the pixels are read within.
    """
    image = pillow()
    with _reading(printable(str(path)) if isinstance(path, str | Path) else "a picture"), ExitStack() as stack:
        file = stack.enter_context(open_regular(Path(path))) if isinstance(path, str | Path) else path
        yield stack.enter_context(image.open(file, formats=_FORMATS))


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn what Pillow raises into a `DataError`."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: not found") from None
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{path}: no picture; expected {', '.join(_FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: too large: {one_line(error).partition(',')[0]}") from None
    except Exception as error:  # decoders of damaged files raise what they like
        raise DataError(f"{path}: damaged ({one_line(error)[:100]})") from None


def _one_size(folder: Path, pictures: Sequence[_Picture]) -> tuple[int, int]:
    """Return the size that all pictures have.

    Raises:
        DataError: they have several.
    """
    sizes = Counter((one.height, one.width) for one in pictures)
    if len(sizes) > 1:
        shown = ", ".join(f"{height}x{width} ({count})" for (height, width), count in sizes.most_common(3))
        more = f" and {len(sizes) - 3} more" if len(sizes) > 3 else ""
        height, width = sizes.most_common(1)[0][0]
        raise DataError(
            f"{folder}: pictures of {len(sizes)} sizes (height x width): {shown}{more}; --image-size {height}x{width} "
            "resizes them"
        )
    return next(iter(sizes))
