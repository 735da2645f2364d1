"""Folders of texts (.txt): DIR/CLASS/FILE.txt, or without classes; read as tables of a text and a class."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dptrain.data.preprocessing import Preprocessing, require_utf8
from dptrain.data.raw import is_about, is_readme
from dptrain.data.sources import format_bytes
from dptrain.data.tabular.table_codes import pandas_module
from dptrain.data.tabular.table_columns import TableOptions, text_column
from dptrain.data.tabular.tables import Table
from dptrain.errors import DataError, printable
from dptrain.runtime.storage.files import open_regular, read_at_most

TEXT, CLASS = "text", "class"
_ENDING = ".txt"
_MOST_FILES = 1_000_000
# How many names of a class' folder are checked to tell texts from pictures.
_SAMPLED_NAMES = 1000


@dataclass(frozen=True)
class TextFiles(Table):
    """A table of texts that were read from a file each."""

    files: Sequence[str] = ()

    def fault(self, row: int, column: str, what: str) -> DataError:
        """Return an error about a row's file."""
        return DataError(f"{self.files[row]}: {what}")


def is_text_folder(path: str) -> bool:
    """Whether a path is a folder whose folders hold texts for the most part, perhaps in its folder "train"."""
    try:
        folders = [entry for entry in _training_folder(Path(path)).iterdir() if entry.is_dir()]
        are_texts = [name.lower().endswith(_ENDING) for folder in folders for name in _first_names(folder)]
    except OSError:  # not a readable folder: reading it will report that
        return False
    return sum(are_texts) > len(are_texts) / 2


def _first_names(folder: Path) -> list[str]:
    """Return some names in a folder, which may hold a million pictures."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, _SAMPLED_NAMES)]


def folder_options(path: str, options: TableOptions) -> tuple[str, TableOptions]:
    """Return the training folder, and options that name its columns and the test folder."""
    root, train = Path(path), _training_folder(Path(path))
    test = root / "test" if train != root and (root / "test").is_dir() else None
    return str(train), TableOptions(
        target=CLASS,
        texts=(TEXT,),
        words=options.words,
        text_length=options.text_length,
        test=None if test is None else str(test),
        test_split=options.test_split,
    )


def read_text_folder(path: str, max_bytes: int) -> TextFiles:
    """Return the texts of a folder, and their classes where it has folders of these."""
    root = Path(path)
    entries = _entries(root)
    if any(entry.is_dir() for entry in entries):
        entries = [entry for entry in entries if not is_about(entry, _ENDING)]
    files = [entry for entry in entries if not entry.is_dir()]
    if files and len(files) < len(entries):
        raise DataError(f"{files[0]}: a file next to the class folders; move it into one, or remove it")
    columns: dict[str, list[str]] = {TEXT: []}
    for folder in [] if files else entries:
        require_utf8(folder)
        members = [entry for entry in _entries(folder) if not is_readme(entry)]
        if not members:
            raise DataError(f"{folder}: no texts; remove the folder, or fill it")
        files += members
        columns.setdefault(CLASS, []).extend([folder.name] * len(members))
    if not files:
        raise DataError(f"{path}: no texts (*{_ENDING})")
    left = max_bytes
    for file in files:
        text, size = _text(file, root, left, max_bytes)
        columns[TEXT].append(text)
        left -= size
    return TextFiles(path, pandas_module().DataFrame(columns), files=tuple(map(str, files)))


def learn_text_folder(table: Table, options: TableOptions) -> tuple[Preprocessing, list[str]]:
    """Return the vocabulary of a folder's texts and its classes, and a note on each."""
    names = tuple(sorted(set(table.frame[CLASS]))) if CLASS in table.frame else ()
    if len(names) < 2:
        raise DataError(f"{table.where}: {len(names)} folder of texts; expected one a class, at least two")
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    notes = [f"{len(table):,} texts; {len(names)} classes: {shown}"]
    column = text_column(table, TEXT, options, notes)
    return Preprocessing("multiclass", (column,), CLASS, names), notes


def _training_folder(root: Path) -> Path:
    return root / "train" if (root / "train").is_dir() else root


def _entries(folder: Path) -> list[Path]:
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    if len(entries) > _MOST_FILES:
        raise DataError(f"{folder}: {len(entries):,} files, at most {_MOST_FILES:,} are read")
    return entries


def _text(file: Path, root: Path, left: int, max_bytes: int) -> tuple[str, int]:
    """Return a file's text and its bytes; refuse links out of the folder, other endings, and more than `left` bytes."""
    where = printable(str(file))
    if file.is_dir() or file.suffix.lower() != _ENDING:
        raise DataError(f"{where}: expected a text (*{_ENDING})")
    if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(root)):
        raise DataError(f"{where}: a link that leads out of {root}; put the text there")
    try:
        with open_regular(file) as stream:
            content = read_at_most(stream, left)
    except OSError as error:
        raise DataError(f"{where}: cannot be read ({error.strerror})") from error
    if len(content) > left:
        raise DataError(f"{where}: more texts than max_bytes = {format_bytes(max_bytes)}; raise --data.max_bytes")
    try:
        return content.decode("utf-8-sig"), len(content)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {content[error.start]:02x} at {error.start} is not UTF-8") from None
