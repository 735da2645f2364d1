"""Folders of pictures, one folder a class, decoded by Pillow.

DIR/cat/*.png, DIR/dog/*.jpg ...; or the same below DIR/train and DIR/test (or val, valid, validation). Only headers are
read before training. Dot files are skipped; only the first frame counts, and transparency is dropped.
"""

import io
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
from dptrain.data.holdout import require_classes, split_rows
from dptrain.data.lazy import LazyArray, RowSource
from dptrain.data.loading import LoadedData, Split
from dptrain.data.preprocessing import Preprocessing, require_utf8, within_limits
from dptrain.data.raw import RawSamples, is_about, is_readme, require_part
from dptrain.data.sources import DEFAULT_MAX_BYTES
from dptrain.errors import ConfigError, DataError, printable
from dptrain.registry.names import suggestion
from dptrain.runtime.extras import pip_install
from dptrain.runtime.launch.launcher import share_of_cores
from dptrain.runtime.storage.files import open_regular
from dptrain.runtime.text import one_line

Array = npt.NDArray[Any]

# Prefix of a folder's path that marks it as one of pictures.
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
    """The command line's options for pictures."""

    size: tuple[int, int] | None = None  # (height, width) to resize to; None where all have one size
    bad: str = "stop"  # "stop" at a bad picture, or "skip" it
    test_split: float = 0.2  # used where there is no test folder
    follow_links: bool = False  # links may lead out of the folder


@dataclass(frozen=True)
class _Picture:
    path: str
    height: int
    width: int
    is_grey: bool


def is_picture_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder of folders without IDX files."""
    folder = Path(path)
    if not folder.is_dir():
        return False
    entries = list(folder.iterdir())
    return not any("ubyte" in entry.name for entry in entries) and any(entry.is_dir() for entry in entries)


class PictureRows(RowSource):
    """Decodes pictures on demand, in a thread a core; keeps `max_bytes` of them, one copy a node. Collective."""

    dtype = np.dtype(np.uint8)

    def __init__(self, paths: Sequence[str], preprocessing: Preprocessing, comm: Communicator, max_bytes: int) -> None:
        assert preprocessing.picture is not None
        self.sample_shape: tuple[int, ...] = preprocessing.picture
        self._paths, self._preprocessing, self._threads = paths, preprocessing, share_of_cores(comm.local_size)
        row = math.prod(preprocessing.picture)
        stays = min(len(paths), max_bytes // (row + 1))
        # With a byte each that says whether the picture is there: it is set by a thread that has waited for those that
        # decode, and read by one that hands work to others, so that no rank sees it before the picture.
        memory, is_mine = comm.shared_array((stays * (row + 1),), np.uint8)
        if is_mine:
            memory[...] = 0  # shared memory is taken now, while it is known to be there
        comm.node_barrier()
        self._cache, self._is_cached = memory[: stays * row].reshape(stays, *self.sample_shape), memory[stays * row :]

    def read(self, rows: npt.NDArray[np.int64], out: Array) -> None:
        """See `RowSource`."""
        faults = self.decode(rows, out)
        if faults:
            place = min(faults)
            raise DataError(f"{faults[place]}; remove it, or --bad-pictures skip")

    def decode(self, rows: npt.NDArray[np.int64], out: Array) -> dict[int, str]:
        """Fill `out` as `read` does; return the faults of pictures that do not decode, by their position in `rows`."""
        there = np.zeros(len(rows), bool)
        may_be = rows < len(self._cache)
        there[may_be] = self._is_cached[rows[may_be]] != 0
        if there.all() and len(rows):
            np.take(self._cache, rows, axis=0, out=out, mode="clip")  # without the interpreter's lock
            return {}
        places = np.flatnonzero(there)
        out[places] = self._cache[rows[places]]

        def decode_row(place: int) -> str:
            row = rows[place]
            try:
                out[place] = _decoded(self._paths[row], self._preprocessing)
            except DataError as error:
                return str(error)
            if row < len(self._cache):
                self._cache[row] = out[place]
            return ""

        missing = np.flatnonzero(~there)
        with ThreadPoolExecutor(min(self._threads, max(len(missing), 1))) as pool:
            errors = list(pool.map(decode_row, missing.tolist()))
        faults = {place: fault for place, fault in zip(missing.tolist(), errors, strict=True) if fault}
        good = rows[[place for place in missing.tolist() if place not in faults]]
        self._is_cached[good[good < len(self._cache)]] = 1
        return faults

    def bad(self, comm: Communicator) -> dict[int, str]:
        """Decode all pictures, each rank its part, and return the faults by row. Collective."""
        start, stop = cut(0, len(self._paths), comm.size)[comm.rank]
        faults: dict[int, str] = {}
        out = np.empty((_CHECKED, *self.sample_shape), np.uint8)
        for first in range(start, stop, _CHECKED):
            rows = np.arange(first, min(first + _CHECKED, stop))
            faults |= {first + place: text for place, text in self.decode(rows, out[: len(rows)]).items()}
        return {int(row): text for rank_faults in comm.allgather(sorted(faults.items())) for row, text in rank_faults}


def load_pictures(
    path: str,
    options: PictureOptions,
    comm: Communicator,
    preprocessing: Preprocessing | None = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> LoadedData:
    """Return a folder of pictures, decoded on demand, or once in advance to skip bad ones. Collective."""
    root = Path(path)
    notes: list[str] = []

    def scan() -> dict[str, Any] | None:
        if comm.rank != 0:
            return None
        folder, test = _parts(root, notes)
        pictures, classes = _scanned(root, folder, options, notes)
        learned = _learned(folder, pictures, classes, options, notes) if preprocessing is None else preprocessing
        if test is None:
            advice = "folders train and test name others"
            notes.append(require_part(len(pictures), options.test_split, advice))
            tested = 0
        else:
            more, more_classes = _scanned(root, test, options, notes)
            pictures, classes, tested = pictures + more, classes + more_classes, len(more)
        _require_fit(pictures, learned)
        numbers = labels(classes, learned, path).tolist()
        return {
            "known": learned.to_dict(),
            "files": [picture.path for picture in pictures],
            "labels": numbers,
            "tested": tested,
        }

    listed = comm.broadcast_fact(comm.agree("data", scan))
    learns = preprocessing is None
    known = preprocessing = Preprocessing.from_dict(listed["known"])
    files, y, tested = listed["files"], np.array(listed["labels"], np.int32), listed["tested"]
    source = PictureRows(files, preprocessing, comm, max_bytes)
    x = LazyArray(source, np.arange(len(files)))
    is_test = np.arange(len(files)) >= len(files) - tested
    if options.bad == "skip":
        faults = source.bad(comm)
        if faults:
            notes.append(_skipped([faults[row] for row in sorted(faults)]))
            good = np.setdiff1d(np.arange(len(files)), list(faults))
            x, y, is_test = x[good], y[good], is_test[good]
            comm.agree("data", lambda: _require_classes(path, y[~is_test], preprocessing))
    if tested:
        parts = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    else:
        parts = comm.agree("data", lambda: split_rows(y, options.test_split))
    if learns:
        comm.agree("data", lambda: require_classes(y[parts[0]], known.class_names, path))
    train, test = (Split(x[rows], y[rows]) for rows in parts)
    notes = comm.broadcast_fact(notes)
    return LoadedData(
        root.resolve().name,
        train,
        test,
        len(preprocessing.class_names),
        preprocessing.task,
        preprocessing,
        tuple(notes),
    )


def encode_pictures(
    path: str,
    preprocessing: Preprocessing,
    comm: Communicator,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    bad: str = "stop",
) -> RawSamples:
    """Return pictures for a trained model, with labels where they lie in class folders. Collective."""

    def scan() -> dict[str, Any] | None:
        if comm.rank != 0:
            return None
        folder = Path(path)
        if is_picture_folder(folder):
            named_files = [(name, file) for name, files in _classes(folder) for file in files]
        else:
            named_files = [("", file) for file in (_files(folder) if folder.is_dir() else [folder])]
        if not named_files:
            raise DataError(f"{path}: no pictures")
        for _, file in named_files if folder.is_dir() else ():
            require_inside(file, folder, "name the folder that it leads to")
        classes = {str(file): name for name, file in named_files}
        notes: list[str] = []
        pictures = _headers([file for _, file in named_files], bad, notes)
        if not pictures:
            raise DataError(f"{path}: no good picture")
        _require_fit(pictures, preprocessing)
        files = [picture.path for picture in pictures]
        numbers = labels([classes[file] for file in files], preprocessing, path).tolist() if named_files[0][0] else None
        return {"files": files, "labels": numbers, "notes": notes}

    listed = comm.broadcast_fact(comm.agree("data", scan))
    files, notes = listed["files"], list(listed["notes"])
    source = PictureRows(files, preprocessing, comm, max_bytes)
    x = LazyArray(source, np.arange(len(files)))
    y = None if listed["labels"] is None else np.array(listed["labels"], np.int32)
    if bad == "skip" and (faults := source.bad(comm)):
        notes.append(_skipped([faults[row] for row in sorted(faults)]))
        good = np.setdiff1d(np.arange(len(files)), list(faults))
        if not len(good):
            raise DataError(f"{path}: no good picture")
        x, y, files = x[good], None if y is None else y[good], [files[row] for row in good]
    names = [os.path.relpath(file, path) if os.path.isdir(path) else os.path.basename(file) for file in files]
    return RawSamples(x, y, names, notes)


def labels(classes: Sequence[str], preprocessing: Preprocessing, where: str) -> npt.NDArray[np.int32]:
    """Return the labels of class names; refuse a class that training has not seen."""
    number = {name: label for label, name in enumerate(preprocessing.class_names)}
    for name in sorted(set(classes) - set(number)):
        hint = suggestion(name, preprocessing.class_names)
        raise DataError(f"{where}: class {name!r}, which training has not seen{hint}")
    return np.array([number[name] for name in classes], np.int32)


def _parts(root: Path, notes: list[str]) -> tuple[Path, Path | None]:
    """Return the training folder and the optional test folder."""
    train = root / "train"
    if not train.is_dir():
        return root, None
    there = [name for name in _TEST if (root / name).is_dir()]
    if len(there) > 1:
        notes.append(f"{root / there[0]} is the test part; {', '.join(there[1:])} is not used")
    return train, root / there[0] if there else None


def _scanned(root: Path, folder: Path, options: PictureOptions, notes: list[str]) -> tuple[list[_Picture], list[str]]:
    """Return a part's pictures with good headers, and the class of each."""
    pictures: list[_Picture] = []
    classes: list[str] = []
    for name, files in _classes(folder):
        if not options.follow_links:
            for entry in (folder / name, *files):
                require_inside(entry, root, "--follow-links")
        good = _headers(files, options.bad, notes)
        if not good:
            raise DataError(f"{folder / name}: no pictures; remove the folder, or fill it")
        pictures += good
        classes += [name] * len(good)
    return pictures, classes


def _learned(
    folder: Path, pictures: Sequence[_Picture], classes: Sequence[str], options: PictureOptions, notes: list[str]
) -> Preprocessing:
    names = tuple(sorted(set(classes)))
    if len(names) < 2:
        raise DataError(f"{folder}: {len(names)} folder of pictures; expected one a class, at least two")
    size = options.size or _common_size(folder, pictures)
    grey = all(picture.is_grey for picture in pictures)
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    description = f"{size[0]}x{size[1]} {'grey' if grey else 'RGB'}"
    notes.append(f"{len(pictures):,} pictures, {description}; {len(names)} classes: {shown}")
    with within_limits(str(folder)):
        return Preprocessing(
            "multiclass", class_names=names, picture=(*size, 1 if grey else 3), resize=options.size is not None
        )


def _require_fit(pictures: Sequence[_Picture], preprocessing: Preprocessing) -> None:
    assert preprocessing.picture is not None
    for picture in pictures:
        _require_size(picture.path, picture.height, picture.width, preprocessing)
        if preprocessing.picture[2] == 1 and not picture.is_grey:
            raise DataError(f"{picture.path}: in color, and the model was trained on gray pictures; convert it")


def _require_size(path: str, height: int, width: int, preprocessing: Preprocessing) -> None:
    assert preprocessing.picture is not None
    if (height, width) != preprocessing.picture[:2] and not preprocessing.resize:
        expected = f"{preprocessing.picture[0]}x{preprocessing.picture[1]}"
        raise DataError(
            f"{path}: {height}x{width}, expected {expected}; train with --image-size to have pictures resized"
        )


def _require_classes(path: str, y: Array, preprocessing: Preprocessing) -> None:
    for label, name in enumerate(preprocessing.class_names):
        if not (y == label).any():
            raise DataError(f"{path}: no good picture of class {name!r}; remove the folder, or fill it")


def _decoded(file: str | IO[bytes], preprocessing: Preprocessing, name: str = "") -> npt.NDArray[np.uint8]:
    from PIL import Image, ImageOps

    assert preprocessing.picture is not None
    height, width, channels = preprocessing.picture
    path = file if isinstance(file, str) else name
    with open_picture(file, path) as opened:
        image: Any = ImageOps.exif_transpose(opened)
        image = image.convert("L" if channels == 1 else "RGB")
        if image.size != (width, height):
            _require_size(path, image.height, image.width, preprocessing)  # its header may have said something else
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(height, width, channels)


def _classes(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    entries = [entry for entry in _entries(folder) if not is_about(entry)]
    for entry in entries:
        if not entry.is_dir():
            raise DataError(f"{entry}: a file next to the class folders; move it into one, or remove it")
        require_utf8(entry)
    for entry in entries:
        yield entry.name, _files(entry)


def _files(folder: Path) -> list[Path]:
    entries = _entries(folder)
    for entry in entries:
        if entry.is_dir():
            raise DataError(f"{entry}: a folder in the folder of a class; expected pictures")
    return entries


def _entries(folder: Path) -> list[Path]:
    entries = sorted(folder.iterdir())
    if len(entries) > MOST_PICTURES:
        raise DataError(f"{folder}: {len(entries)} files, at most {MOST_PICTURES} are read")
    return [
        entry
        for entry in entries
        if not entry.name.startswith(".") and entry.name.lower() not in _IGNORED and not is_readme(entry)
    ]


def decode_picture(content: bytes, preprocessing: Preprocessing, name: str) -> npt.NDArray[np.uint8]:
    """Return the pixels (height, width, channels) of a picture's file for a trained model; `name` begins messages."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow().DecompressionBombWarning)
        _require_fit([_header(io.BytesIO(content), name)], preprocessing)
        return _decoded(io.BytesIO(content), preprocessing, name)


def _header(file: Path | IO[bytes], path: str) -> _Picture:
    """Return what a picture's header says, where warnings of bombs are errors."""
    with open_picture(file, path) as image:
        if image.mode not in (*_GREY, *_COLOURS):
            raise DataError(f"{path}: pixels of mode {image.mode}; expected 8 bits per color")
        width, height = image.size
        # Not `image.getexif`, which decodes a whole PNG to find what stands behind its pixels.
        if pillow().Image.getexif(image).get(_ORIENTATION, 1) in (5, 6, 7, 8):
            width, height = height, width
        return _Picture(path, height, width, image.mode in _GREY)


def _headers(files: Sequence[Path], bad: str, notes: list[str]) -> list[_Picture]:
    pictures, faults = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow().DecompressionBombWarning)
        for path in files:
            try:
                pictures.append(_header(path, str(path)))
            except DataError as error:
                faults.append(str(error))
    _stop_or_note(faults, bad, notes)
    return pictures


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
    """Refuse a path that leads, through a link, out of the folder `root`."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise DataError(f"{printable(str(path))}: a link that leads out of {root}; put the pictures there, or {advice}")


def pillow() -> Any:
    """Return `PIL.Image`, or raise a ConfigError where Pillow is missing."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(f"pictures need Pillow: {pip_install('images')}") from None
    return Image


@contextmanager
def open_picture(path: str | Path | IO[bytes], name: str = "a picture") -> Iterator[Any]:
    """Yield Pillow's image of a file, following links; only the header has been read. `name` is an open file's."""
    image = pillow()
    with _reading(printable(str(path)) if isinstance(path, str | Path) else name), ExitStack() as stack:
        file = stack.enter_context(open_regular(Path(path))) if isinstance(path, str | Path) else path
        yield stack.enter_context(image.open(file, formats=_FORMATS))


@contextmanager
def _reading(path: str) -> Iterator[None]:
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: not found") from None
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{path}: not a picture; expected {', '.join(_FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: too large: {one_line(error).partition(',')[0]}") from None
    except Exception as error:  # decoders of damaged files raise anything
        raise DataError(f"{path}: damaged ({one_line(error)[:100]})") from None


def _common_size(folder: Path, pictures: Sequence[_Picture]) -> tuple[int, int]:
    sizes = Counter((picture.height, picture.width) for picture in pictures)
    if len(sizes) > 1:
        shown = ", ".join(f"{height}x{width} ({count})" for (height, width), count in sizes.most_common(3))
        more = f" and {len(sizes) - 3} more" if len(sizes) > 3 else ""
        height, width = sizes.most_common(1)[0][0]
        raise DataError(
            f"{folder}: pictures of {len(sizes)} sizes (height x width): {shown}{more}; --image-size {height}x{width} "
            "resizes them"
        )
    return next(iter(sizes))
