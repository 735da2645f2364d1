"""Folders of pictures, one folder a class, decoded by Pillow.

DIR/cat/*.png, DIR/dog/*.jpg ...; or the same below DIR/train and DIR/test (or val, valid, validation). Only headers are
read before the training; pixels when they are needed. Files that begin with a dot are passed over. Of several frames
the first counts; transparency is dropped.
"""

import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dptrain.comm.base import Communicator
from dptrain.comm.parts import cut
from dptrain.data.holdout import split_rows
from dptrain.data.lazy import LazyArray, RowSource
from dptrain.data.loading import LoadedData, Split
from dptrain.data.preprocessing import Preprocessing
from dptrain.data.raw import RawSamples, require_part
from dptrain.data.sources import DEFAULT_MAX_BYTES
from dptrain.errors import ConfigError, DataError, printable
from dptrain.registry.names import suggestion
from dptrain.runtime.extras import pip_install
from dptrain.runtime.files import open_regular
from dptrain.runtime.launcher import share_of_cores
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
# Pictures that are decoded at once to find bad ones.
_CHECKED = 256


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

    path: str
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


class PictureRows(RowSource):
    """Pictures, decoded when they are asked for by as many threads as the rank has cores.

    The first ones stay in memory when they have been decoded, as many as `max_bytes` hold; a node has one copy.
    Collective.

    Args:
        paths: of the files.
        known: size and colours of what they become.
        comm: the ranks.
        max_bytes: that the pictures may take which stay.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, paths: Sequence[str], known: Preprocessing, comm: Communicator, max_bytes: int) -> None:
        assert known.picture is not None
        self.sample_shape: tuple[int, ...] = known.picture
        self._paths, self._known, self._threads = paths, known, share_of_cores(comm.local_size)
        row = math.prod(known.picture)
        stays = min(len(paths), max_bytes // (row + 1))
        # With a byte each that says whether the picture is there: it is set by a thread that has waited for those that
        # decode, and read by one that hands work to others, so that no rank sees it before the picture.
        memory, is_mine = comm.shared_array((stays * (row + 1),), np.uint8)
        if is_mine:
            memory[...] = 0  # shared memory is taken now, while it is known to be there
        comm.node_barrier()
        self._kept, self._is_kept = memory[: stays * row].reshape(stays, *self.sample_shape), memory[stays * row :]

    def read(self, rows: npt.NDArray[np.int64], out: Array) -> None:
        """See `RowSource`."""
        faults = self.decode(rows, out)
        if faults:
            place = min(faults)
            raise DataError(f"{faults[place]}; remove it, or --bad-pictures skip")

    def decode(self, rows: npt.NDArray[np.int64], out: Array) -> dict[int, str]:
        """Fill `out` as `read`; return what is wrong with pictures that do not decode, by their place in it."""
        there = np.zeros(len(rows), bool)
        may_be = rows < len(self._kept)
        there[may_be] = self._is_kept[rows[may_be]] != 0
        if there.all() and len(rows):
            np.take(self._kept, rows, axis=0, out=out, mode="clip")  # without the interpreter's lock
            return {}
        places = np.flatnonzero(there)
        out[places] = self._kept[rows[places]]

        def one(place: int) -> str:
            row = rows[place]
            try:
                out[place] = _decoded(self._paths[row], self._known)
            except DataError as error:
                return str(error)
            if row < len(self._kept):
                self._kept[row] = out[place]
            return ""

        missing = np.flatnonzero(~there)
        with ThreadPoolExecutor(min(self._threads, max(len(missing), 1))) as pool:
            found = list(pool.map(one, missing.tolist()))
        faults = {place: fault for place, fault in zip(missing.tolist(), found, strict=True) if fault}
        good = rows[[place for place in missing.tolist() if place not in faults]]
        self._is_kept[good[good < len(self._kept)]] = 1
        return faults

    def bad(self, comm: Communicator) -> dict[int, str]:
        """Return what is wrong with which pictures, by their row, after decoding all; each rank does its part."""
        start, stop = cut(0, len(self._paths), comm.size)[comm.rank]
        faults: dict[int, str] = {}
        out = np.empty((_CHECKED, *self.sample_shape), np.uint8)
        for first in range(start, stop, _CHECKED):
            rows = np.arange(first, min(first + _CHECKED, stop))
            faults |= {first + place: text for place, text in self.decode(rows, out[: len(rows)]).items()}
        return {int(row): text for own in comm.allgather(sorted(faults.items())) for row, text in own}


def load_pictures(
    path: str,
    asked: PictureOptions,
    comm: Communicator,
    known: Preprocessing | None = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> LoadedData:
    """Return a folder of pictures as a data set; they are decoded when they are needed. Collective.

    Rank 0 lists the files and reads their headers. Where bad pictures are skipped, all are decoded once to find them,
    since it must be known who is left before the samples are split.

    Args:
        path: of the folder.
        asked: what the command line says about it.
        comm: the ranks.
        known: of a model that was trained on such pictures; by default what the training part says.
        max_bytes: as `PictureRows`.

    Raises:
        AgreedError: on every rank, whatever was wrong on any.
    """
    root = Path(path)
    notes: list[str] = []

    def scan() -> dict[str, Any] | None:
        if comm.rank != 0:
            return None
        folder, test = _parts(root, notes)
        pictures, classes = _scanned(root, folder, asked, notes)
        own = _learned(folder, pictures, classes, asked, notes) if known is None else known
        if test is None:
            advice = "folders train and test name others"
            notes.append(require_part(len(pictures), asked.test_split, advice))
            tested = 0
        else:
            more, more_classes = _scanned(root, test, asked, notes)
            pictures, classes, tested = pictures + more, classes + more_classes, len(more)
        _require_fit(pictures, own)
        numbers = labels(classes, own, path).tolist()
        return {"known": own.to_dict(), "files": [one.path for one in pictures], "labels": numbers, "tested": tested}

    listed = comm.broadcast_fact(comm.agree("data", scan))
    known = Preprocessing.from_dict(listed["known"])
    files, y, tested = listed["files"], np.array(listed["labels"], np.int32), listed["tested"]
    source = PictureRows(files, known, comm, max_bytes)
    x = LazyArray(source, np.arange(len(files)))
    is_test = np.arange(len(files)) >= len(files) - tested
    if asked.bad == "skip":
        faults = source.bad(comm)
        if faults:
            notes.append(_skipped([faults[row] for row in sorted(faults)]))
            good = np.setdiff1d(np.arange(len(files)), list(faults))
            x, y, is_test = x[good], y[good], is_test[good]
            comm.agree("data", lambda: _require_classes(path, y[~is_test], known))
    if tested:
        parts = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    else:
        parts = comm.agree("data", lambda: split_rows(y, asked.test_split))
    train, test = (Split(x[rows], y[rows]) for rows in parts)
    notes = comm.broadcast_fact(notes)
    return LoadedData(root.resolve().name, train, test, len(known.class_names), known.task, known, tuple(notes))


def encode_pictures(
    path: str, known: Preprocessing, comm: Communicator, *, max_bytes: int = DEFAULT_MAX_BYTES, bad: str = "stop"
) -> RawSamples:
    """Return pictures for a model that is there already, and labels where they lie in folders of classes. Collective.

    Args:
        path: of a picture, of a folder of pictures, or of a folder of classes' folders.
        known: the model's.
        comm: the ranks.
        max_bytes: as `PictureRows`.
        bad: "stop" at a file that is no good picture, or "skip" it; then all are decoded once, to know who is left.

    Returns:
        Pictures, (rows, height, width, channels), in the order of their names.

    Raises:
        AgreedError: on every rank, whatever was wrong on any.
    """

    def scan() -> dict[str, Any] | None:
        if comm.rank != 0:
            return None
        folder = Path(path)
        if is_picture_folder(folder):
            found = [(name, file) for name, files in _classes(folder) for file in files]
        else:
            found = [("", file) for file in (_files(folder) if folder.is_dir() else [folder])]
        if not found:
            raise DataError(f"{path}: no pictures")
        for _, file in found if folder.is_dir() else ():
            require_inside(file, folder, "name the folder that it leads to")
        classes = {str(file): name for name, file in found}
        notes: list[str] = []
        pictures = _headers([file for _, file in found], bad, notes)
        if not pictures:
            raise DataError(f"{path}: no good picture")
        _require_fit(pictures, known)
        files = [one.path for one in pictures]
        numbers = labels([classes[file] for file in files], known, path).tolist() if found[0][0] else None
        return {"files": files, "labels": numbers, "notes": notes}

    listed = comm.broadcast_fact(comm.agree("data", scan))
    files, notes = listed["files"], list(listed["notes"])
    source = PictureRows(files, known, comm, max_bytes)
    x = LazyArray(source, np.arange(len(files)))
    y = None if listed["labels"] is None else np.array(listed["labels"], np.int32)
    if bad == "skip" and (faults := source.bad(comm)):
        notes.append(_skipped([faults[row] for row in sorted(faults)]))
        good = np.setdiff1d(np.arange(len(files)), list(faults))
        if not len(good):
            raise DataError(f"{path}: no good picture")
        x, y, files = x[good], None if y is None else y[good], [files[row] for row in good]
    names = [os.path.relpath(one, path) if os.path.isdir(path) else os.path.basename(one) for one in files]
    return RawSamples(x, y, names, notes)


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


def _parts(root: Path, notes: list[str]) -> tuple[Path, Path | None]:
    """Return the folders of the training part and of the test part."""
    train = root / "train"
    if not train.is_dir():
        return root, None
    there = [one for one in _TEST if (root / one).is_dir()]
    if len(there) > 1:
        notes.append(f"{root / there[0]} is the test part; {', '.join(there[1:])} is not used")
    return train, root / there[0] if there else None


def _scanned(root: Path, folder: Path, asked: PictureOptions, notes: list[str]) -> tuple[list[_Picture], list[str]]:
    """Return the pictures of a part whose headers are good, and the class of each."""
    pictures: list[_Picture] = []
    classes: list[str] = []
    for name, files in _classes(folder):
        if not asked.follow_links:
            for one in (folder / name, *files):
                require_inside(one, root, "--follow-links")
        found = _headers(files, asked.bad, notes)
        if not found:
            raise DataError(f"{folder / name}: no pictures; remove the folder, or fill it")
        pictures += found
        classes += [name] * len(found)
    return pictures, classes


def _learned(
    folder: Path, pictures: Sequence[_Picture], classes: Sequence[str], asked: PictureOptions, notes: list[str]
) -> Preprocessing:
    names = tuple(sorted(set(classes)))
    if len(names) < 2:
        raise DataError(f"{folder}: {len(names)} folder of pictures; expected one a class, at least two")
    size = asked.size or _one_size(folder, pictures)
    grey = all(one.is_grey for one in pictures)
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    about = f"{size[0]}x{size[1]} {'grey' if grey else 'RGB'}"
    notes.append(f"{len(pictures):,} pictures, {about}; {len(names)} classes: {shown}")
    return Preprocessing(
        "multiclass", class_names=names, picture=(*size, 1 if grey else 3), resize=asked.size is not None
    )


def _require_fit(pictures: Sequence[_Picture], known: Preprocessing) -> None:
    """Refuse pictures that are no input of the model.

    Raises:
        DataError: one has another size, and none are resized, or other colours.
    """
    assert known.picture is not None
    for one in pictures:
        _require_size(one.path, one.height, one.width, known)
        if known.picture[2] == 1 and not one.is_grey:
            raise DataError(f"{one.path}: coloured, and the model was trained on grey pictures; convert it")


def _require_size(path: str, height: int, width: int, known: Preprocessing) -> None:
    assert known.picture is not None
    if (height, width) != known.picture[:2] and not known.resize:
        expected = f"{known.picture[0]}x{known.picture[1]}"
        raise DataError(
            f"{path}: {height}x{width}, expected {expected}; train with --image-size to have pictures resized"
        )


def _require_classes(path: str, y: Array, known: Preprocessing) -> None:
    """Refuse a class of the training part that has no good picture.

    Raises:
        DataError: there is one.
    """
    for label, name in enumerate(known.class_names):
        if not (y == label).any():
            raise DataError(f"{path}: no good picture of class {name!r}; remove the folder, or fill it")


def _decoded(path: str, known: Preprocessing) -> npt.NDArray[np.uint8]:
    """Return the pixels of a file, (height, width, channels).

    Raises:
        DataError: it is no picture, damaged or too large, or has another size though none are resized.
    """
    from PIL import Image, ImageOps

    assert known.picture is not None
    height, width, channels = known.picture
    with open_picture(path) as opened:
        image: Any = ImageOps.exif_transpose(opened)
        image = image.convert("L" if channels == 1 else "RGB")
        if image.size != (width, height):
            _require_size(path, image.height, image.width, known)  # its header may have said something else
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(height, width, channels)


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
    found, faults, parent = [], [], pillow().Image
    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow().DecompressionBombWarning)
        for path in files:
            try:
                with open_picture(path) as image:
                    if image.mode not in (*_GREY, *_COLOURS):
                        raise DataError(f"{path}: pixels of mode {image.mode}; expected 8 bits a colour")
                    width, height = image.size
                    # Not `image.getexif`, which decodes a whole PNG to find what stands behind its pixels.
                    if parent.getexif(image).get(_ORIENTATION, 1) in (5, 6, 7, 8):
                        width, height = height, width
                    found.append(_Picture(str(path), height, width, image.mode in _GREY))
            except DataError as error:
                faults.append(str(error))
    _stop_or_note(faults, bad, notes)
    return found


def _stop_or_note(faults: Sequence[str], bad: str, notes: list[str]) -> None:
    if not faults:
        return
    if bad != "skip":
        raise DataError(f"{faults[0]}{_more(faults)}; remove it, or --bad-pictures skip")
    notes.append(_skipped(faults))


def _skipped(faults: Sequence[str]) -> str:
    return f"skipped: {faults[0]}{_more(faults)}"


def _more(faults: Sequence[str]) -> str:
    return f" ({len(faults)} such files in all)" if len(faults) > 1 else ""


def require_inside(path: Path, root: Path, advice: str) -> None:
    """Refuse a file or folder that is a link, or lies behind one, out of a folder.

    Args:
        path: of the file or folder.
        root: the folder.
        advice: what else to do than to put the pictures there.

    Raises:
        DataError: it does.
    """
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
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
