"""`get_file`: files in Keras' cache."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import ParseResult, unquote, urlparse

from dptrain.data.archives import unpack
from dptrain.errors import ConfigError, DataError
from dptrain.registry.arguments import checked_arguments
from dptrain.runtime.defaults import DEFAULT_MAX_BYTES
from dptrain.runtime.storage.files import is_plain_name, writing
from dptrain.runtime.text import short

_ADVICE = "set cache_dir, or KERAS_HOME, to a folder that can be written"
_ALGORITHMS = {32: "md5", 64: "sha256"}  # by the digits of a checksum


@checked_arguments
def get_file(
    fname: str | Path | None = None,
    origin: str | Path | None = None,
    untar: bool = False,
    md5_hash: str | None = None,
    file_hash: str | None = None,
    cache_subdir: str = "datasets",
    hash_algorithm: str = "auto",
    extract: bool = False,
    archive_format: str | None = "auto",
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> str:
    """Return the path of a file in the cache, where a file of this machine is copied first; nothing is downloaded.

    Args:
        fname: its name in the cache, by default that of `origin`.
        origin: a path or a file:// address; another address names the file, which must be in the cache already.
        untar: an older name of `extract`, for a tar file.
        md5_hash: its checksum, an older name of `file_hash`.
        file_hash: its checksum, SHA-256 or MD5.
        cache_subdir: folder in the cache.
        hash_algorithm: "auto" (by the checksum's length), "sha256" or "md5".
        extract: unpack a tar or zip file, and return the folder: in the cache, `FNAME_extracted` of "FNAME.tar.gz", or
            `fname` if that has no ending or is missing; the archive is then beside it, as `FNAME_archive`.
        archive_format: "auto", "tar" or "zip".
        cache_dir: by default KERAS_HOME, else ~/.keras.
        force_download: copy it again.
        max_bytes: of an archive's members together (not in Keras).

    Raises:
        ConfigError: an argument is missing or not supported.
        DataError: the file is neither here nor in the cache, or has another checksum; or the archive is damaged,
            encrypted or too large, or a member lies outside of its folder. Nothing of it is kept.
        OutputError: the cache cannot be written, or something else has the file's name there.
    """
    if origin is None:
        raise ConfigError('Please specify the "origin" argument (URL of the file to download).')
    if untar:
        extract, archive_format = True, "tar"
    if archive_format not in ("auto", "tar", "zip", None):
        raise ConfigError(f"archive_format = {archive_format!r}: expected 'auto', 'tar' or 'zip'")
    source = _local(origin)
    name = str(fname) if fname else Path(unquote(_address(origin).path)).name
    if not is_plain_name(name):
        raise ConfigError(f"Invalid `fname`: {short(name)}. Paths aren't accepted; set cache_dir and cache_subdir.")
    folder = keras_home(cache_dir) / cache_subdir
    unpacked = folder / (f"{name.partition('.')[0]}_extracted" if fname and "." in name else name)
    if extract and unpacked.name == name:
        name = f"{name}_archive"
    path, checksum = folder / name, file_hash or md5_hash
    algorithm = _ALGORITHMS.get(len(checksum or ""), "sha256") if hash_algorithm == "auto" else hash_algorithm
    is_kept = os.path.isfile(path) and not force_download and _has(path, checksum, algorithm)
    if not is_kept:
        if source is None:
            wrong = f"the {algorithm} of {path} is not {checksum}"
            reason = wrong if os.path.isfile(path) else f"{path} does not exist"
            raise DataError(f"get_file: {reason}, and dptrain does not download {origin}: put the file there")
        _copy(source, path, checksum, algorithm)
    if not extract:
        return str(path)
    try:
        return str(_extracted(path, unpacked, archive_format, max_bytes, anew=not is_kept))
    except DataError:
        if not is_kept:  # else another origin would not be looked at
            path.unlink(missing_ok=True)
        raise


def keras_home(cache_dir: str | Path | None = None) -> Path:
    """Return Keras' cache: by default KERAS_HOME, else ~/.keras."""
    # Not Path.expanduser, which raises where there is no home.
    return Path(os.path.expanduser(cache_dir or os.environ.get("KERAS_HOME") or "~/.keras"))


def _local(origin: str | Path) -> Path | None:
    """Return the path of an origin on this machine; None for another address."""
    address = _address(origin)
    if address.scheme not in ("", "file"):
        return None
    path = Path(unquote(address.path) if address.scheme else origin)
    if not os.path.isfile(path):  # False for names that cannot be, unlike Path.is_file
        raise DataError(f"get_file: {short(str(path))} is not a file on this machine")
    return path


def _address(origin: str | Path) -> ParseResult:
    try:
        return urlparse(str(origin))
    except ValueError as error:
        raise ConfigError(f"get_file: origin = {short(origin)}: {error}") from error


def _has(path: Path, checksum: str | None, algorithm: str) -> bool:
    if checksum is None:
        return True
    if algorithm not in ("md5", "sha256"):
        raise ConfigError(f"hash_algorithm = {algorithm!r}: expected 'auto', 'sha256' or 'md5'")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest() == checksum.lower()


def require_checksum(path: Path, checksum: str | None, algorithm: str = "auto") -> None:
    """Refuse a file whose checksum differs; None accepts any."""
    kind = _ALGORITHMS.get(len(checksum or ""), "sha256") if algorithm == "auto" else algorithm
    if not _has(path, checksum, kind):
        raise DataError(f"get_file: the {kind} of {path} is not {checksum}")


def _copy(source: Path, path: Path, checksum: str | None, algorithm: str) -> None:
    """Copy a file to a temporary name, then move it into place."""
    require_checksum(source, checksum, algorithm)
    with writing(path, source.stat().st_size, advice=_ADVICE):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=".copy.")
        os.close(handle)
        try:
            shutil.copyfile(source, part)
            os.replace(part, path)
        finally:
            Path(part).unlink(missing_ok=True)


def _extracted(path: Path, folder: Path, archive_format: str | None, max_bytes: int, *, anew: bool) -> Path:
    """Return the folder of an archive's contents, unpacking it if necessary."""
    if folder.is_dir() and not anew:
        return folder
    with writing(folder, advice=_ADVICE):
        part = Path(tempfile.mkdtemp(dir=path.parent, prefix=".unpack."))
        try:
            unpack(path, part, archive_format, max_bytes)
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
            os.replace(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder
