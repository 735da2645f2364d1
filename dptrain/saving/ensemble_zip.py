"""Several `.keras` files in one: a zip archive, members stored without compression.

ensemble.json         format (1), dptrain's version, how many models
member-0.keras ...    see keras_zip; unzipped, each is a model's file for dptrain and Keras 3
"""

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dptrain.errors import DataError
from dptrain.saving import keras_h5, keras_zip
from dptrain.saving.keras_zip import MAGIC, ModelFile
from dptrain.saving.reading import opened, parse_json, reading, size_of
from dptrain.version import __version__

_HEADER = "ensemble.json"
_FORMAT = 1
_MAX_JSON = 1 << 20


def encode(models: Sequence[Any]) -> bytes:
    """Return the content of a file."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        header = {"format": _FORMAT, "version": __version__, "members": len(models)}
        archive.writestr(keras_zip.undated(_HEADER), json.dumps(header))
        for number, model in enumerate(models):
            archive.writestr(keras_zip.undated(member_name(number)), keras_zip.encode(model))
    return content.getvalue()


def member_name(number: int) -> str:
    """Return the name of a model in the archive."""
    return f"member-{number}.keras"


def read(path: Path) -> list[ModelFile]:
    """Read a whole file."""
    keras_h5.h5py_module()  # before `reading`, which blames every error on the file
    where = str(path)
    with opened(path, MAGIC, "an ensemble (a zip archive)") as file, reading(where), zipfile.ZipFile(file) as archive:
        size = size_of(file)
        members = keras_zip.members_of(where, archive)
        header = parse_json(f"{where}:{_HEADER}", keras_zip.member(where, archive, members, _HEADER, size, _MAX_JSON))
        number, version = header.get("members"), header.get("format")
        if type(version) is not int or version > _FORMAT:
            raise DataError(f"{where}: format {str(version)[:80]}, this build reads <= {_FORMAT}")
        if type(number) is not int or not 0 < number < len(members):
            raise DataError(f"{where}: {str(number)[:80]} models declared, {len(members) - 1} found")
        models = []
        for name in map(member_name, range(number)):
            content = keras_zip.member(where, archive, members, name, size, None)
            models.append(keras_zip.parse(f"{where}:{name}", io.BytesIO(content), len(content)))
        return models
