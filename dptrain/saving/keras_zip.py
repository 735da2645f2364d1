"""Keras 3's `.keras`: a zip archive, members stored without compression.

    metadata.json       keras_version (whose layout the file follows); and under "dptrain" what Keras has no place for:
                        format (1), version, seed. Keras' date_saved, which nothing reads, is left out
    config.json         see keras_config: layers, input shape, optimizer, loss, metrics
    model.weights.h5    see keras_h5: weights and the optimizer's state
    assets/<path>/...   see assets: files of layers with a `save_assets`
    preprocessing.json  of a model that remembers its raw data: `Preprocessing.to_dict`; Keras passes it over

The same model gives the same bytes: the archive has no dates.

Source: `_save_model_to_fileobj` in keras/src/saving/saving_lib.py, Keras 3.15.
"""

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dptrain.errors import ConfigError, DataError, DptrainError
from dptrain.runtime.text import one_line
from dptrain.saving import assets, keras_2_config, keras_config, keras_h5
from dptrain.saving.reading import Loaded, guess, opened, parse_json, reading, size_of
from dptrain.utils import check_seed
from dptrain.version import __version__

_KIND = "a .keras file (a zip archive)"
MAGIC = b"PK\x03\x04"
_FORMAT = 1
KERAS = "3.15.1"
CONFIG, _METADATA, _WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
_PREPROCESSING = "preprocessing.json"
MEMBERS = _METADATA, CONFIG, _WEIGHTS, _PREPROCESSING
_MAX_JSON = 16 << 20
_MAX_MEMBERS = 10_000
# Members may be compressed, by people who pack the archive again: a larger one must not grow more than Keras allows.
_FREE_SIZE, _MAX_EXPANSION = 64 << 20, 100


@dataclass
class ModelFile:
    """Content of a `.keras` file."""

    config: dict[str, Any]  # of config.json
    seed: int | None  # the model's; None in a file of Keras' own
    weights: io.BytesIO  # content of model.weights.h5
    preprocessing: dict[str, Any] | None = None  # of preprocessing.json, unchecked; None where there is none
    assets: dict[str, bytes] = field(default_factory=dict)  # files of layers, by their names in the archive
    load: Callable[..., Loaded] = keras_h5.load  # reads `weights`


def model_config(model: Any) -> dict[str, Any]:
    """Return a model's config.json: architecture, input shape, arguments of `compile`."""
    result = keras_config.with_shared_layers(lambda: keras_config.layer_config(model))
    result["compile_config"] = keras_config.serialize_keras_object(model.get_compile_config())
    return result


def why_not_saved(model: Any) -> str:
    """Return why no file can hold a model; an empty string where one can."""
    try:
        json.dumps(model_config(model))
    except (DptrainError, NotImplementedError, TypeError) as error:
        return one_line(error)
    return ""


def encode(model: Any) -> bytes:
    """Return the content of a file."""
    keras_h5.h5py_module()
    raw = None if model._preprocessing is None else model._preprocessing.to_dict()
    try:
        return archived(model_config(model), model._model_seed, keras_h5.encode(model), raw, assets.written(model))
    except TypeError as error:
        raise ConfigError(f"model {model.name!r} has a configuration that JSON cannot hold: {error}") from error


def archived(
    config: dict[str, Any],
    seed: int | None,
    weights: bytes,
    preprocessing: dict[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return the content of a file made of these members."""
    metadata = {"keras_version": KERAS, "dptrain": {"format": _FORMAT, "version": __version__, "seed": seed}}
    members: list[tuple[str, str | bytes]] = [(_METADATA, json.dumps(metadata)), (CONFIG, json.dumps(config))]
    members.append((_WEIGHTS, weights))
    if preprocessing is not None:
        members.append((_PREPROCESSING, json.dumps(preprocessing)))
    members += (files or {}).items()
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in members:
            archive.writestr(undated(name), data)
    return content.getvalue()


def undated(name: str) -> zipfile.ZipInfo:
    """Return an archive entry without a date, so that equal content gives equal bytes."""
    entry = zipfile.ZipInfo(name)
    entry.external_attr = 0o600 << 16  # as `writestr` gives to a plain name: the owner may read what is unpacked
    return entry


def read(path: Path) -> ModelFile:
    """Read a whole file."""
    keras_h5.h5py_module()  # before `reading`, which blames every error on the file
    with opened(path, MAGIC, _KIND) as file:
        return parse(str(path), file, size_of(file))


def parse(where: str, file: BinaryIO, size: int) -> ModelFile:
    """Read a file's content of `size` bytes; `where` names it in messages."""
    with reading(where), zipfile.ZipFile(file) as archive:
        members = members_of(where, archive)
        config = parse_json(f"{where}:{CONFIG}", member(where, archive, members, CONFIG, size, _MAX_JSON))
        metadata = parse_json(f"{where}:{_METADATA}", member(where, archive, members, _METADATA, size, _MAX_JSON))
        keras_2_config.refuse_other_functions(config, metadata.get("keras_version"))
        raw = None
        if _PREPROCESSING in members:
            content = member(where, archive, members, _PREPROCESSING, size, _MAX_JSON)
            raw = parse_json(f"{where}:{_PREPROCESSING}", content)
        files = {}
        for name in members:
            if name.startswith(assets.FOLDER) and not name.endswith("/"):
                assets.check_name(where, name)
                files[name] = member(where, archive, members, name, size, None)
        return ModelFile(config, _seed(where, metadata), _hdf5(where, archive, members, size), raw, files)


def open_weights(path: Path) -> io.BytesIO:
    """Return the member with the weights."""
    where = str(path)
    with opened(path, MAGIC, _KIND) as file, reading(where), zipfile.ZipFile(file) as archive:
        return _hdf5(where, archive, members_of(where, archive), size_of(file))


def _hdf5(where: str, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], size: int) -> io.BytesIO:
    content = member(where, archive, members, _WEIGHTS, size, None)
    if not content.startswith(keras_h5.MAGIC):
        first = content[: len(keras_h5.MAGIC)]
        raise DataError(f"{where}:{_WEIGHTS}: not HDF5: first bytes {first.hex() or 'none'}{guess(first)}")
    return io.BytesIO(content)


def members_of(where: str, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive by name; refuse duplicates and too many."""
    infos = archive.infolist()
    members = {info.filename: info for info in infos}
    if len(infos) > _MAX_MEMBERS or len(members) != len(infos):
        raise DataError(f"{where}: {len(infos)} members with {len(members)} names: not Keras' archive")
    return members


def member(
    where: str, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str, size: int, limit: int | None
) -> bytes:
    """Return a member's content; refuse declared sizes that the file cannot back, or above `limit`."""
    info = members.get(name)
    if info is None:
        raise DataError(f"{where}: no {name} in the archive; found {', '.join(sorted(members)[:10]) or 'nothing'}")
    if info.flag_bits & 0x1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{where}:{name}: encrypted, or compressed in a way that is not supported")
    backed = min(info.compress_size, size)
    most = backed if info.compress_type == zipfile.ZIP_STORED else max(_FREE_SIZE, _MAX_EXPANSION * backed)
    if limit is not None:
        most = min(most, limit)
    if info.file_size > most:
        raise DataError(f"{where}:{name}: {info.file_size} bytes declared, at most {most} are read")
    with archive.open(info) as stream:
        content = stream.read(info.file_size + 1)
    if len(content) != info.file_size:
        raise DataError(f"{where}:{name}: {info.file_size} bytes declared, {len(content)} found")
    return content


def _seed(where: str, metadata: dict[str, Any]) -> int | None:
    ours = metadata.get("dptrain")
    if ours is None:
        return None
    if not isinstance(ours, dict) or type(ours.get("format")) is not int or ours["format"] > _FORMAT:
        raise DataError(f"{where}: format {str(ours)[:80]}, this build reads <= {_FORMAT}")
    seed = ours.get("seed")
    if type(seed) is not int:
        raise DataError(f"{where}: seed {str(seed)[:80]!r}, expected an integer")
    return check_seed(seed)
