"""The members of a `.keras` file as files of a folder: Keras' `save_model(zipped=False)`."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from dptrain.errors import DataError, OutputError
from dptrain.runtime.storage.files import (
    FILE,
    FOLDER,
    Directory,
    make_folder,
    open_directory,
    write_atomically,
    writing,
)
from dptrain.saving import assets, keras_h5, keras_zip
from dptrain.saving.keras_zip import ModelFile


def is_model_folder(path: Path) -> bool:
    """Whether a path is a folder with a model's configuration, as in Keras."""
    return path.is_dir() and (path / keras_zip.CONFIG).is_file()


def write(path: Path, content: bytes, *, overwrite: bool) -> None:
    """Write the members of an archive, each under a temporary name first, the configuration last. On rank 0."""
    if path.exists() and not (overwrite and path.is_dir()):
        raise OutputError(f"{path} exists; pass overwrite=True to replace it, if it is a folder")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in sorted(archive.namelist(), key=lambda name: name == keras_zip.CONFIG):
            file = path.joinpath(*PurePosixPath(name).parts)
            with writing(file):
                make_folder(file.parent)
            write_atomically(file, archive.read(name))


def read(path: Path) -> ModelFile:
    """Read a whole folder; DataError if a file is missing, damaged, a link or no plain file."""
    keras_h5.h5py_module()
    content = io.BytesIO()
    try:
        with zipfile.ZipFile(content, "w") as archive, open_directory(path) as folder:
            for name, member in _members(folder):
                archive.writestr(keras_zip.undated(name), member)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    size = content.tell()
    content.seek(0)
    return keras_zip.parse(str(path), content, size)


def _members(folder: Directory) -> Iterator[tuple[str, bytes]]:
    """Yield names and content of the files that an archive would have."""
    for name in keras_zip.MEMBERS:
        if folder.expect(name, FILE) is not None:
            yield name, _content(folder, name)
    top = assets.FOLDER.rstrip("/")
    if folder.expect(top, FOLDER) is not None:
        with folder.folder(top) as opened:
            yield from _files(opened, assets.FOLDER)


def _files(folder: Directory, prefix: str) -> Iterator[tuple[str, bytes]]:
    for name in folder.names():
        if folder.kind(name) == FOLDER:
            with folder.folder(name) as inner:
                yield from _files(inner, f"{prefix}{name}/")
        else:
            yield prefix + name, _content(folder, name)


def _content(folder: Directory, name: str) -> bytes:
    with folder.open(name) as file:
        return file.read()
