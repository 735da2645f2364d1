"""Files of layers in a `.keras` file, which `save_assets(folder)` writes and `load_assets(folder)` reads.

They are members "assets/<path>/<name>", with the paths of groups of weights. Source: `DiskIOStore` in
keras/src/saving/saving_lib.py, Keras 3.15.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from dptrain.errors import ConfigError, DataError
from dptrain.runtime.storage.files import is_plain_name, open_regular
from dptrain.saving.reading import reading
from dptrain.saving.saveables import saveables

FOLDER = "assets/"


def written(model: Any) -> dict[str, bytes]:
    """Return the content of all files that layers write, by their names in the archive."""
    files: dict[str, bytes] = {}
    with TemporaryDirectory(prefix="dptrain-") as name:
        for path, saveable in saveables(model).items():
            if hasattr(saveable, "save_assets"):
                (folder := Path(name, path)).mkdir(parents=True, exist_ok=True)
                saveable.save_assets(str(folder))
        for place in sorted(Path(name).rglob("*")):
            if place.is_symlink() or not (place.is_file() or place.is_dir()):
                raise ConfigError(f"`save_assets`: {place.relative_to(name)} is neither a file nor a folder")
            if place.is_file():
                with open_regular(place) as file:
                    files[FOLDER + place.relative_to(name).as_posix()] = file.read()
    return files


def check_name(where: str, name: str) -> None:
    """Refuse a member of an archive that would lie outside its folder."""
    if not all(map(is_plain_name, name.split("/"))) or "\\" in name:
        raise DataError(f"{where}: {name[:80]!r} is not the name of a file in it")


def loading(model: Any) -> dict[str, Any]:
    """Return the layers that load files, by the paths of their folders."""
    return {path: saveable for path, saveable in saveables(model).items() if hasattr(saveable, "load_assets")}


def load(model: Any, files: Mapping[str, bytes], where: str) -> None:
    """Write the files to a temporary folder and let the layers load them."""
    with TemporaryDirectory(prefix="dptrain-") as name:
        with reading(where):
            for member, content in files.items():
                place = Path(name, *PurePosixPath(member.removeprefix(FOLDER)).parts)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
        for path, saveable in loading(model).items():
            folder = Path(name, path)
            saveable.load_assets(str(folder) if folder.is_dir() else None)
